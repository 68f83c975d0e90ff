"""The EAGLE-1 decoder (Li 2024): one layer that reads the verifier's last state and the next token and imitates its next state.

f[t] imitates h[t + 1], so the verifier's own lm_head turns it into a draft of token t + 2. EAGLE-2 is the same head under a
dynamic tree. HASS (Zhang 2024) is the same head trained for several aligned steps, with the teacher's likeliest tokens
weighted once more.

Shapes: B rows, T tokens, R supervised rows a sample (padded), K steps, d hidden size, N supervised rows, Q columns.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from .base import LayerConfig, register
from .batch import Batch, shifted
from .layers import DecoderLayer
from .losses import HeadLoss, chunked_terms
from .recurrent import RecurrentHead, supervised_drafts
from .verifier import Features, Verifier

NOISE_LENGTH = 512  # the sequence length at which noise scaled by length is the plain noise


class Eagle1Config(LayerConfig):
    kind: Literal["eagle1"] = "eagle1"
    depth: int  # aligned steps: 1 is EAGLE-1, more is HASS
    decay: float
    cross_entropy: float  # weight of the soft cross-entropy beside the regression
    top_tokens: int  # HASS: how many of the teacher's likeliest tokens count once more, 0 for none
    noise: float  # on the verifier's states while training: uniform in ±noise
    noise_by_length: bool  # times 512 / tokens of the sample


class Eagle1Head(RecurrentHead):
    kind = "eagle1"
    config: Eagle1Config

    def __init__(self, config: Eagle1Config, target_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = config.layer(config.hidden_size, ())
        self.rotary = config.rotary()
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size) if target_ids is None else target_ids)

    @property
    def needs(self) -> tuple[int, ...]:
        return ()

    @property
    def block(self) -> DecoderLayer:
        return self.layer

    def source(self, features: Features) -> Tensor:
        return features.last.float()

    def join(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """fc(cat(embedding, hidden)) is the residual and, without a norm, what attention reads."""
        joined = self.fc(torch.cat([embedding, hidden], -1)).float()
        return joined, joined

    def log_q(self, state: Tensor, verifier: Verifier) -> Tensor:
        return self.verifier_log_q(state, verifier)

    def supervised(self, batch: Batch, features: Features) -> Tensor:
        return supervised_drafts(batch, features, self.target_ids, self.config.vocab_size, self.config.depth)

    def noisy(self, batch: Batch, features: Features) -> Features:
        """The states with uniform noise, while training."""
        if not (self.training and self.config.noise):
            return features
        noise = (2 * torch.rand_like(features.last, dtype=torch.float32) - 1) * self.config.noise
        if self.config.noise_by_length:
            noise = noise * (NOISE_LENGTH / batch.document_lengths()[:, :, None])
        return replace(features, last=features.last.float() + noise)

    def loss(self, batch: Batch, features: Features, verifier: Verifier) -> HeadLoss:
        """sums: SmoothL1 + cross_entropy · soft cross-entropy (+ the cross-entropy of the likeliest tokens)."""
        config = self.config
        supervised = self.supervised(batch, features)
        noisy = self.noisy(batch, features)
        rows, states = self.training_states(batch, noisy, verifier, supervised.any(0), config.depth)
        names = ["regression", "cross_entropy", "top_tokens"][: 3 if config.top_tokens else 2]
        weights = states[0].new_tensor([1.0, config.cross_entropy, 1.0][: len(names)])
        sums, parts, correct = [], [], []
        for k, state in enumerate(states):
            here = supervised[k].gather(1, rows.clamp(min=0)) & (rows >= 0)  # [B, R]
            goal = shifted(features.last, 1 + k, 0.0)[supervised[k]]  # [N, d], in the order of state[here]

            def terms(part: Tensor, its: slice, goal: Tensor = goal) -> tuple[Tensor, Tensor]:
                return self.terms(part, goal[its], verifier)

            loss, by_term, hits = chunked_terms(state[here], terms, weights)
            sums.append(loss)
            parts.append(by_term)
            correct.append(hits)
        decays = config.decay ** torch.arange(config.depth, device=rows.device)
        by_name = dict(zip(names, torch.stack(parts, 1), strict=True))
        return HeadLoss(torch.stack(sums), supervised.flatten(1).sum(1), torch.stack(correct), decays, by_name)

    def terms(self, state: Tensor, goal: Tensor, verifier: Verifier) -> tuple[Tensor, Tensor]:
        """Loss terms of states [N, d] that should be the verifier's `goal` [N, d], summed over N; first choices that agree."""
        log_q = self.log_q(state, verifier)
        with torch.no_grad():
            p = self.log_q(goal, verifier).exp()
        found = [functional.smooth_l1_loss(state, goal.float(), reduction="none").mean(-1).sum(), -(p * log_q).sum()]
        if self.config.top_tokens:
            top = p.topk(self.config.top_tokens, -1)
            found.append(-(top.values * log_q.gather(-1, top.indices)).sum())
        return torch.stack(found), (log_q.argmax(-1) == p.argmax(-1)).sum()


def build(config: dict[str, object]) -> Eagle1Head:
    return Eagle1Head(Eagle1Config.model_validate(config))


register("eagle1", build)
