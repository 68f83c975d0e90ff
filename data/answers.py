"""Let the verifier answer the prompts itself: a head learns to imitate the verifier, not the author of a data set.

Every answer is stored under the hash of its prompt's token ids as soon as its batch is done, so a killed run goes on where it
was and a rerun costs nothing.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ..heads.generate import generate_with_features
from ..heads.verifier import Features, Verifier
from .chat import Sample, prompt_ids
from .conversations import Conversation


class AnswerStore:
    """Greedy answers (token ids) of one verifier at one length limit: a JSON line each, appended and synced by batch."""

    def __init__(self, folder: Path, fingerprint: str, answer_tokens: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{fingerprint[:16]}-{answer_tokens}.jsonl"
        self.answers: dict[str, list[int]] = {}
        if self.path.exists():
            complete = [line for line in self.path.read_bytes().split(b"\n")[:-1] if line]
            for line in complete:
                row = json.loads(line)
                self.answers[row["prompt"]] = row["answer"]
            # a line torn by a kill would swallow the next one
            os.truncate(self.path, sum(len(line) + 1 for line in complete))

    def get(self, prompt: Sequence[int]) -> list[int] | None:
        return self.answers.get(digest(prompt))

    def add(self, prompts: Iterable[Sequence[int]], answers: Iterable[list[int]]) -> None:
        rows = {digest(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
        self.answers |= rows
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"prompt": key, "answer": answer}) + "\n" for key, answer in rows.items())
            file.flush()
            os.fsync(file.fileno())


def digest(prompt: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()


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
) -> list[Answered]:
    """Replace every answer of the conversations, in order, by the verifier's own, and answer what ends with a question.

    Returns a sample a conversation, in the order given: the last prompt and its answer, token for token as decoded. Earlier
    answers are supervised where they stand in it unchanged. With `layers`, the states of newly written answers are kept:
    training on them needs no second pass of the verifier.
    """
    dialogues = [Dialogue(c, split_turns(c.messages), [], [], []) for c in conversations]
    while pending := [d for d in dialogues if d.waiting]:
        for dialogue in pending:
            dialogue.messages += dialogue.waiting.pop(0)
            dialogue.prompts.append(prompt_ids(verifier.tokenizer, dialogue.messages, dialogue.conversation.tools))
        answer_missing(verifier, pending, store, answer_tokens, batch, layers, on_tokens)
        for dialogue in pending:
            add_answer(dialogue, store.get(dialogue.prompts[-1]) or [], verifier)
    return [to_sample(dialogue) for dialogue in dialogues if dialogue.answers]


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
    """Generate what the store lacks, in batches of prompts of like length."""
    missing = [d for d in dialogues if store.get(d.prompts[-1]) is None]
    missing.sort(key=lambda d: len(d.prompts[-1]))
    for start in range(0, len(missing), batch):
        part = missing[start : start + batch]
        prompts = [dialogue.prompts[-1] for dialogue in part]
        final = any(not dialogue.waiting for dialogue in part)  # earlier turns are read again with the last one
        answers, features = generate_with_features(verifier, prompts, answer_tokens, layers if final else None, on_tokens)
        store.add(prompts, answers)
        for dialogue, states in zip(part, features, strict=False):
            dialogue.features = states


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
