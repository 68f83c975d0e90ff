"""Drafting without a model: continuations that stand somewhere in the text already. Here the session that such drafters share,
and prompt lookup, which follows the last few tokens to where they stood before.

Shapes: B rows, E nodes of a trie (the root included), M nodes of one tree level, V verifier ids.
"""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..heads.batch import Batch
from ..heads.drafter import DraftSession, FreeDrafter
from ..heads.verifier import Features, Verifier

NOTHING = float("-inf")


class Trie:
    """The continuations of every row, merged where they begin alike, as tensors on the device that drafts.

    Siblings keep the order in which they were given: one is half as probable as the one before it, a single one is certain.
    """

    def __init__(self, continuations: Sequence[Sequence[Sequence[int]]], vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        rows = [branches(its) for its in continuations]
        size = max(len(row) for row in rows)
        padded = [row + [(0, -1, NOTHING)] * (size - len(row)) for row in rows]
        table = torch.tensor(padded, dtype=torch.float64).to(device)  # exact for every id
        self.ids, self.parents = table[..., 0].long(), table[..., 1].long()
        self.scores = table[..., 2].float()
        self.depth = max(len(one) for its in continuations for one in its) if size > 1 else 0
        self.nodes = size - 1

    def find(self, above: Tensor, ids: Tensor) -> Tensor:
        """[B, M]: the children of the nodes `above` with these ids, -1 where there is none."""
        same = (self.parents[:, None] == above[:, :, None]) & (self.ids[:, None] == ids[:, :, None])
        same &= above[:, :, None] >= 0
        return torch.where(same.any(-1), same.int().argmax(-1), -1)

    def log_q(self, nodes: Tensor) -> Tensor:
        """Of the children of nodes [B, M]: [B, M, V], -inf everywhere where a node has none."""
        own = (self.parents[:, None] == nodes[:, :, None]) & (nodes[:, :, None] >= 0)
        scores = torch.where(own, self.scores[:, None], NOTHING)
        out = scores.new_full((*nodes.shape, self.vocab_size), NOTHING)
        return out.scatter_reduce(2, self.ids[:, None].expand_as(scores), scores, "amax")


def branches(continuations: Sequence[Sequence[int]]) -> list[tuple[int, int, float]]:
    """Nodes (id, parent, log q) of a trie; node 0 is the root, with nothing above it."""
    place: dict[tuple[int, ...], int] = {(): 0}
    children: dict[int, list[int]] = defaultdict(list)
    nodes = [(0, -1)]
    for continuation in continuations:
        for end in range(1, len(continuation) + 1):
            path = tuple(continuation[:end])
            if path not in place:
                above = place[path[:-1]]
                place[path] = len(nodes)
                children[above].append(len(nodes))
                nodes.append((path[-1], above))
    scores = [0.0] * len(nodes)
    for its in children.values():
        total = 2 - 0.5 ** (len(its) - 1)
        for rank, node in enumerate(its):
            scores[node] = math.log(0.5**rank / total)
    return [(token, above, score) for (token, above), score in zip(nodes, scores, strict=True)]


class NgramSession(DraftSession):
    """Knows the tokens of every row on the host, and drafts what `guesses` says, best first."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.trie = Trie([[]], vocab_size, device)
        self.states = torch.empty(0)  # [B, expanded nodes]: where each is in the trie
        self.found: list[bool] = []  # rows that have anything to draft

    @abstractmethod
    def take(self, row: int, tokens: Sequence[int]) -> None:
        """Newly committed tokens of a row, the root the last of them."""

    @abstractmethod
    def guesses(self, row: int) -> list[list[int]]:
        """Continuations behind the root, best first."""

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        for row, prompt in enumerate(prompts):
            self.take(row, prompt[:1])

    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        for row, (tokens, count) in enumerate(zip(next_ids.tolist(), counts, strict=True)):
            self.take(row, tokens[:count])
        guesses = [self.guesses(row) for row in range(len(counts))]
        self.found = [bool(its) for its in guesses]
        self.trie = Trie(guesses, self.vocab_size, self.device)
        self.reach = self.trie.depth, self.trie.nodes
        root = torch.zeros(len(counts), 1, dtype=torch.long, device=self.device)
        self.states = root[:, :0]
        return self.trie.log_q(root)[:, 0]

    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        above = torch.cat([torch.zeros_like(ids[:, :1]), self.states], 1).gather(1, parents + 1)
        state = self.trie.find(above, ids)
        self.states = torch.cat([self.states, state], 1)
        return self.trie.log_q(state)


class NgramDrafter(FreeDrafter):
    """A drafter without states, without a limit of depth and without a distribution."""

    certain: ClassVar[bool] = True

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.target_ids = torch.arange(vocab_size, device=device)

    def first_draft(self, batch: Batch, features: Features, verifier: Verifier, where: Tensor) -> None:
        return None


class PromptLookup(NgramDrafter):
    """What followed the last `longest` tokens where they stood before in prompt or answer; where they did not, the last
    `longest` - 1, down to `shortest`. The latest places come first, at most `matches` of them, `length` tokens of each."""

    def __init__(
        self, vocab_size: int, device: torch.device, longest: int = 3, shortest: int = 2, matches: int = 4, length: int = 10
    ) -> None:
        super().__init__(vocab_size, device)
        self.longest, self.shortest, self.matches, self.length = longest, shortest, matches, length

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> "LookupSession":
        return LookupSession(self, batch)


class LookupSession(NgramSession):
    def __init__(self, drafter: PromptLookup, batch: int) -> None:
        super().__init__(len(drafter.target_ids), drafter.target_ids.device)
        self.drafter = drafter
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        self.places: list[dict[tuple[int, ...], list[int]]] = [
            defaultdict(list) for _ in range(batch)
        ]  # what follows stands there

    def take(self, row: int, tokens: Sequence[int]) -> None:
        text, places = self.texts[row], self.places[row]
        for token in tokens:
            for size in range(self.drafter.shortest, min(self.drafter.longest, len(text)) + 1):
                places[tuple(text[-size:])].append(len(text))
            text.append(token)

    def guesses(self, row: int) -> list[list[int]]:
        text, places, drafter = self.texts[row], self.places[row], self.drafter
        found: dict[int, None] = {}  # places, in order, each once
        for size in range(drafter.longest, drafter.shortest - 1, -1):
            latest: Any = places.get(tuple(text[-size:]), ())[: -drafter.matches - 1 : -1]
            found |= dict.fromkeys(place for place in latest if place not in found)
        return [text[place : place + drafter.length] for place in list(found)[: drafter.matches]]

    def keep_rows(self, rows: list[int]) -> None:
        self.texts, self.places = [self.texts[row] for row in rows], [self.places[row] for row in rows]
