"""Let the verifier answer the prompts itself: a head learns to imitate the verifier, not the author of a data set.

Every answer is stored under the hash of its prompt's token ids as soon as its batch is done, so a killed run goes on where it
was and a rerun costs nothing.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ..heads.generate import generate_with_features
from ..heads.verifier import Features, Verifier
from .chat import Sample, prompt_ids, render
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
    finished: list[bool]  # whether each answer so far ended with a stop token
    ids: list[int]  # the last prompt and its answer
    features: Features | None = None  # of those ids but the last, where they were just decoded


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

    Returns a sample a conversation, in the order given. The stop token after an answer that was cut at `answer_tokens` comes
    from the template, not from the verifier, and is not supervised. With `layers`, the states of newly written answers are
    kept: training on them needs no second pass of the verifier.
    """
    dialogues = [Dialogue(c, split_turns(c.messages), [], [], []) for c in conversations]
    while pending := [d for d in dialogues if d.waiting]:
        for dialogue in pending:
            dialogue.messages += dialogue.waiting.pop(0)
            dialogue.ids = prompt_ids(verifier.tokenizer, dialogue.messages, dialogue.conversation.tools)
        answer_missing(verifier, pending, store, answer_tokens, batch, layers, on_tokens)
        for dialogue in pending:
            add_answer(dialogue, store.get(dialogue.ids) or [], verifier)
    return [to_sample(verifier, dialogue) for dialogue in dialogues]


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
    missing = sorted((d for d in dialogues if store.get(d.ids) is None), key=lambda d: len(d.ids))
    for start in range(0, len(missing), batch):
        part = missing[start : start + batch]
        prompts = [dialogue.ids for dialogue in part]
        final = any(not dialogue.waiting for dialogue in part)  # earlier turns are read again with the last one
        answers, features = generate_with_features(verifier, prompts, answer_tokens, layers if final else None, on_tokens)
        store.add(prompts, answers)
        for dialogue, states in zip(part, features, strict=False):
            dialogue.features = states


def add_answer(dialogue: Dialogue, answer: list[int], verifier: Verifier) -> None:
    finished = bool(answer) and answer[-1] in verifier.facts.stop_ids
    text = verifier.tokenizer.decode(answer[:-1] if finished else answer)
    dialogue.messages.append({"role": "assistant", "content": text})
    dialogue.finished.append(finished)
    dialogue.ids = dialogue.ids + answer


def to_sample(verifier: Verifier, dialogue: Dialogue) -> Answered:
    conversation = dialogue.conversation
    sample = render(verifier.tokenizer, dialogue.messages, conversation.tools)
    mask = without_unwritten_stops(sample.mask, dialogue.finished)
    sample = replace(
        sample, mask=mask, id=conversation.id, category=conversation.category, split=conversation.split,
        source=conversation.source,
    )  # fmt: skip
    return Answered(sample, fit_features(dialogue, sample))


def fit_features(dialogue: Dialogue, sample: Sample) -> Features | None:
    """Decoded states as features of the rendered sample, whose template may add a few tokens behind the answer.

    None where rendering broke the text into other tokens than the verifier wrote. Positions behind the answer stay zero:
    nothing is learned there. Every supervised token is the verifier's own choice.
    """
    states, ids = dialogue.features, torch.tensor(sample.ids)
    if states is None or sample.ids[: len(dialogue.ids)] != dialogue.ids:
        return None
    behind = len(sample.ids) - len(states.last)
    choice = torch.where(torch.tensor(sample.mask[1:]), ids[1:], -1)
    return Features(
        functional.pad(states.last, (0, 0, 0, behind)),
        functional.pad(states.layers, (0, 0, 0, behind)),
        functional.pad(choice, (0, 1), value=-1),
    )


def without_unwritten_stops(mask: Sequence[bool], finished: Sequence[bool]) -> list[bool]:
    """Clear the last token of each answer (a run of true) that did not end by itself."""
    out = list(mask)
    ends = [i for i, on in enumerate(mask) if on and (i + 1 == len(mask) or not mask[i + 1])]
    for end, ended in zip(ends, finished, strict=True):
        out[end] = ended
    return out
