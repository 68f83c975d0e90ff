"""What every draft head is: a drafter with a config, a training loss and weights.

Shapes: B rows, T tokens, K depths, d hidden size, M or N of the positions, Q columns of the head's own vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import UserError
from .batch import Batch
from .drafter import Drafter
from .facts import Facts
from .layers import DecoderLayer, RotaryPositions
from .losses import HeadLoss
from .verifier import Features, Verifier

# what a config says of how a head learns, not of what it is made of
LEARNING = ("depth", "decay", "targets", "loss", "cross_entropy", "top_tokens", "noise", "noise_by_length", "weight")


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
        """The loss terms, a term for each depth, over supervised positions only."""

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
    if (last := max(getattr(config, "layers", ()), default=0)) >= facts.num_hidden_layers:
        raise UserError(f"head and verifier {name} do not fit: the head reads the state that enters layer {last}, the "
                        f"verifier's layers are 0 to {facts.num_hidden_layers - 1}")  # fmt: skip
