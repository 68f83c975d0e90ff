"""Where the assistant's turns stand in a rendered conversation.

A turn is what the verifier would generate: everything after the generation prompt, up to and including the end of turn.
Nothing is found by searching for the words of an answer or for a header, because users quote answers and type headers.
Instead the conversation is rendered again with one thing changed, and the two texts are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from ..errors import UserError

Messages = list[dict[str, Any]]
Span = tuple[int, int]  # characters of the rendered text, the end exclusive

# Stands in for a message's content. DEL survives JSON quoting and trimming, and no chat begins with it.
_MARK = "\x7fheadstart\x7f"
_THINKING = re.compile(r"[<\[◁][^<\[◁]*(?:think|thought)", re.IGNORECASE)
_REFUSALS = (TemplateError, TypeError, ValueError, AttributeError, LookupError)  # a template is a program
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def template_name(tokenizer: Any) -> str:
    """How error messages call the chat template."""
    return f"the chat template of {tokenizer.name_or_path or type(tokenizer).__name__}"


def render_text(tokenizer: Any, messages: Messages, tools: list | None = None, prompt: bool = False) -> str:
    """Render messages as text, with the generation prompt when `prompt`. Raises UserError if the template refuses."""
    if not tokenizer.chat_template:
        raise UserError(f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template; use an instruct model's")
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
    except _REFUSALS as error:
        raise UserError(f"{template_name(tokenizer)} refuses the conversation: {' '.join(str(error).split())}") from None


def assistant_spans(tokenizer: Any, messages: Messages, tools: list | None = None) -> tuple[str, list[Span]]:
    """The rendered text and the span of each assistant turn in it, in order.

    A turn that the template shortens (thinking of earlier turns) gets the span of what is left of it. An earlier turn
    that is closed otherwise than the last one would be is supervised up to its last word: nobody generates that end.
    Raises UserError when the template refuses the conversation or hides where a turn begins or ends.
    """
    template = tokenizer.get_chat_template(None, tools) if tokenizer.chat_template else ""
    if _GENERATION.search(template):
        return _marked_spans(tokenizer, template, messages, tools)
    located = _Rendering(tokenizer, messages, tools)
    return located.text, [located.span(turn) for turn, message in enumerate(messages) if message["role"] == "assistant"]


def shared_prefix(one: Sequence, other: Sequence) -> int:
    """The number of items that both begin with."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(index for index in range(shorter) if one[index] != other[index])


