"""What every draft head is: a config, the verifier states it needs, a training loss, and a drafting session.

Shapes: B rows, T tokens, M nodes of one tree level, K depths, d hidden size, Q columns of the head's own vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import UserError
from .facts import Facts
from .layers import DecoderLayer, RotaryPositions
from .losses import HeadLoss
from .verifier import Features, Verifier


class HeadConfig(BaseModel):
    """Everything needed to rebuild a head's modules; saved beside its weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    hidden_size: int
    vocab_size: int  # rows of the verifier's lm_head


class LayerConfig(HeadConfig):
    """A head with decoder layers of the verifier's sizes, over a vocabulary of its own."""

    draft_vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any] | None

    def layer(self, inputs: int, norms: Sequence[str]) -> DecoderLayer:
        """A decoder layer whose attention reads `inputs` values."""
        return DecoderLayer(
            inputs, self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim,
            self.intermediate_size, self.rms_norm_eps, norms,
        )  # fmt: skip

    def rotary(self) -> RotaryPositions:
        return RotaryPositions(self.head_dim, self.rope_parameters, self.max_position_embeddings)


@dataclass(frozen=True)
class Batch:
    """Samples as right-padded rows: one a row, or several documents one behind the other (packed).

    ids: [B, T]; mask: bool [B, T], true where the token is an answer's, to be learned; lengths: [B], tokens of a row;
    positions: [B, T], each token's position within its document, zero in the padding; None where a row is one document.
    counts: [K], the supervised labels of the whole optimizer step by depth, where it has other batches too and they are known:
    a hint that spares a loss work, the sums are the same without it.
    """

    ids: Tensor
    mask: Tensor
    lengths: Tensor
    positions: Tensor | None = None
    counts: Tensor | None = None

    @property
    def places(self) -> Tensor:
        """The positions: [B, T], or [1, T] where all rows have the same."""
        return torch.arange(self.ids.shape[1], device=self.ids.device)[None] if self.positions is None else self.positions

    def document_lengths(self) -> Tensor:
        """Tokens of the document that each token is of: [B, T] or [B, 1]."""
        if self.positions is None:
            return self.lengths[:, None]
        starts = torch.arange(self.ids.shape[1], device=self.ids.device) - self.positions
        return torch.zeros_like(starts).scatter_add_(1, starts, torch.ones_like(starts)).gather(1, starts)

    def ahead(self, x: Tensor, by: int, fill: Any) -> Tensor:
        """x[:, t + by] at every t, `fill` past the end of t's document. x: [B, T, ...]."""
        out = shifted(x, by, fill)
        if self.positions is None:
            return out
        inside = shifted(self.positions, by, -1) == self.positions + by
        return torch.where(inside.view(*inside.shape, *[1] * (x.dim() - 2)), out, fill)


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


