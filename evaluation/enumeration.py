"""Exact laws by trying everything: the code that decodes runs once for every outcome of every draw it makes.

The dice are replaced and nothing else, so what is summed up is the law of the code itself, not of a copy of it.

Shapes: V tokens, L tokens of a text, N nodes, M nodes of a level.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..heads.drafter import DraftSession
from .sampling import Dice, Sampling, probabilities
from .tree import AnyTree, DynamicTree
from .verify import Judge

Result = TypeVar("Result")
Text = tuple[int, ...]


class Replay:
    """Dice that obey a script, and choose the first possible outcome behind its end. weight: the probability of it all."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = list(script)
        self.outcomes: list[int] = []  # how many there were, at each draw
        self.weight = 1.0

    def __call__(self, weights: Tensor) -> Tensor:
        picked = [self._pick(row) for row in weights.reshape(-1, weights.shape[-1])]
        return torch.tensor(picked, dtype=torch.long).reshape(weights.shape[:-1])

    def _pick(self, weights: Tensor) -> int:
        possible = weights.nonzero()[:, 0].tolist()
        turn = len(self.outcomes)
        if turn == len(self.script):
            self.script.append(0)
        self.outcomes.append(len(possible))
        chosen = int(possible[self.script[turn]])
        self.weight *= (weights[chosen] / weights.sum()).item()
        return chosen

    def following(self) -> list[int] | None:
        """The script of the next replay, None after the last."""
        script = list(self.script)
        while script and script[-1] + 1 == self.outcomes[len(script) - 1]:
            script.pop()
        return [*script[:-1], script[-1] + 1] if script else None


def every_outcome(run: Callable[[Dice], Result]) -> Iterator[tuple[float, Result]]:
    """The probability and the result of every outcome of the draws that `run` makes."""
    script: list[int] | None = []
    while script is not None:
        replay = Replay(script)
        result = run(replay)
        yield replay.weight, result
        script = replay.following()


def total_variation(a: Tensor, b: Tensor) -> float:
    return 0.5 * (a - b).abs().sum().item()


class Tables:
    """A random language model as tables: logits after every text of at most `length` of its V tokens, all of them different.
    known: how many tokens are possible after each text; None is all."""

    def __init__(
        self, vocab: int, length: int, scale: float, generator: torch.Generator, known: int | None = None
    ) -> None:  # fmt: skip
        self.vocab = vocab
        self.rows = {
            text: torch.randn(vocab, generator=generator, dtype=torch.float64) * scale
            for size in range(length + 1)
            for text in itertools.product(range(vocab), repeat=size)
        }
        for row in self.rows.values():
            row[torch.randperm(vocab, generator=generator)[vocab if known is None else known :]] = float("-inf")

    def logits(self, text: Sequence[int]) -> Tensor:
        return self.rows[tuple(text)]

    def law(self, text: Text, sampling: Sampling, before: Text) -> Tensor:
        """The processed distribution [V] after a text. before: what the repetition penalty knows besides the text."""
        present = None
        if sampling.repetition_penalty != 1:
            present = torch.zeros(self.vocab, dtype=torch.bool)
            present[list(before + text)] = True
        return probabilities(self.logits(text), sampling, present)

    def joint(self, text: Text, length: int, sampling: Sampling, before: Text) -> Tensor:
        """The law of the next `length` tokens of plain sampling: [V] * length."""
        if length == 0:
            return torch.ones((), dtype=torch.float64)
        law = self.law(text, sampling, before)
        return torch.stack([law[v] * self.joint((*text, v), length - 1, sampling, before) for v in range(self.vocab)])


class TableSession(DraftSession):
    """Drafts from tables; `paths` are those of the nodes expanded so far."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.paths: list[Text] = []

    def observe(self, *_: Any) -> Tensor:
        return self.log_q([()])[:, 0]

    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        paths = [
            ((*self.paths[parent], token) if parent >= 0 else (token,))
            for token, parent in zip(ids[0].tolist(), parents[0].tolist(), strict=True)
        ]
        self.paths += paths
        return self.log_q(paths)

    def log_q(self, paths: Sequence[Text]) -> Tensor:
        return torch.stack([self.tables.logits(path) for path in paths]).log_softmax(-1)[None]

    def keep_rows(self, rows: list[int]) -> None:
        raise AssertionError("one row stays one row")


BEFORE = (0, 1)  # the prompt and the root of every enumerated round


def one_round(target: Tables, drafter: Tables, tree: AnyTree, sampling: Sampling, draw: Dice) -> Text:
    """What one round of drafting and verification emits after BEFORE, by the code that decodes."""
    root, every = torch.tensor(BEFORE[-1:]), torch.arange(target.vocab)
    judge = Judge(sampling, draw, tree, [BEFORE[:-1]], target.vocab, root.device)
    session = TableSession(drafter)
    log_q = session.observe()
    if isinstance(tree, DynamicTree):
        drafted = tree.grow(session, root, log_q, every)
    else:
        drafted = tree.grow(session, root, log_q, every, judge.draw)
    parents, ids = drafted.parents[0].tolist(), drafted.ids[0].tolist()
    paths: list[Text] = [()]
    for node in range(1, len(parents)):
        paths.append((*paths[max(parents[node], 0)], ids[node]))
    logits = torch.stack([target.logits(path) for path in paths])[None]
    path, accepted, bonus = judge.path(drafted, judge.read(logits))
    return (*(ids[node] for node in path[0, 1 : 1 + int(accepted)].tolist()), int(bonus))


def round_law(target: Tables, drafter: Tables, tree: AnyTree, sampling: Sampling) -> tuple[Tensor, int]:
    """The law of the first depth + 1 tokens when a round is followed by plain sampling ([V] * (depth + 1)), and the number of
    outcomes that were tried. If it is plain sampling's, so is that of any number of rounds."""
    length = tree.depth + 1
    found = torch.zeros([target.vocab] * length, dtype=torch.float64)
    rest: dict[Text, Tensor] = {}
    count = 0
    for weight, text in every_outcome(lambda draw: one_round(target, drafter, tree, sampling, draw)):
        if text not in rest:
            rest[text] = target.joint(text, length - len(text), sampling, BEFORE)
        found[text] += weight * rest[text]
        count += 1
    return found, count