def _marked_spans(tokenizer: Any, template: str, messages: Messages, tools: list | None) -> tuple[str, list[Span]]:
    text = render_text(tokenizer, messages, tools)
    rendered, marked = render_jinja_template(
        conversations=[[{key: value for key, value in message.items() if value is not None} for message in messages]],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    assert rendered == [text]
    closing = end_of_turn(tokenizer, template, tools)
    openings = [len(prompt) for prompt in _prompts(tokenizer, messages, tools) if text.startswith(prompt)]
    spans = []
    for start, end in marked[0]:
        start = max([start, *(opening for opening in openings if start < opening < end)])
        spans += [(start, _close(text, start, end, closing))] if start < end else []
    return text, spans


def _prompts(tokenizer: Any, messages: Messages, tools: list | None) -> Iterator[str]:
    """What the verifier was given before each assistant's turn: some markers take in the header as well."""
    for turn, message in enumerate(messages):
        if turn and message["role"] == "assistant":
            yield render_text(tokenizer, messages[:turn], tools, prompt=True)


def _close(text: str, start: int, end: int, closing: str) -> int:
    """Authors of templates disagree on whether the markers take in the end of turn and the line break behind it."""
    if text.startswith(closing, end):
        return end + len(closing)
    found = text.rfind(closing, start, end) if closing else -1
    return end if found < 0 else found + len(closing)


_closings: WeakKeyDictionary[Any, dict[tuple[str, bool], str]] = WeakKeyDictionary()  # asked once a template


def end_of_turn(tokenizer: Any, template: str, tools: list | None = None) -> str:
    """What `template` writes between an answer and the end of the turn's last token, "" if it closes no turn."""
    known = _closings.setdefault(tokenizer, {})
    key = (template, tools is None)  # some templates cannot do without tools; which tools does not matter
    if key not in known:
        known[key] = _find_end_of_turn(tokenizer, tools)
    return known[key]


def _find_end_of_turn(tokenizer: Any, tools: list | None) -> str:
    probe = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": _MARK}]
    text = render_text(tokenizer, probe, tools)
    if text.count(_MARK) != 1:
        raise UserError(f"{template_name(tokenizer)} does not write the answer once, so no mask can be made")
    tail = text.partition(_MARK)[2]
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    first = re.search("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)", tail)
    return tail[: first.end()] if first else tail.rstrip()


class _Rendering:
    """One rendered conversation and the questions it takes to locate a turn in it."""

    def __init__(self, tokenizer: Any, messages: Messages, tools: list | None) -> None:
        self.tokenizer, self.messages, self.tools = tokenizer, messages, tools
        self.text = render_text(tokenizer, messages, tools)
        self.template = tokenizer.get_chat_template(None, tools)

    def span(self, turn: int) -> Span:
        start = self._start(turn)
        end = self._end(turn, start)
        if not start <= end:
            self._fail(turn)
        self._check_tool_calls(turn, self.text[start:end])
        return start, end

    def _start(self, turn: int) -> int:
        """Where generation would begin. Most templates only append, so the prompt is a prefix of the text."""
        if turn == 0:
            return len(self._around(turn)[0])
        prompt = render_text(self.tokenizer, self.messages[:turn], self.tools, prompt=True)
        return len(prompt) if self.text.startswith(prompt) else self._start_in_rewritten(turn)

    def _start_in_rewritten(self, turn: int) -> int:
        """The template changes earlier turns once a later one follows: compare only what follows the last message."""
        behind = len(self.text) - len(self._around(turn - 1)[1])  # the character after the last message's content
        asked = [*self.messages[: turn - 1], self._with_mark(turn - 1)]
        opening = render_text(self.tokenizer, asked, self.tools, prompt=True).rpartition(_MARK)[2]
        if self.text.startswith(opening, behind):
            return behind + len(opening)
        # A prompt may go on to open a block of thinking, which the finished turn shows otherwise or not at all.
        thinking = _THINKING.search(opening)
        if thinking and self.text.startswith(opening[: thinking.start()], behind):
            return behind + thinking.start()
        before = self._around(turn)[0]
        closed = render_text(self.tokenizer, asked, self.tools).rpartition(_MARK)[2]
        header = opening.removeprefix(closed)
        ends_there = opening.startswith(before[behind:]) or (header and before.endswith(header))
        if self.text.startswith(before) and ends_there:
            return len(before)
        return self._fail(turn)

    def _end(self, turn: int, start: int) -> int:
        """Where the turn's last token ends: the last end of turn before the next message's content."""
        closing = end_of_turn(self.tokenizer, self.template, self.tools)
        found = self.text.rfind(closing, start, self._next_content(turn)) if closing else -1
        if found >= 0:
            return found + len(closing)
        if not self.messages[turn].get("tool_calls"):
            return len(self.text) - len(self._around(turn)[1])
        until = render_text(self.tokenizer, self.messages[: turn + 1], self.tools)  # tool calls may close differently
        if not self.text.startswith(until):
            self._fail(turn)
        return len(until.rstrip())

    def _check_tool_calls(self, turn: int, written: str) -> None:
        """Some templates know nothing of tools and would teach the head to stop where the verifier makes a call."""
        for call in self.messages[turn].get("tool_calls") or []:
            function = call.get("function") or call
            if isinstance(function, dict) and str(function.get("name", "")) not in written:
                raise UserError(f"{template_name(self.tokenizer)} leaves out the tool call of message {turn + 1}")

    def _next_content(self, turn: int) -> int:
        if turn + 1 == len(self.messages):
            return len(self.text)
        return shared_prefix(self.text, self._around(turn + 1)[0])

    def _around(self, turn: int) -> tuple[str, str]:
        """The text before and after the content of a message, as it is when that content is the mark alone."""
        marked = [*self.messages[:turn], self._with_mark(turn), *self.messages[turn + 1 :]]
        before, mark, after = render_text(self.tokenizer, marked, self.tools).partition(_MARK)
        if not mark or _MARK in after or not self.text.endswith(after):
            self._fail(turn)
        return before, after

    def _with_mark(self, turn: int) -> dict[str, Any]:
        return {**self.messages[turn], "content": _MARK}

    def _fail(self, turn: int) -> NoReturn:
        raise UserError(
            f"{template_name(self.tokenizer)} hides where message {turn + 1} ({self.messages[turn]['role']}) stands, "
            "so no exact mask can be made; add {% generation %} markers to the template"
        )
