"""The EAGLE-3 decoder (Li 2025): one layer that reads three verifier states and the next token, and then its own output.

EAGLE-3.1 (2026, arXiv 2605.09992) norms the states before they are fused and what a step hands to the next.

Shapes: B rows, T tokens, R supervised rows a sample (padded), K steps, d hidden size, Q columns of the draft vocabulary.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from .base import LayerConfig, register, target_rows
from .batch import Batch, shifted
from .distillation import Lesson, distil
from .layers import DecoderLayer
from .losses import HeadLoss, SoftLoss
from .recurrent import RecurrentHead, supervised_drafts
from .verifier import Features, Verifier


class Eagle3Config(LayerConfig):
    kind: Literal["eagle3"] = "eagle3"
    layers: tuple[int, ...]  # the states entering these verifier layers
    depth: int  # training-time-test steps
    decay: float
    loss: SoftLoss = "ce"
    fc_norm: bool = False  # 3.1: each captured state through a norm of its own before fc
    norm_output: bool = False  # 3.1: the next step reads the output after the last norm


class Eagle3Head(RecurrentHead):
    kind = "eagle3"
    config: Eagle3Config
    input_scale: Tensor

    def __init__(self, config: Eagle3Config, target_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = config.layer(2 * config.hidden_size, ("input_layernorm", "hidden_norm"))  # of embedding, of hidden
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = config.rotary()
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.layers)
        ids = torch.arange(config.draft_vocab_size) if target_ids is None else target_ids
        self.register_buffer("target_ids", ids)
        self.register_buffer("input_scale", torch.ones(self.fc.in_features))

    @property
    def block(self) -> DecoderLayer:
        return self.midlayer

    def source(self, features: Features) -> Tensor:
        return self.fuse(features.layers)

    def join(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Attention reads cat(norm(embedding), norm(hidden)); the residual is the hidden state."""
        return hidden, torch.cat([self.midlayer.input_layernorm(embedding), self.midlayer.hidden_norm(hidden)], -1)

    def feedback(self, state: Tensor) -> Tensor:
        return self.norm(state) if self.config.norm_output else state

    def log_q(self, state: Tensor, verifier: Verifier) -> Tensor:
        return self.lm_head(self.norm(state)).float().log_softmax(-1)

    def fuse(self, layers: Tensor) -> Tensor:
        """g = fc(captured states): [B, T, L·d] -> [B, T, d].

        `input_scale` only makes the optimizer's task even: a verifier's states differ by orders of magnitude from one dimension
        to another. It is a constant, so fc.weight · diag(input_scale) is the plain fc of the paper and of every engine.
        """
        scaled = self.normed(layers.float()) * self.input_scale
        return self.fc(scaled).float()  # autocast or not, the residual stream is float32

    def normed(self, layers: Tensor) -> Tensor:
        """The captured states [..., L·d] as fc is to read them."""
        if not self.config.fc_norm:
            return layers
        parts = layers.split(self.config.hidden_size, -1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)

    @torch.no_grad()
    def even_inputs(self, layers: Tensor) -> None:
        """Set `input_scale` from captured states [N, L·d]: the median size of every dimension becomes one.

        (The median: first tokens carry activations a thousand times the others'.)
        """
        self.input_scale.copy_(1.0 / self.normed(layers.float()).abs().median(0).values.clamp(min=1e-3))

    @torch.no_grad()
    def initialise(self, verifier: Verifier) -> None:
        """The lm_head starts as the verifier's rows, and the last norm so that logits vary by about one: a start near the
        uniform distribution, not one that is sure of the wrong thing."""
        self.lm_head.weight.copy_(verifier.lm_head.weight[self.target_ids] * verifier.logit_multiplier)
        self.norm.weight.fill_(1.0 / self.lm_head.weight.norm(dim=1).mean().item())

    @property
    def needs(self) -> tuple[int, ...]:
        return self.config.layers

    def supervised(self, batch: Batch, features: Features) -> Tensor:
        return supervised_drafts(batch, features, self.target_ids, self.config.vocab_size, self.config.depth)

    def loss(self, batch: Batch, features: Features, verifier: Verifier) -> HeadLoss:
        supervised = self.supervised(batch, features)
        wanted, index = target_rows(supervised)
        rows, states = self.training_states(batch, features, verifier, supervised.any(0), self.config.depth)
        hidden, labels = [], []
        for k, state in enumerate(states):
            here = supervised[k].gather(1, rows.clamp(min=0)) & (rows >= 0)  # [B, R]
            hidden.append(self.norm(state[here]))
            labels.append(shifted(index, 1 + k, -1).gather(1, rows.clamp(min=0))[here])
        lesson = Lesson(self.teacher_rows(features, verifier, wanted), int(wanted.sum()), labels, self.config.loss)
        counts = supervised.flatten(1).sum(1)
        weights = self.config.decay ** torch.arange(self.config.depth, device=counts.device)
        scales = weights / (counts if batch.counts is None else batch.counts).clamp(min=1)
        sums, correct = distil(lesson, hidden, self.lm_head.weight, scales)
        return HeadLoss(sums, counts, correct, weights)


def build(config: dict[str, Any]) -> Eagle3Head:
    return Eagle3Head(Eagle3Config(**config))


register("eagle3", build)
