"""What the forms of multi-token prediction share: the config, the module, and the loss over labels of the text.

Shapes: B rows, T tokens, K depths, d hidden size, N supervised positions, Q columns.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal, cast

import torch
from torch import Tensor, nn

from .base import DraftHead, LayerConfig, columns_of
from .batch import Batch
from .cache import additive, within_documents
from .layers import RotaryPositions, attend
from .losses import HeadLoss, chunked_terms
from .verifier import Features, Verifier


class MtpConfig(LayerConfig):
    kind: Literal["mtp"] = "mtp"
    form: Literal["parallel", "sequential", "recursive"]
    depth: int  # modules; of the recursive form: steps it is trained for
    decay: float
    weight: float  # λ
    attention_bias: bool = False  # of queries, keys and values, where the modules are a verifier's that has it


class Block(nn.Module):
    """A whole decoder layer and the norm before the lm_head; with `joins`, first proj(cat(norm(hidden), norm(embedding)))."""

    def __init__(self, config: MtpConfig, joins: bool) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        if joins:
            self.hidden_norm = nn.RMSNorm(d, eps)
            self.embedding_norm = nn.RMSNorm(d, eps)
            self.proj = nn.Linear(2 * d, d, bias=False)
        self.layer = config.layer(d, ("input_layernorm",))
        if config.attention_bias:
            attention = self.layer.self_attn
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                projection.bias = nn.Parameter(torch.zeros(projection.out_features))
        self.norm = nn.RMSNorm(d, eps)

    def join(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.proj(torch.cat([self.hidden_norm(hidden), self.embedding_norm(embedding)], -1)).float()
        return joined, self.layer.input_layernorm(joined)

    def causal(self, residual: Tensor, x: Tensor, rotary: RotaryPositions, batch: Batch) -> Tensor:
        """The layer's output [B, T, d] for whole documents."""
        packed = batch.positions
        mask = None if packed is None else additive(within_documents(packed, None), residual.dtype)
        cos_sin = rotary(batch.places)
        keys, values = self.layer.self_attn.key_value(x, *cos_sin)
        return self.layer.finish(residual, attend(self.layer.self_attn.query(x, *cos_sin), keys, values, mask))


class MtpHead(DraftHead):
    """What the three forms share: the loss over labels of the text, through the verifier's lm_head."""

    kind = "mtp"
    config: MtpConfig

    def __init__(self, config: MtpConfig, target_ids: Tensor | None, modules: int, joins: bool) -> None:
        super().__init__()
        self.config = config
        self.mtp = nn.ModuleList(Block(config, joins) for _ in range(modules))
        self.rotary = config.rotary()
        self.register_buffer("target_ids", torch.arange(config.draft_vocab_size) if target_ids is None else target_ids)

    @property
    def blocks(self) -> list[Block]:
        return [cast(Block, module) for module in self.mtp]

    @torch.no_grad()
    def initialise(self, verifier: Verifier) -> None:
        """Last norms such that logits vary by about one: a start near the uniform distribution."""
        size = verifier.lm_head.weight.float().norm(dim=1).mean().item() * abs(verifier.logit_multiplier)
        for block in self.blocks:
            block.norm.weight.fill_(1.0 / size)

    @property
    def needs(self) -> tuple[int, ...]:
        return ()

    def supervised(self, batch: Batch, features: Features) -> Tensor:
        """The mask is read at the label's index, t + 2 + i; a label outside the head's vocabulary is not learned."""
        learned = batch.mask & (columns_of(self.target_ids, self.config.vocab_size)[batch.ids] >= 0)
        return torch.stack([batch.ahead(learned, 2 + i, False) for i in range(self.config.depth)])

    @abstractmethod
    def supervised_states(self, batch: Batch, features: Features, verifier: Verifier, supervised: Tensor) -> Iterator[Tensor]:
        """For each depth, the states [N, d] at its supervised positions, in row order, after the last norm."""

    def loss(self, batch: Batch, features: Features, verifier: Verifier) -> HeadLoss:
        supervised = self.supervised(batch, features)
        columns = columns_of(self.target_ids, self.config.vocab_size)[batch.ids]
        one = torch.ones(1, dtype=torch.promote_types(features.last.dtype, torch.float32), device=batch.ids.device)
        sums, correct = [], []
        for i, state in enumerate(self.supervised_states(batch, features, verifier, supervised)):
            labels = batch.ahead(columns, 2 + i, -1)[supervised[i]]

            def terms(part: Tensor, its: slice, labels: Tensor = labels) -> tuple[Tensor, Tensor]:
                log_q = self.verifier_log_q(part, verifier)
                return -log_q.gather(1, labels[its, None]).sum()[None], (log_q.argmax(-1) == labels[its]).sum()

            loss, _, hits = chunked_terms(state, terms, one)
            sums.append(loss)
            correct.append(hits)
        return HeadLoss(torch.stack(sums), supervised.flatten(1).sum(1), torch.stack(correct), self.weights().to(one.device))

    def weights(self) -> Tensor:
        """λ · decay^i, a sum over depths in the parallel form and a weighted mean in the others."""
        decays = self.config.decay ** torch.arange(self.config.depth)
        return self.config.weight * (decays if self.config.form == "parallel" else decays / decays.sum())
