"""Let the verifier answer the prompts itself: a head learns to imitate the verifier, not the author of a data set.

Every answer is stored under the hash of its prompt's token ids as soon as its batch is done.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from ..errors import UserError
from ..heads.generate import Choose, generate_with_features
from ..heads.verifier import Features, Verifier
from .answer_store import AnswerStore, digest
from .chat import Sample, prompt_ids, sample_of
from .conversations import Conversation
from .skips import BadRow
from .spans import shared_prefix

Refuse = Callable[[BadRow, str], None]  # told of a conversation that cannot be rendered and where it stands


@dataclass
class Dialogue:
    """A conversation on its way: `waiting` holds the message groups ahead, each of which asks for an answer."""

    conversation: Conversation
    waiting: list[list[dict[str, Any]]]
    messages: list[dict[str, Any]]
    prompts: list[list[int]]  # what each answer so far was written after
    answers: list[list[int]]
    features: Features | None = None  # of the last prompt and answer but its last token, where they were just decoded


@dataclass(frozen=True)
class Answered:
    """A sample of the verifier's own answers; features where answering computed them anyway."""

    sample: Sample
    features: Features | None


def regenerate(
    verifier: Verifier,
    conversations: Sequence[Conversation],
    store: AnswerStore,
    answer_tokens: int,
    batch: int,
    layers: Sequence[int] | None = None,
    on_tokens: Callable[[int], None] = lambda count: None,
    refuse: Refuse | None = None,
) -> list[Answered]:
    """Replace every answer of the conversations, in order, by the verifier's own, and answer what ends with a question.

    Returns a sample a conversation, in the order given: the last prompt and its answer, token for token as decoded. Earlier
    answers are supervised where they stand in it unchanged. With `layers`, the states of newly written greedy answers are
    kept: training on them needs no second pass of the verifier. Without `refuse` a conversation that the chat template
    refuses raises UserError.
    """
    dialogues = [Dialogue(c, split_turns(c.messages), [], [], []) for c in conversations]
    write_answers(verifier, dialogues, store, answer_tokens, batch, layers, on_tokens, refuse or raise_refusal)
    return [to_sample(dialogue) for dialogue in dialogues if dialogue.answers]


def complete(
    verifier: Verifier,
    conversations: Sequence[Conversation],
    store: AnswerStore,
    answer_tokens: int,
    batch: int,
    layers: Sequence[int] | None = None,
    on_tokens: Callable[[int], None] = lambda count: None,
    refuse: Refuse | None = None,
) -> list[Answered]:
    """Answer only conversations that end without an answer. Answers of the file stay, and are supervised as well."""
    refuse = refuse or raise_refusal
    dialogues = [Dialogue(c, [] if has_answer(c) else [list(c.messages)], [], [], []) for c in conversations]
    write_answers(verifier, dialogues, store, answer_tokens, batch, layers, on_tokens, refuse)
    completed = []
    for dialogue in dialogues:
        try:
            if dialogue.answers:
                completed.append(with_given_answers(to_sample(dialogue), dialogue, verifier.tokenizer))
            elif has_answer(dialogue.conversation):
                completed.append(Answered(sample_of(verifier.tokenizer, dialogue.conversation), None))
        except BadRow as bad:
            refuse(bad, dialogue.conversation.source)
    return completed


def has_answer(conversation: Conversation) -> bool:
    return conversation.messages[-1]["role"] == "assistant"


def raise_refusal(bad: BadRow, source: str) -> None:
    raise UserError(f"{source}: {bad}")


def write_answers(
    verifier: Verifier,
    dialogues: Sequence[Dialogue],
    store: AnswerStore,
    answer_tokens: int,
    batch: int,
    layers: Sequence[int] | None,
    on_tokens: Callable[[int], None],
    refuse: Refuse,
) -> None:
    """Answer everything that waits, a turn of every dialogue at a time. One that is refused keeps no answers."""
    if store.temperature:
        layers = None  # states go with the verifier's first choice, which a drawn token need not be
    while pending := [d for d in dialogues if d.waiting]:
        for dialogue in pending:
            dialogue.messages += dialogue.waiting.pop(0)
            try:
                dialogue.prompts.append(prompt_ids(verifier.tokenizer, dialogue.messages, dialogue.conversation.tools))
            except UserError as error:
                refuse(BadRow("no rendering", str(error)), dialogue.conversation.source)
                dialogue.waiting, dialogue.prompts, dialogue.answers = [], [], []
        asked = [d for d in pending if d.prompts]
        answer_missing(verifier, asked, store, answer_tokens, batch, layers, on_tokens)
        for dialogue in asked:
            add_answer(dialogue, store.get(dialogue.prompts[-1]) or [], verifier)


