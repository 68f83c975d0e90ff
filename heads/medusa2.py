"""Medusa-2 (Cai 2024): Medusa heads, and a LoRA adapter of the verifier that learns with them.

Stage 1 is Medusa-1, the heads alone. In stage 2 they read the adapted verifier's states and learn from Σ decay^i · L_i as
before; the adapter learns from L + λ(s) · Σ decay^i · L_i, where L keeps the verifier a language model: its own cross-entropy
on the answers, or KL(p without the adapter || p with it), self-distillation. That is the gradient of the joint loss but for
the factor λ on the heads', which optimizers that divide by the size of a gradient take out again, but not at once: their
averages hold the gradients of stage 1, a hundred times larger, and would go on in their direction.

Shapes: B rows, T tokens, K heads, d hidden size, N supervised rows.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .adapters import Adapter
from .batch import Batch
from .losses import HeadLoss, chunked_terms
from .medusa import MedusaHead
from .verifier import Features, Verifier

ADAPTER = "adapter"  # in a head's folder: the adapter of the verifier that the head was trained with


@dataclass(frozen=True)
class Together:
    """How heads and adapter learn; names and meaning as in the recipe's `head.adapter` section."""

    heads_only: float
    own: Literal["ce", "kl"]
    weight: float
    ramp: Literal["constant", "sine"]
    rate: float

    def weight_at(self, share: float) -> float:
        """λ when `share` of all steps are done."""
        if self.ramp == "constant":
            return self.weight
        return self.weight * math.sin(math.pi / 2 * (share - self.heads_only) / (1 - self.heads_only))


class AdaptedMedusa(MedusaHead):
    """A Medusa head in training, with the adapter's weights among its own; what it saves is a MedusaHead and a peft folder."""

    def __init__(self, head: MedusaHead, adapter: Adapter, together: Together) -> None:
        super().__init__(head.config, head.target_ids)
        self.load_state_dict(head.state_dict())
        self.adapter, self.together = adapter, together
        self.adapter_weights = nn.ParameterDict({name.replace(".", "/"): w for name, w in adapter.weights.items()})
        self.share = 0.0

    def begin_step(self, share: float) -> None:
        self.share = share
        self.adapter_weights.requires_grad_(self.together_now)  # nobody waits for gradients that stage 1 does not give

    def rate_of(self, name: str) -> float:
        return self.together.rate if name.startswith("adapter_weights.") else 1.0

    def own_state(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("adapter_weights.")}

    def save_beside(self, folder: Path) -> None:
        self.adapter.save(folder / ADAPTER)

    @property
    def together_now(self) -> bool:
        """Whether stage 2 has begun."""
        return self.share >= self.together.heads_only

    def supervised(self, batch: Batch, features: Features) -> Tensor:
        """Of the heads, and last of the verifier itself [K + 1, B, T]: where the next token is an answer's, in stage 2."""
        own = batch.ahead(batch.mask, 1, False) & self.together_now
        return torch.cat([super().supervised(batch, features), own[None]])

    def loss(self, batch: Batch, features: Features, verifier: Verifier) -> HeadLoss:
        """features: of the verifier without its adapter. The last term is the verifier's own, which stage 1 does not have.

        Soft targets are those of the adapted verifier; which of them a pruned vocabulary leaves out, the original decides.
        """
        *_, following = supervised = self.supervised(batch, features)
        if not self.together_now:
            heads = self.heads_loss(batch, features, verifier, supervised[:-1])
            return joined(heads, heads.sums.new_zeros(1), heads.correct.new_zeros(1), heads.counts.new_zeros(1))
        with self.adapter.dropping():
            last = verifier.features(batch.ids, positions=batch.positions, learning=True).last
        read = WithWeight.apply(last, self.together.weight_at(self.share))
        heads = self.heads_loss(batch, replace(features, last=read), verifier, supervised[:-1])
        own, hits = self.own_loss(batch, features.last, last, following, verifier)
        return joined(heads, own, hits, following.sum()[None])

    def own_loss(
        self, batch: Batch, original: Tensor, adapted: Tensor, following: Tensor, verifier: Verifier
    ) -> tuple[Tensor, Tensor]:
        """The verifier's own term [1], a sum, and how often [1] its first choice is the label's (or the original's).

        original, adapted: [B, T, d], final states without and with the adapter; following: bool [B, T], where the next token is
        an answer's.
        """
        labels, teacher = batch.ahead(batch.ids, 1, 0)[following], original[following]

        def terms(part: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            log_q = verifier.logits(part).float().log_softmax(-1)
            if self.together.own == "ce":
                return -log_q.gather(1, labels[rows, None]).sum()[None], (log_q.argmax(-1) == labels[rows]).sum()
            log_p = verifier.logits(teacher[rows]).float().log_softmax(-1)
            return (log_p.exp() * (log_p - log_q)).sum()[None], (log_q.argmax(-1) == log_p.argmax(-1)).sum()

        one = torch.ones(1, dtype=torch.promote_types(adapted.dtype, torch.float32), device=adapted.device)
        loss, _, hits = chunked_terms(adapted[following], terms, one)
        return loss[None], hits[None]


class WithWeight(torch.autograd.Function):
    """States as they are, whose gradient is multiplied by a weight on its way back."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.weight * gradient, None


def joined(heads: HeadLoss, own: Tensor, hits: Tensor, count: Tensor) -> HeadLoss:
    """The heads' terms and behind them the verifier's own: its sum, hits and labels."""
    return HeadLoss(
        torch.cat([heads.sums, own]),
        torch.cat([heads.counts, count]),
        torch.cat([heads.correct, hits]),
        torch.cat([heads.weights, heads.weights.new_ones(1)]),
        last_is_verifier=True,
    )
