"""Lookahead decoding (Fu 2024): the verifier guesses its own future in parallel, and what it guessed becomes n-grams to draft.

Besides the tree the verifier reads a window of `window` columns and n - 1 levels: Jacobi iterations of the coming tokens, one
level older than the next. What it would write after the newest level completes an n-gram in each column; a pool keeps the
latest ones by their first token, and those that begin with the root are the drafts. Nothing is trained, and nothing of the
window is ever emitted.

Shapes: B rows, L = n - 1 levels, W columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..heads.drafter import Beside
from ..heads.verifier import Verifier
from .ngrams import NgramDrafter, NgramSession


class Lookahead(NgramDrafter):
    """ngram: n, so that a draft has n - 1 tokens; guesses: n-grams kept a first token."""

    def __init__(self, vocab_size: int, device: torch.device, window: int = 8, ngram: int = 4, guesses: int = 8) -> None:
        super().__init__(vocab_size, device)
        self.window, self.levels, self.guesses = window, ngram - 1, guesses
        self.read_beside = self.window * self.levels
        level = torch.arange(self.levels).repeat_interleave(window)
        column = torch.arange(window).repeat(self.levels)
        first = (level == 0)[None] & (column[None] <= column[:, None])  # the oldest level up to the own column
        own = (column[None] == column[:, None]) & (level[None] <= level[:, None])
        self.seen = (first | own)[None].to(device)
        self.offsets = (1 + level + column)[None].to(device)

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> "LookaheadSession":
        return LookaheadSession(self, batch)


class LookaheadSession(NgramSession):
    def __init__(self, drafter: Lookahead, batch: int) -> None:
        super().__init__(len(drafter.target_ids), drafter.target_ids.device)
        self.drafter = drafter
        self.roots = [0] * batch
        self.pools: list[dict[int, dict[tuple[int, ...], None]]] = [{} for _ in range(batch)]
        self.window = torch.empty(0)  # [B, L, W]

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """The first guess at the future: the prompt once more, as good as any."""
        size = self.drafter.read_beside
        rows = [[prompt[i % len(prompt)] for i in range(size)] for prompt in prompts]
        self.window = torch.tensor(rows, device=self.device).unflatten(1, (self.drafter.levels, self.drafter.window))

    def take(self, row: int, tokens: Sequence[int]) -> None:
        self.roots[row] = tokens[-1]

    def guesses(self, row: int) -> list[list[int]]:
        return [list(gram) for gram in reversed(self.pools[row].get(self.roots[row], {}))]

    def beside(self) -> Beside:
        return Beside(self.window.flatten(1), self.drafter.offsets, self.drafter.seen, self.drafter.window)

    def learn(self, choice: Tensor) -> None:
        grams = torch.cat([self.window, choice[:, None]], 1)
        self.window = grams[:, 1:]
        for pool, columns in zip(self.pools, grams.transpose(1, 2).tolist(), strict=True):
            for first, *rest in columns:
                known = pool.setdefault(first, {})
                known.pop(tuple(rest), None)  # seen again: the latest once more
                known[tuple(rest)] = None
                if len(known) > self.drafter.guesses:
                    del known[next(iter(known))]

    def keep_rows(self, rows: list[int]) -> None:
        self.roots, self.pools = [self.roots[row] for row in rows], [self.pools[row] for row in rows]
        self.window = self.window[rows]