def split_turns(messages: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Groups of messages, each followed by an answer (dropped here: it will be replaced)."""
    groups: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            groups[-1].append(message)
        elif groups[-1]:
            groups.append([])
    return [group for group in groups if group]


def answer_missing(
    verifier: Verifier,
    dialogues: Sequence[Dialogue],
    store: AnswerStore,
    answer_tokens: int,
    batch: int,
    layers: Sequence[int] | None,
    on_tokens: Callable[[int], None],
) -> None:
    """Generate what the store lacks, in batches of prompts of like length; a prompt that comes twice is asked once."""
    lacking: dict[str, Dialogue] = {}
    for dialogue in dialogues:
        if store.get(dialogue.prompts[-1]) is None:
            lacking.setdefault(digest(dialogue.prompts[-1]), dialogue)
    missing = sorted(lacking.values(), key=lambda d: len(d.prompts[-1]))
    for start in range(0, len(missing), batch):
        part = missing[start : start + batch]
        prompts = [dialogue.prompts[-1] for dialogue in part]
        final = any(not dialogue.waiting for dialogue in part)  # earlier turns are read again with the last one
        choose = drawing(prompts, store.temperature, store.seed) if store.temperature else None
        answers, features = generate_with_features(
            verifier, prompts, answer_tokens, layers if final else None, on_tokens, choose
        )
        store.add(prompts, answers)
        for dialogue, states in zip(part, features, strict=False):
            dialogue.features = states


def drawing(prompts: Sequence[Sequence[int]], temperature: float, seed: int) -> Choose:
    """Draws each token from softmax(logits / temperature), with dice of the prompt's own: whatever shares its batch."""
    dice = [random.Random(f"{seed}-{digest(prompt)}") for prompt in prompts]

    def choose(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        exact = torch.float32 if logits.device.type == "mps" else torch.float64  # which that device does not have
        shares = torch.softmax(logits.to(exact) / temperature, -1).cumsum(-1)
        thrown = torch.tensor([[dice[row].random()] for row in rows], dtype=exact, device=logits.device)
        drawn = torch.searchsorted(shares, thrown * shares[:, -1:], right=True)
        return drawn[:, 0].clamp(max=logits.shape[-1] - 1)

    return choose


def add_answer(dialogue: Dialogue, answer: list[int], verifier: Verifier) -> None:
    finished = bool(answer) and answer[-1] in verifier.facts.stop_ids
    text = verifier.tokenizer.decode(answer[:-1] if finished else answer)
    dialogue.messages.append({"role": "assistant", "content": text})
    dialogue.answers.append(answer)


def to_sample(dialogue: Dialogue) -> Answered:
    conversation = dialogue.conversation
    ids = dialogue.prompts[-1] + dialogue.answers[-1]
    mask = [False] * len(ids)
    for prompt, answer in zip(dialogue.prompts, dialogue.answers, strict=True):
        start, end = len(prompt), len(prompt) + len(answer)
        if ids[:end] == prompt + answer:  # else the template has rewritten this turn since
            mask[start:end] = [True] * len(answer)
    sample = Sample(ids, mask, conversation.id, conversation.category, conversation.split, conversation.source)
    return Answered(sample, None if dialogue.features is None else with_choices(dialogue.features, sample))


def with_given_answers(found: Answered, dialogue: Dialogue, tokenizer: Any) -> Answered:
    """Supervise the file's answers too, wherever they stand in the prompt as in the finished conversation."""
    if not any(message["role"] == "assistant" for message in dialogue.conversation.messages):
        return found
    finished = sample_of(tokenizer, replace(dialogue.conversation, messages=tuple(dialogue.messages)))
    same = shared_prefix(finished.ids, dialogue.prompts[-1])
    mask = [*finished.mask[:same], *found.sample.mask[same:]]
    return Answered(replace(found.sample, mask=mask), None)  # its states know only the verifier's own choices


def with_choices(states: Features, sample: Sample) -> Features:
    """Decoded states as training features: every supervised token is the verifier's own choice.

    The last token was never fed; its states stay zero, and nothing is learned from there.
    """
    learned = torch.tensor(sample.mask[1:])
    choice = torch.where(learned, torch.tensor(sample.ids[1:]), -1)
    one_row = (0, 0, 0, 1)
    return Features(
        functional.pad(states.last, one_row), functional.pad(states.layers, one_row), functional.pad(choice, (0, 1), value=-1)
    )
