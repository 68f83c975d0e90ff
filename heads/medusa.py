"""Medusa heads (Cai 2024): head i reads the verifier's last hidden state at t and predicts token t + 2 + i.

Shapes: B rows, T tokens, K heads, d hidden size, Q columns of the head's vocabulary, N supervised rows.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from .base import DraftHead, HeadConfig, check_fits, columns_of, register, target_rows
from .batch import Batch, sent, shifted
from .drafter import LevelSession
from .losses import HeadLoss, SoftLoss, linear_cross_entropy
from .verifier import Features, Verifier


class MedusaConfig(HeadConfig):
    kind: Literal["medusa"] = "medusa"
    heads: int
    blocks: int
    lm_head: Literal["own", "shared"]
    targets: Literal["hard", "soft"]
    loss: SoftLoss = "ce"  # with soft targets
    decay: float
    draft_vocab_size: int


class ResidualBlock(nn.Module):
    """z + SiLU(W z + b), with W = 0 at the start: every head begins as the verifier's own lm_head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, z: Tensor) -> Tensor:
        return z + functional.silu(self.linear(z))


class MedusaHead(DraftHead):
    kind = "medusa"
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, target_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.blocks))) for _ in range(config.heads)
        )
        ids = torch.arange(config.draft_vocab_size) if target_ids is None else target_ids
        self.register_buffer("target_ids", ids)
        if config.lm_head == "own":
            self.lm_heads = nn.ModuleList(
                nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(config.heads)
            )

    @torch.no_grad()
    def initialise(self, verifier: Verifier) -> None:
        """Own lm_heads start as the verifier's."""
        if self.config.lm_head == "own":
            for weight in self.lm_heads.parameters():
                weight.copy_(self.verifier_weight(verifier))

    def verifier_weight(self, verifier: Verifier) -> Tensor:
        """The verifier's lm_head rows of this head's vocabulary: [Q, d], float32."""
        return verifier.lm_head.weight[self.target_ids].float() * verifier.logit_multiplier

    def output_weights(self, verifier: Verifier) -> list[Tensor]:
        """The output layer [Q, d] of each head."""
        if self.config.lm_head == "shared":
            return [self.verifier_weight(verifier)] * self.config.heads
        return list(self.lm_heads.parameters())

    @property
    def needs(self) -> tuple[int, ...]:
        return ()

    @property
    def depth(self) -> int:
        return self.config.heads

    def supervised(self, batch: Batch, features: Features) -> Tensor:
        """The mask is read at the label's index, t + 2 + i; a label outside the head's vocabulary is not learned."""
        assert features.choice is not None
        columns = columns_of(self.target_ids, self.config.vocab_size)
        if self.config.targets == "soft":
            known = (features.choice >= 0) & (columns[features.choice.clamp(min=0)] >= 0)
            place = 1  # the teacher of token t + 2 sits at t + 1
        else:
            known = columns[batch.ids] >= 0
            place = 2
        return torch.stack(
            [batch.ahead(batch.mask, 2 + i, False) & batch.ahead(known, place + i, False) for i in range(self.config.heads)]
        )

    def loss(self, batch: Batch, features: Features, verifier: Verifier) -> HeadLoss:
        return self.heads_loss(batch, features, verifier, self.supervised(batch, features))

    def heads_loss(self, batch: Batch, features: Features, verifier: Verifier, supervised: Tensor) -> HeadLoss:
        """The heads' own terms at the `supervised` [K, B, T] positions."""
        outputs = self.output_weights(verifier)
        wanted, index = target_rows(supervised)
        targets = self.targets(batch, features, verifier, wanted)
        sums, correct = [], []
        for i, blocks in enumerate(self.blocks):
            hidden = self.kept(blocks, features.last[supervised[i]].float())
            rows = shifted(index, 1 + i, -1)[supervised[i]]
            loss, hits = linear_cross_entropy(hidden, outputs[i], targets, rows, self.config.loss)
            sums.append(loss)
            correct.append(hits)
        counts = supervised.flatten(1).sum(1)
        weights = self.config.decay ** torch.arange(self.config.heads, device=counts.device)
        return HeadLoss(torch.stack(sums), counts, torch.stack(correct), weights)

    def targets(self, batch: Batch, features: Features, verifier: Verifier, wanted: Tensor) -> Tensor:
        """What is to be learned from the `wanted` [B, T] positions: labels [M], or the verifier's probabilities [M, Q]."""
        if self.config.targets == "soft":
            return self.teacher(features, verifier, wanted)
        return columns_of(self.target_ids, self.config.vocab_size)[shifted(batch.ids, 1, 0)[wanted]]

    @torch.no_grad()
    def predictions(
        self, batch: Batch, features: Features, verifier: Verifier, where: Tensor, depths: int
    ) -> list[Tensor]:  # fmt: skip
        hidden, outputs = features.last[where].float(), self.output_weights(verifier)
        heads = zip(list(self.blocks)[:depths], outputs[:depths], strict=True)
        return [(blocks(hidden) @ weight.T).log_softmax(-1) for blocks, weight in heads]

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> "MedusaSession":
        check_fits(self.config, verifier.facts, verifier.name)
        return MedusaSession(self, verifier, batch)


class MedusaSession(LevelSession):
    """All depths are known from one hidden state."""

    def __init__(self, head: MedusaHead, verifier: Verifier, batch: int) -> None:
        self.head = head
        self.weights = head.output_weights(verifier)
        self.level = 0
        self.log_q = torch.empty(batch, 0)

    @torch.no_grad()
    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        rows = torch.arange(len(counts), device=next_ids.device)
        hidden = features.last[rows, sent(counts, next_ids.device) - 1].float()
        logits = [blocks(hidden) @ weight.T for blocks, weight in zip(self.head.blocks, self.weights, strict=True)]
        self.log_q = torch.stack(logits, 1).log_softmax(-1)  # [B, K, Q]
        self.level = 0
        return self.log_q[:, 0]


def build(config: dict[str, Any]) -> MedusaHead:
    return MedusaHead(MedusaConfig(**config))


register("medusa", build)