class DraftHead(nn.Module, Drafter):
    """A trainable drafter."""

    kind: ClassVar[str]
    config: HeadConfig
    recompute = False  # in the backward pass, instead of keeping what a layer computes: less memory, more time

    def kept(self, part: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """part(*inputs), of which training keeps everything, or the inputs alone under `recompute`."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(part, *inputs, use_reentrant=False)
        return part(*inputs)

    def begin_step(self, share: float) -> None:
        """Told before every optimizer step which share of the run is done."""

    def rate_of(self, name: str) -> float:
        """What a parameter's learning rate is multiplied with."""
        return 1.0

    def own_state(self) -> dict[str, Tensor]:
        """The tensors of the head's own file."""
        return self.state_dict()

    def save_beside(self, folder: Path) -> None:
        """Write what belongs into the head's folder besides."""

    @abstractmethod
    def supervised(self, batch: Batch, features: Features) -> Tensor:
        """bool [K, B, T]: at which positions t each depth has a label to learn (`features.choice` must be there)."""

    @abstractmethod
    def loss(self, batch: Batch, features: Features, verifier: Verifier) -> HeadLoss:
        """Loss terms of METHODS, a term for each depth, over supervised positions only."""

    @property
    def columns(self) -> Tensor | None:
        """The verifier's ids that the head can draft; None where these are all."""
        return None if len(self.target_ids) == self.config.vocab_size else self.target_ids

    @torch.no_grad()
    def teacher(self, features: Features, verifier: Verifier, wanted: Tensor) -> Tensor:
        """The verifier's probabilities [M, Q], over the head's own vocabulary alone, at the `wanted` [B, T] positions."""
        return self.teacher_rows(features, verifier, wanted)(slice(None))

    def teacher_rows(self, features: Features, verifier: Verifier, wanted: Tensor) -> Callable[[slice], Tensor]:
        """`teacher` for a few of the M rows at a time."""
        last, logits = features.last[wanted], verifier.logits_over(self.columns)
        return lambda rows: logits(last[rows]).float().softmax(-1)

    def verifier_log_q(self, hidden: Tensor, verifier: Verifier) -> Tensor:
        """float32 log q [..., Q] of states [..., d] that go through the verifier's own frozen lm_head."""
        return verifier.logits(hidden.to(verifier.dtype), self.columns).float().log_softmax(-1)

    @abstractmethod
    def predictions(
        self, batch: Batch, features: Features, verifier: Verifier, where: Tensor, depths: int
    ) -> list[Tensor]:  # fmt: skip
        """As the loss sees it, the true tokens before each: for each of the first `depths` depths k, log q [N, Q] of token
        t + 2 + k at the positions t where `where` [B, T] is true, in row order."""

    def first_draft(self, batch: Batch, features: Features, verifier: Verifier, where: Tensor) -> Tensor:
        """log q [N, Q] of token t + 2, the root's child."""
        return self.predictions(batch, features, verifier, where, 1)[0]


def columns_of(target_ids: Tensor, vocab_size: int) -> Tensor:
    """[V]: the head's column of every verifier id, -1 where the head cannot draft it."""
    columns = torch.full((vocab_size,), -1, dtype=torch.long, device=target_ids.device)
    columns[target_ids] = torch.arange(len(target_ids), device=target_ids.device)
    return columns


def shifted(x: Tensor, by: int, fill: Any) -> Tensor:
    """x[:, t + by] at every t, `fill` past the end: a shift never wraps around. x: [B, T, ...]."""
    out = torch.full_like(x, fill)
    if by < x.shape[1]:
        out[:, : x.shape[1] - by] = x[:, by:]
    return out


def target_rows(supervised: Tensor) -> tuple[Tensor, Tensor]:
    """Where the verifier made the choices to learn: depth k at t learns the one made at t + 1 + k (of token t + 2 + k).

    supervised: bool [K, B, T] -> wanted: bool [B, T], positions that some depth learns from; index: [B, T], their running
    number, -1 elsewhere.
    """
    wanted = torch.zeros_like(supervised[0])
    for k, positions in enumerate(supervised):
        wanted[:, 1 + k :] |= positions[:, : max(wanted.shape[1] - 1 - k, 0)]
    index = torch.full(wanted.shape, -1, device=wanted.device)
    index[wanted] = torch.arange(int(wanted.sum()), device=wanted.device)
    return wanted, index


Builder = Callable[[dict[str, Any]], DraftHead]
_REGISTRY: dict[str, Builder] = {}


def register(kind: str, build: Builder) -> None:
    """Make a head kind known: `build` turns a saved config into an untrained head."""
    _REGISTRY[kind] = build


def build_head(config: dict[str, Any]) -> DraftHead:
    """An untrained head from a saved config. Raises UserError for an unknown kind."""
    kind = config.get("kind")
    if kind not in _REGISTRY:
        raise UserError(f"head kind {kind!r} is unknown; known kinds: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[kind](config)


def check_fits(config: HeadConfig, facts: Facts, name: str) -> None:
    """Refuse a head that was made for another verifier."""
    for field, mine, its in (("hidden size", config.hidden_size, facts.hidden_size),
                             ("vocabulary", config.vocab_size, facts.vocab_size)):  # fmt: skip
        if mine != its:
            raise UserError(f"head and verifier {name} do not fit: the head's {field} is {mine}, the verifier's {its}")
