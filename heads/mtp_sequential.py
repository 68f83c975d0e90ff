"""Sequential multi-token prediction (DeepSeek-V3): each module reads the one before it and the next token.

Shapes: B rows, T tokens, M nodes of one tree level, D modules, d hidden size, N supervised positions, Q columns.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from .base import check_fits
from .batch import Batch, sent, take_rows
from .cache import Ancestry, RaggedCache, additive, visible
from .drafter import DraftSession
from .layers import attend
from .mtp_base import MtpConfig, MtpHead
from .verifier import Features, Verifier


class SequentialMtp(MtpHead):
    def __init__(self, config: MtpConfig, target_ids: Tensor | None = None) -> None:
        super().__init__(config, target_ids, config.depth, joins=True)

    @property
    def depth(self) -> int:
        return self.config.depth

    def states(self, batch: Batch, features: Features, verifier: Verifier) -> Iterator[Tensor]:
        """The output [B, T, d] of each module in turn, before its last norm."""
        hidden = features.last.float()
        for i, block in enumerate(self.blocks):
            embedding = verifier.embed(batch.ahead(batch.ids, 1 + i, 0)).float()
            hidden = self.kept(block.causal, *block.join(embedding, hidden), self.rotary, batch)
            yield hidden

    def supervised_states(self, batch: Batch, features: Features, verifier: Verifier, supervised: Tensor) -> Iterator[Tensor]:
        for block, its, state in zip(self.blocks, supervised, self.states(batch, features, verifier), strict=True):
            yield block.norm(state[its])

    @torch.no_grad()
    def predictions(
        self, batch: Batch, features: Features, verifier: Verifier, where: Tensor, depths: int
    ) -> list[Tensor]:  # fmt: skip
        states = islice(self.states(batch, features, verifier), depths)
        return [self.log_q(i, state[where], verifier) for i, state in enumerate(states)]

    def log_q(self, module: int, state: Tensor, verifier: Verifier) -> Tensor:
        return self.verifier_log_q(self.blocks[module].norm(state), verifier)

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> "SequentialSession":
        check_fits(self.config, verifier.facts, verifier.name)
        return SequentialSession(self, verifier, batch, capacity)


class SequentialSession(DraftSession):
    """Every token that is committed or drafted runs through the modules that can know the state below them.

    Module i (from 0) at token u reads module i - 1's state at token u - 1, or the verifier's. Slot u - 1 of the cache holds
    token u in every module; module i has nothing to read before token i + 1, so its first i slots stay hidden. A drafted token
    of depth n lies beyond the verifier's states and runs through the modules from n on.
    """

    def __init__(self, head: SequentialMtp, verifier: Verifier, batch: int, capacity: int) -> None:
        self.head, self.verifier = head, verifier
        self.cache = RaggedCache(head.depth, batch, capacity)
        self.last = torch.zeros(head.depth, batch, head.config.hidden_size, device=verifier.device)  # at the newest token
        self.states = torch.empty(0)  # [D, B, 1 + nodes, d]: of the root, then of every expanded node
        self.nodes = Ancestry(batch, verifier.device)
        self.level = 0

    @torch.no_grad()
    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        device, size = next_ids.device, next_ids.shape[1]
        self.cache.pending = 0
        embedding = self.verifier.embed(next_ids).float()
        positions = self.cache.slots(size, device)
        end = sent(counts, device)[:, None] - 1
        causal = torch.ones(1, size, size, dtype=torch.bool, device=device).tril()
        seen = visible(self.cache.lengths, causal, torch.arange(size, device=device)[None], None)
        hidden, newest = features.last.float(), []
        for i in range(self.head.depth):
            state = self.run(i, embedding, hidden, positions, seen)
            newest.append(take_rows(state, end)[:, 0])
            hidden = torch.cat([self.last[i][:, None], state[:, :-1]], 1)  # the state at the token before
        self.last = torch.stack(newest)
        self.cache.advance(counts)
        self.states = self.last[:, :, None]
        self.nodes = Ancestry(len(counts), device)
        self.level = 0
        return self.head.log_q(0, self.last[0], self.verifier)

    @torch.no_grad()
    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        self.level += 1
        self.nodes.grow(parents)
        embedding = self.verifier.embed(ids).float()
        positions, seen = self.nodes.newest(self.cache.lengths, ids.shape[1])
        states = torch.zeros(self.head.depth, *embedding.shape, device=ids.device)
        for i in range(self.level, self.head.depth):
            states[i] = self.run(i, embedding, take_rows(self.states[i - 1], parents + 1), positions, seen)
        self.cache.pending += ids.shape[1]
        self.states = torch.cat([self.states, states], 2)
        return self.head.log_q(self.level, states[self.level], self.verifier)

    def run(self, i: int, embedding: Tensor, hidden: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Module i at new tokens, after writing their keys and values: [B, M, d]."""
        block, cos_sin = self.head.blocks[i], self.head.rotary(positions)
        residual, x = block.join(embedding, hidden)
        keys, values = self.cache.layers[i].update(*block.layer.self_attn.key_value(x, *cos_sin))
        readable = torch.arange(seen.shape[2], device=seen.device) >= i
        mask = additive(seen & readable, residual.dtype)
        return block.layer.finish(residual, attend(block.layer.self_attn.query(x, *cos_sin), keys, values, mask))

    def keep_rows(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)
        self.last = self.last[:, rows]
