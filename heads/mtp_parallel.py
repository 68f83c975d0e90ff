"""Parallel multi-token prediction (Gloeckle 2024): independent modules on the verifier's last states.

Shapes: B rows, T tokens, M nodes of one tree level, K depths, d hidden size, N supervised positions, Q columns.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .base import check_fits
from .batch import Batch, sent, take_rows
from .cache import RaggedCache, additive
from .drafter import LevelSession
from .layers import attend
from .mtp_base import MtpConfig, MtpHead
from .verifier import Features, Verifier


class ParallelMtp(MtpHead):
    def __init__(self, config: MtpConfig, target_ids: Tensor | None = None) -> None:
        super().__init__(config, target_ids, config.depth, joins=False)

    @property
    def depth(self) -> int:
        return self.config.depth

    def states(self, batch: Batch, features: Features) -> Iterator[Tensor]:
        """The output [B, T, d] of each module, before its last norm."""
        hidden = features.last.float()
        for block in self.blocks:
            yield self.kept(block.causal, hidden, block.layer.input_layernorm(hidden), self.rotary, batch)

    def supervised_states(self, batch: Batch, features: Features, verifier: Verifier, supervised: Tensor) -> Iterator[Tensor]:
        for block, its, state in zip(self.blocks, supervised, self.states(batch, features), strict=True):
            yield block.norm(state[its])

    @torch.no_grad()
    def predictions(
        self, batch: Batch, features: Features, verifier: Verifier, where: Tensor, depths: int
    ) -> list[Tensor]:  # fmt: skip
        states = zip(self.blocks[:depths], self.states(batch, features), strict=False)
        return [self.verifier_log_q(block.norm(state[where]), verifier) for block, state in states]

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> "ParallelSession":
        check_fits(self.config, verifier.facts, verifier.name)
        return ParallelSession(self, verifier, batch, capacity)


class ParallelSession(LevelSession):
    """Every module reads the committed tokens alone."""

    def __init__(self, head: ParallelMtp, verifier: Verifier, batch: int, capacity: int) -> None:
        self.head, self.verifier = head, verifier
        self.cache = RaggedCache(head.depth, batch, capacity)
        self.log_q = torch.empty(batch, 0)
        self.level = 0

    @torch.no_grad()
    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        device, hidden = next_ids.device, features.last.float()
        positions = self.cache.slots(hidden.shape[1], device)
        last = sent(counts, device)[:, None] - 1
        slots = torch.arange(max(self.cache.lengths) + hidden.shape[1], device=device)
        mask = additive(slots[None, None] <= positions.gather(1, last)[:, :, None], hidden.dtype)  # the last real row asks
        states = []
        for block, cached in zip(self.head.blocks, self.cache.layers, strict=True):
            attention, x = block.layer.self_attn, block.layer.input_layernorm(hidden)
            keys, values = cached.update(*attention.key_value(x, *self.head.rotary(positions)))
            q = attention.query(take_rows(x, last), *self.head.rotary(positions.gather(1, last)))
            states.append(block.norm(block.layer.finish(take_rows(hidden, last), attend(q, keys, values, mask))))
        self.cache.advance(counts)
        self.log_q = self.head.verifier_log_q(torch.cat(states, 1), self.verifier)  # [B, K, Q]
        self.level = 0
        return self.log_q[:, 0]

    def keep_rows(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)
        super().keep_rows(rows)
