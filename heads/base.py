"""What every draft head is: a config, the verifier states it needs, a training loss, and a drafting session.

Shapes: B rows, T tokens, M nodes of one tree level, K depths, d hidden size, Q columns of the head's own vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """Right-padded samples. ids: [B, T]; mask: bool [B, T], true where the token is an answer's, to be learned;
    lengths: [B]. counts: [K], the supervised labels of the whole optimizer step by depth, where it has other batches too and
    they are known: a hint that spares a loss work, the sums are the same without it."""

    ids: Tensor
    mask: Tensor
    lengths: Tensor
    counts: Tensor | None = None


class DraftSession(ABC):
    """One batch of sequences being decoded. Log-probabilities are float32 over the head's own vocabulary."""

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


class DraftHead(nn.Module, ABC):
    """A trainable drafter. `target_ids` [Q] names the verifier id of each column of the head's own vocabulary."""

    kind: ClassVar[str]
    config: HeadConfig
    target_ids: Tensor
    recompute = False  # in the backward pass, instead of keeping what a layer computes: less memory, more time

    def kept(self, part: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """part(*inputs), of which training keeps everything, or the inputs alone under `recompute`."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(part, *inputs, use_reentrant=False)
        return part(*inputs)

    @property
    @abstractmethod
    def needs(self) -> tuple[int, ...]:
        """Decoder layers whose entering states the head reads (transformers' hidden_states indices)."""

    @property
    @abstractmethod
    def depth(self) -> int | None:
        """The deepest tree the head can draft; None where it goes on for ever."""

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
    def first_draft(self, batch: Batch, features: Features, verifier: Verifier, where: Tensor) -> Tensor:
        """log q [N, Q] of token t + 2, the root's child, at the positions t where `where` [B, T] is true, in row order."""

    @abstractmethod
    def begin(self, verifier: Verifier, batch: int, capacity: int) -> DraftSession:
        """Start drafting for `batch` sequences of at most `capacity` tokens."""


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
