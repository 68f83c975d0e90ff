"""Conversations to token ids with an exact mask of the tokens the verifier would generate."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UserError
from .conversations import Conversation
from .skips import BadRow, OnBad, Skips
from .spans import Span, assistant_spans, end_of_turn, render_text, shared_prefix, template_name


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation as the verifier sees it.

    ids: token ids. mask: one bool a token, true for each token of an assistant's turn and its end of turn. The other
    fields come from the conversation; `cut` is the number of tokens that truncation took off.
    """

    ids: list[int]
    mask: list[bool]
    id: str = ""
    category: str | None = None
    split: str | None = None
    source: str = ""
    cut: int = 0

    @property
    def has_supervised(self) -> bool:
        return any(self.mask)


def counts(samples: Iterable[Sample]) -> dict[str, int]:
    """How many samples, tokens and supervised tokens, in one pass: samples may lie on disk."""
    number, tokens, supervised = 0, 0, 0
    for sample in samples:
        number += 1
        tokens += len(sample.ids)
        supervised += sum(sample.mask)
    return {"samples": number, "tokens": tokens, "supervised": supervised}


def prompt_ids(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: list | None = None) -> list[int]:
    """The ids to generate from: the messages and the generation prompt. Raises UserError if the template refuses."""
    return _tokenize(tokenizer, render_text(tokenizer, list(messages), tools, prompt=True))


def render(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: list | None = None, cut_short: bool = False) -> Sample:
    """Tokens and mask of a whole conversation; the ids are those of one `apply_chat_template` over all of it.

    cut_short: the last answer was stopped in its middle, so the sample ends with its last token; nobody wrote its end.
    A token that lies across the edge of a turn belongs to the turn. The mask is empty only for a conversation without
    an assistant's turn. Raises UserError when the template refuses the messages or a turn cannot be located.
    """
    text, spans = assistant_spans(tokenizer, list(messages), tools)
    if cut_short:
        start, end = spans[-1]
        closing = end_of_turn(tokenizer, tokenizer.get_chat_template(None, tools), tools)
        if not text.endswith(closing, start, end):
            raise UserError(f"{template_name(tokenizer)} hides where an answer that was cut short ends")
        spans[-1] = (start, end - len(closing))
    ids, mask = _mask(tokenizer, text, spans)
    if cut_short and any(mask):
        length = len(mask) - mask[::-1].index(True)
        ids, mask = ids[:length], mask[:length]
    if not any(mask) and any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{template_name(tokenizer)} leaves nothing of the assistant's turns to learn from")
    return Sample(ids, mask)


def truncate(sample: Sample, max_length: int) -> Sample:
    """The first `max_length` tokens: what is left of an answer stays supervised."""
    cut = len(sample.ids) - max_length
    if cut <= 0:
        return sample
    return replace(sample, ids=sample.ids[:max_length], mask=sample.mask[:max_length], cut=sample.cut + cut)


def samples(
    tokenizer: Any, conversations: Iterable[Conversation], max_length: int, skips: Skips, on_bad: OnBad = "error"
) -> Iterator[Sample]:
    """Render and truncate conversations one by one; those with nothing to learn from are counted in `skips`.

    Raises UserError for a conversation that cannot be rendered (unless `on_bad` is "skip") and, at the end, when not
    one conversation gave a sample.
    """
    given, dropped = 0, Counter[str]()
    for conversation in conversations:
        given += 1
        try:
            sample = truncate(sample_of(tokenizer, conversation), max_length)
        except BadRow as bad:
            skips.refuse(bad, conversation.source, on_bad)
            dropped[bad.reason] += 1
            continue
        if sample.has_supervised:
            yield sample
            continue
        reason = _why_empty(conversation, max_length)
        skips.drop(reason, conversation.source)
        dropped[reason] += 1
    if given == dropped.total():
        raise UserError(_nothing_left(dropped, given))


def sample_of(tokenizer: Any, conversation: Conversation) -> Sample:
    """A conversation as a whole. Raises BadRow when it cannot be rendered."""
    try:
        sample = render(tokenizer, conversation.messages, conversation.tools, conversation.cut_short)
    except UserError as error:
        raise BadRow("no rendering", str(error)) from None
    return replace(
        sample,
        id=conversation.id,
        category=conversation.category,
        split=conversation.split,
        source=conversation.source,
    )


_TOO_LONG = "no supervised token after max_length="
_NO_ANSWER = "no assistant turn"
_REMEDY = {_TOO_LONG: "raise max_length", _NO_ANSWER: "let the verifier answer the prompts first"}


def _why_empty(conversation: Conversation, max_length: int) -> str:
    answered = any(message["role"] == "assistant" for message in conversation.messages)
    return f"{_TOO_LONG}{max_length}" if answered else _NO_ANSWER


def _nothing_left(dropped: Counter[str], given: int) -> str:
    told = [f"{number} of {given} rows have {reason}" for reason, number in dropped.most_common()]
    told += [remedy for start, remedy in _REMEDY.items() if any(reason.startswith(start) for reason in dropped)]
    return "; ".join(told or ["0 conversations"])


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    # A rendered chat carries its own special tokens; adding them here would double the beginning of sequence.
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _mask(tokenizer: Any, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
    if not tokenizer.is_fast:
        return _mask_by_prefixes(tokenizer, text, spans)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    ends = [end for _, end in offsets]
    mask = [False] * len(offsets)
    for start, end in spans:
        token = bisect_right(ends, start)  # the first token with a character behind the start
        while token < len(offsets) and offsets[token][0] < end:
            mask[token] = True
            token += 1
    return encoded["input_ids"], mask


def _mask_by_prefixes(tokenizer: Any, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
    """For tokenizers written in Python, which know no offsets: tokenise the text up to each edge of a turn."""
    ids = _tokenize(tokenizer, text)
    mask = [False] * len(ids)
    for start, end in spans:
        before, until = _tokenize(tokenizer, text[:start]), _tokenize(tokenizer, text[:end])
        first = shared_prefix(before, ids)
        if ids[: len(until)] != until:
            raise UserError(f"{tokenizer.name_or_path}: a token lies across the end of a turn; use a fast tokenizer")
        mask[first : len(until)] = [True] * (len(until) - first)
    return ids, mask
