"""Whatever proposes tokens, trained or not, and its session with a batch that is being decoded.

Shapes: B rows, T tokens, M nodes of one tree level, N positions, X tokens beside the tree, Q columns of the drafter's own
vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .batch import Batch
from .verifier import Features, Verifier


@dataclass(frozen=True)
class Beside:
    """Tokens that the verifier shall read in a round besides the tree.

    ids: [B, X]; depth: [1, X], position after the committed tokens, 0 being the root's; seen: bool [1, X, X], who sees whom of
    them (all see the committed tokens and the root); asked: after how many, the last ones, the next token is wanted.
    """

    ids: Tensor
    depth: Tensor
    seen: Tensor
    asked: int


class DraftSession(ABC):
    """One batch of sequences being decoded. Log-probabilities are float32 over the drafter's own vocabulary; a token whose
    log-probability is -inf is no draft: it may fill a tree, but it is never accepted."""

    reach: tuple[int, int] | None = None  # deepest level and most nodes (without the root) of a round's drafts, None: no limit

    def start(self, prompts: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """Told of the prompts once, before the first `observe`. Heads know them from the verifier's states."""

    def beside(self) -> Beside | None:
        """What the verifier shall read in this round besides the tree."""
        return None

    def learn(self, choice: Tensor) -> None:  # noqa: B027
        """The verifier's likeliest token after each asked token of `beside`: [B, asked]."""

    @abstractmethod
    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        """Take in newly committed tokens; returns log q [B, Q] for the children of the root.

        features: verifier states [B, T, ...] of the new positions, right-padded to T; next_ids: [B, T], the token that
        follows each position (the last real one is the root); counts: how many of the T are real, a row.
        """

    @abstractmethod
    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        """log q [B, M, Q] for the children of the next tree level's nodes, or of some of them.

        ids: [B, M] node tokens (verifier ids); parents: [B, M], index of each node's parent among all nodes expanded so far
        in this round (in the order given), -1 for the root.
        """

    @abstractmethod
    def keep_rows(self, rows: list[int]) -> None:
        """Drop all rows but these."""


class LevelSession(DraftSession):
    """Where every depth is known from the committed tokens: all nodes of a level have the same children."""

    log_q: Tensor  # [B, K, Q], of each depth in this round, as `observe` leaves it
    level: int  # of the nodes expanded last; 0 is the root's

    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        self.level += 1
        return self.log_q[:, self.level, None].expand(-1, ids.shape[1], -1)

    def keep_rows(self, rows: list[int]) -> None:
        self.log_q = self.log_q[rows]


class Drafter(ABC):
    """Whatever proposes tokens. `target_ids` [Q] names the verifier id of each column of its own vocabulary."""

    target_ids: Tensor
    certain: ClassVar[bool] = False  # drafts are no draws: there is no q to sample from, each child is tested as a certainty
    read_beside: int = 0  # tokens that the verifier reads in a round besides the tree

    @property
    @abstractmethod
    def needs(self) -> tuple[int, ...]:
        """Decoder layers whose entering states are read (transformers' hidden_states indices)."""

    @property
    @abstractmethod
    def depth(self) -> int | None:
        """The deepest tree that can be drafted; None where it goes on for ever."""

    @abstractmethod
    def first_draft(self, batch: Batch, features: Features, verifier: Verifier, where: Tensor) -> Tensor | None:
        """log q [N, Q] of token t + 2, the root's child, at the positions t where `where` [B, T] is true, in row order; None
        where there is no such distribution."""

    @abstractmethod
    def begin(self, verifier: Verifier, batch: int, capacity: int) -> DraftSession:
        """Start drafting for `batch` sequences of at most `capacity` tokens."""


class FreeDrafter(Drafter):
    """One that reads none of the verifier's layers and drafts as deep as it is asked to."""

    @property
    def needs(self) -> tuple[int, ...]:
        return ()

    @property
    def depth(self) -> None:
        return None
