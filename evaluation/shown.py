"""What the decoding loop shows a head: rounds over a tree that accept most of what is drafted, since the drafts are the text
that the verifier is known to write.

The true token is the root's second child, and the first below it: the nodes that are accepted do not lie side by side.

Shapes: B rows, T tokens, V verifier ids.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..heads.batch import Batch
from ..heads.drafter import Drafter, DraftSession
from ..heads.verifier import Features, Verifier
from .decode import speculate
from .parity import Texts
from .tree import StaticTree

TREE = StaticTree([[0], [1], [0, 0], [1, 0]])


class Known(Drafter):
    """states: by text, those that the loop has shown; following: the tokens after them."""

    def __init__(self, texts: Texts, needs: tuple[int, ...], vocab_size: int) -> None:
        self.texts, self.reads = texts.batch.ids.tolist(), needs
        self.target_ids = torch.arange(vocab_size, device=texts.batch.ids.device)
        self.states: list[list[Features]] = [[] for _ in texts.starts]
        self.following: list[list[int]] = [[] for _ in texts.starts]

    @property
    def needs(self) -> tuple[int, ...]:
        return self.reads

    @property
    def depth(self) -> None:
        return None

    def first_draft(self, batch: Batch, features: Features, verifier: Verifier, where: Tensor) -> None:
        return None

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> "KnownSession":
        return KnownSession(self, batch)


class KnownSession(DraftSession):
    def __init__(self, drafter: Known, batch: int) -> None:
        self.drafter, self.rows, self.level = drafter, list(range(batch)), 0

    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        for i, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            self.drafter.states[row].append(Features(features.last[i, :count], features.layers[i, :count]))
            self.drafter.following[row] += next_ids[i, :count].tolist()
        self.level = 0
        return self.log_q()[:, 0]

    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        self.level += 1
        return self.log_q().expand(-1, ids.shape[1], -1)

    def log_q(self) -> Tensor:
        """[B, 1, V] of the token behind the root and `level` drafts; at level 0 another one is likelier."""
        size, drafter = len(self.drafter.target_ids), self.drafter
        places = [len(drafter.following[row]) + 1 + self.level for row in self.rows]
        true = [drafter.texts[row][min(at, len(drafter.texts[row]) - 1)] for row, at in zip(self.rows, places, strict=True)]
        index = torch.tensor(true, device=drafter.target_ids.device)[:, None, None]
        scores = torch.full((len(true), 1, size), -9.0, device=index.device).scatter(2, (index + 1) % size, -float(self.level))
        return scores.scatter(2, index, -0.5)

    def keep_rows(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


@torch.no_grad()
def shown(verifier: Verifier, texts: Texts, needs: Sequence[int]) -> list[Features]:
    """Of each text the states [T, ..] that rounds show of it, up to the first token that they decide otherwise (a tie); none of
    one that ends before its first round."""
    drafter = Known(texts, tuple(needs), verifier.facts.vocab_size)
    lengths = texts.batch.lengths.tolist()
    prompts = [ids[:start] for ids, start in zip(drafter.texts, texts.starts, strict=True)]
    tokens = max(end - start for end, start in zip(lengths, texts.starts, strict=True))
    speculate(verifier, drafter, TREE, prompts, tokens)
    found = []
    for row, (states, following) in enumerate(zip(drafter.states, drafter.following, strict=True)):
        text = drafter.texts[row][1 : lengths[row]]
        same = next((i + 1 for i, (a, b) in enumerate(zip(following, text, strict=False)) if a != b), len(text))
        states = states or [Features(texts.trained.last[row, :0], texts.trained.layers[row, :0])]
        last, layers = (torch.cat(part)[:same] for part in ([s.last for s in states], [s.layers for s in states]))
        found.append(Features(last, layers))
    return found
