"""Multi-token prediction beside a frozen verifier, in three forms; all go through the verifier's own embedding and lm_head.

parallel (Gloeckle 2024): module k is a decoder layer on the verifier's last states and predicts token t + 1 + k on its own.
sequential (DeepSeek-V3): module k reads module k - 1's state at t and token t + k, and predicts token t + 1 + k.
recursive (FastMTP): one such module does it again and again, trained as it drafts.

k counts from 1 here as in the papers; in the code modules and depths count from 0, and depth i predicts token t + 2 + i.
Shapes: B rows, T tokens, M nodes of one tree level, K depths, d hidden size, N supervised rows, Q columns.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal, cast

import torch
from torch import Tensor, nn

from .base import Batch, DraftHead, DraftSession, LayerConfig, check_fits, columns_of, register, shifted
from .cache import Ancestry, RaggedCache, additive, visible
from .layers import DecoderLayer, RotaryPositions, attend
from .losses import HeadLoss, chunked_terms
from .recurrent import RecurrentHead, take_rows
from .verifier import Features, Verifier


class MtpConfig(LayerConfig):
    kind: Literal["mtp"] = "mtp"
    form: Literal["parallel", "sequential", "recursive"]
    depth: int  # modules; of the recursive form: steps it is trained for
    decay: float
    weight: float  # λ


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
        self.norm = nn.RMSNorm(d, eps)

    def join(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.proj(torch.cat([self.hidden_norm(hidden), self.embedding_norm(embedding)], -1)).float()
        return joined, self.layer.input_layernorm(joined)

    def causal(self, residual: Tensor, x: Tensor, rotary: RotaryPositions) -> Tensor:
        """The layer's output [B, T, d] for whole samples."""
        positions = torch.arange(x.shape[1], device=x.device)
        mask = additive((positions <= positions[:, None])[None], residual.dtype)
        cos_sin = rotary(positions[None])
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
        return torch.stack([shifted(learned, 2 + i, False) for i in range(self.config.depth)])

    @abstractmethod
    def supervised_states(self, batch: Batch, features: Features, verifier: Verifier, supervised: Tensor) -> Iterator[Tensor]:
        """For each depth, the states [N, d] at its supervised positions, in row order, after the last norm."""

    def loss(self, batch: Batch, features: Features, verifier: Verifier) -> HeadLoss:
        supervised = self.supervised(batch, features)
        columns = columns_of(self.target_ids, self.config.vocab_size)[batch.ids]
        one = torch.ones(1, dtype=torch.promote_types(features.last.dtype, torch.float32), device=batch.ids.device)
        sums, correct = [], []
        for i, state in enumerate(self.supervised_states(batch, features, verifier, supervised)):
            labels = shifted(columns, 2 + i, -1)[supervised[i]]

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


class RecursiveMtp(MtpHead, RecurrentHead):
    def __init__(self, config: MtpConfig, target_ids: Tensor | None = None) -> None:
        super().__init__(config, target_ids, modules=1, joins=True)

    @property
    def block(self) -> DecoderLayer:
        return self.blocks[0].layer

    def source(self, features: Features) -> Tensor:
        return features.last.float()

    def join(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.blocks[0].join(embedding, hidden)

    def log_q(self, state: Tensor, verifier: Verifier) -> Tensor:
        return self.verifier_log_q(self.blocks[0].norm(state), verifier)

    def supervised_states(self, batch: Batch, features: Features, verifier: Verifier, supervised: Tensor) -> Iterator[Tensor]:
        rows, states = self.training_states(batch, features, verifier, supervised.any(0), self.config.depth)
        for its, state in zip(supervised, states, strict=True):
            yield self.blocks[0].norm(state[its.gather(1, rows.clamp(min=0)) & (rows >= 0)])


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
            embedding = verifier.embed(shifted(batch.ids, 1 + i, 0)).float()
            hidden = self.kept(block.causal, *block.join(embedding, hidden), self.rotary)
            yield hidden

    def supervised_states(self, batch: Batch, features: Features, verifier: Verifier, supervised: Tensor) -> Iterator[Tensor]:
        for block, its, state in zip(self.blocks, supervised, self.states(batch, features, verifier), strict=True):
            yield block.norm(state[its])

    @torch.no_grad()
    def first_draft(self, batch: Batch, features: Features, verifier: Verifier, where: Tensor) -> Tensor:
        return self.log_q(0, next(self.states(batch, features, verifier))[where], verifier)

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
        end = torch.tensor(counts, device=device)[:, None] - 1
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


class ParallelMtp(MtpHead):
    def __init__(self, config: MtpConfig, target_ids: Tensor | None = None) -> None:
        super().__init__(config, target_ids, config.depth, joins=False)

    @property
    def depth(self) -> int:
        return self.config.depth

    def states(self, features: Features) -> Iterator[Tensor]:
        """The output [B, T, d] of each module, before its last norm."""
        hidden = features.last.float()
        for block in self.blocks:
            yield self.kept(block.causal, hidden, block.layer.input_layernorm(hidden), self.rotary)

    def supervised_states(self, batch: Batch, features: Features, verifier: Verifier, supervised: Tensor) -> Iterator[Tensor]:
        for block, its, state in zip(self.blocks, supervised, self.states(features), strict=True):
            yield block.norm(state[its])

    @torch.no_grad()
    def first_draft(self, batch: Batch, features: Features, verifier: Verifier, where: Tensor) -> Tensor:
        return self.verifier_log_q(self.blocks[0].norm(next(self.states(features))[where]), verifier)

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> "ParallelSession":
        check_fits(self.config, verifier.facts, verifier.name)
        return ParallelSession(self, verifier, batch, capacity)


class ParallelSession(DraftSession):
    """All depths are known from the committed tokens: every node of a level has the same children."""

    def __init__(self, head: ParallelMtp, verifier: Verifier, batch: int, capacity: int) -> None:
        self.head, self.verifier = head, verifier
        self.cache = RaggedCache(head.depth, batch, capacity)
        self.log_q = torch.empty(batch, 0)
        self.level = 0

    @torch.no_grad()
    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        device, hidden = next_ids.device, features.last.float()
        positions = self.cache.slots(hidden.shape[1], device)
        last = torch.tensor(counts, device=device)[:, None] - 1
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

    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        self.level += 1
        return self.log_q[:, self.level, None].expand(-1, ids.shape[1], -1)

    def keep_rows(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)
        self.log_q = self.log_q[rows]


FORMS: dict[str, type[ParallelMtp] | type[SequentialMtp] | type[RecursiveMtp]] = {
    "parallel": ParallelMtp,
    "sequential": SequentialMtp,
    "recursive": RecursiveMtp,
}


def new_mtp(config: MtpConfig, target_ids: Tensor | None = None) -> MtpHead:
    """An untrained head of the config's form."""
    return FORMS[config.form](config, target_ids)


def build(config: dict[str, object]) -> MtpHead:
    return new_mtp(MtpConfig.model_validate(config))


register("mtp", build)
