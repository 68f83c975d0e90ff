"""The EAGLE-3 decoder (Li 2025): one layer that reads three verifier states and the next token, and then its own output.

Training-time test: step k predicts token t + 2 + k from position t, reading its own output of step k - 1, embedding the true
token t + 1 + k, and attending over the step-0 keys up to t and its own keys of steps 1..k. Only supervised rows run as
queries; the other positions only lend keys and values.

Shapes: B rows, T tokens, R supervised rows a sample (padded), K steps, d hidden size, Q columns of the draft vocabulary.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from .base import Batch, DraftHead, DraftSession, HeadConfig, check_fits, columns_of, register, shifted, target_rows
from .cache import RaggedCache, additive, visible
from .layers import Attention, Mlp, RotaryPositions, attend, attend_with_own_steps
from .losses import HeadLoss, linear_cross_entropy
from .verifier import Features, Verifier


class Eagle3Config(HeadConfig):
    kind: Literal["eagle3"] = "eagle3"
    layers: tuple[int, ...]  # the states entering these verifier layers
    depth: int  # training-time-test steps
    decay: float
    draft_vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any] | None


class DraftLayer(nn.Module):
    """A decoder layer whose attention reads cat(norm(embedding), norm(hidden)); the residual is the hidden state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(d, eps)  # of the embedding
        self.hidden_norm = nn.RMSNorm(d, eps)
        self.self_attn = Attention(
            2 * d, d, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )  # fmt: skip
        self.post_attention_layernorm = nn.RMSNorm(d, eps)
        self.mlp = Mlp(d, config.intermediate_size)

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], -1)

    def finish(self, hidden: Tensor, attended_BHTD: Tensor) -> Tensor:
        hidden = hidden + self.self_attn.merge(attended_BHTD)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(DraftHead):
    kind = "eagle3"
    config: Eagle3Config
    input_scale: Tensor

    def __init__(self, config: Eagle3Config, target_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = RotaryPositions(config.head_dim, config.rope_parameters, config.max_position_embeddings)
        ids = torch.arange(config.draft_vocab_size) if target_ids is None else target_ids
        self.register_buffer("target_ids", ids)
        self.register_buffer("input_scale", torch.ones(self.fc.in_features))

    def fuse(self, layers: Tensor) -> Tensor:
        """g = fc(captured states): [B, T, L·d] -> [B, T, d].

        `input_scale` only makes the optimizer's task even: a verifier's states differ by orders of magnitude from one dimension
        to another. It is a constant, so fc.weight · diag(input_scale) is the plain fc of the paper and of every engine.
        """
        return self.fc(layers.float() * self.input_scale).float()  # autocast or not, the residual stream is float32

    @torch.no_grad()
    def even_inputs(self, layers: Tensor) -> None:
        """Set `input_scale` from captured states [N, L·d]: the median size of every dimension becomes one.

        (The median: first tokens carry activations a thousand times the others'.)
        """
        self.input_scale.copy_(1.0 / layers.float().abs().median(0).values.clamp(min=1e-3))

    @torch.no_grad()
    def initialise(self, verifier: Verifier) -> None:
        """The lm_head starts as the verifier's rows, and the last norm so that logits vary by about one: a start near the
        uniform distribution, not one that is sure of the wrong thing."""
        self.lm_head.weight.copy_(verifier.lm_head.weight[self.target_ids] * verifier.logit_multiplier)
        self.norm.weight.fill_(1.0 / self.lm_head.weight.norm(dim=1).mean().item())

    @property
    def needs(self) -> tuple[int, ...]:
        return self.config.layers

    @property
    def depth(self) -> None:
        return None

    def supervised(self, batch: Batch, features: Features) -> Tensor:
        """Step k at t is supervised iff tokens t + 1 .. t + 2 + k are all one answer's, and the verifier's own choice for
        t + 2 + k can be drafted. (Decoding never drafts from before the answer's first token.)"""
        assert features.choice is not None
        columns = columns_of(self.target_ids, self.config.vocab_size)
        known = (features.choice >= 0) & (columns[features.choice.clamp(min=0)] >= 0)
        inside = shifted(batch.mask, 1, False)
        steps = []
        for k in range(self.config.depth):
            inside = inside & shifted(batch.mask, 2 + k, False)
            steps.append(inside & shifted(known, 1 + k, False))
        return torch.stack(steps)

    def loss(self, batch: Batch, features: Features, verifier: Verifier) -> HeadLoss:
        supervised = self.supervised(batch, features)
        wanted, index = target_rows(supervised)
        teacher = self.teacher(features, verifier, wanted)
        rows, states = self.training_states(batch, features, verifier, supervised.any(0), self.config.depth)
        sums, correct = [], []
        for k, state in enumerate(states):
            here = supervised[k].gather(1, rows.clamp(min=0)) & (rows >= 0)  # [B, R]
            labels = shifted(index, 1 + k, -1).gather(1, rows.clamp(min=0))[here]
            loss, hits = linear_cross_entropy(self.norm(state[here]), self.lm_head.weight, teacher, labels)
            sums.append(loss)
            correct.append(hits)
        counts = supervised.flatten(1).sum(1)
        weights = self.config.decay ** torch.arange(self.config.depth, device=counts.device)
        return HeadLoss(torch.stack(sums), counts, torch.stack(correct), weights)

    def training_states(
        self, batch: Batch, features: Features, verifier: Verifier, queries: Tensor, steps: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Pre-norm outputs of the first `steps` steps at the query positions.

        queries: bool [B, T] -> rows [B, R], the positions (-1 pads), and a state [B, R, d] for each step.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        fused = self.fuse(features.layers)  # [B, T, d]
        positions = torch.arange(fused.shape[1], device=fused.device)[None]
        x = layer.join(verifier.embed(shifted(batch.ids, 1, 0)).float(), fused)
        keys, values = attention.key_value(x, *self.rotary(positions))
        rows = padded_positions(queries)
        at = rows.clamp(min=0)
        mask = additive(positions[:, None, :] <= at[:, :, None], fused.dtype)
        hidden, x = take_rows(fused, at), take_rows(x, at)
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        states = []
        for k in range(steps):
            cos_sin = self.rotary(at + k)
            if k > 0:
                x = layer.join(verifier.embed(shifted(batch.ids, 1 + k, 0).gather(1, at)).float(), hidden)
                key, value = attention.key_value(x, *cos_sin)
                own_keys.append(key)
                own_values.append(value)
            q = attention.query(x, *cos_sin)
            hidden = layer.finish(hidden, attend_with_own_steps(q, keys, values, mask, own_keys, own_values))
            states.append(hidden)
        return rows, states

    @torch.no_grad()
    def first_draft(self, batch: Batch, features: Features, verifier: Verifier, where: Tensor) -> Tensor:
        rows, (state,) = self.training_states(batch, features, verifier, where, steps=1)
        return self.log_q(state[rows >= 0])

    def log_q(self, state: Tensor) -> Tensor:
        """Pre-norm output [..., d] -> float32 log-probabilities [..., Q]."""
        return self.lm_head(self.norm(state)).float().log_softmax(-1)

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> "Eagle3Session":
        check_fits(self.config, verifier.facts, verifier.name)
        return Eagle3Session(self, verifier, batch, capacity)


def padded_positions(queries: Tensor) -> Tensor:
    """Positions [B, R] where `queries` [B, T] is true, in order, -1 behind a sample's last."""
    counts = queries.sum(1)
    order = torch.argsort(queries.int(), dim=1, descending=True, stable=True)[:, : int(counts.max())]
    return torch.where(torch.arange(order.shape[1], device=order.device) < counts[:, None], order, -1)


def take_rows(x_BTd: Tensor, rows_BR: Tensor) -> Tensor:
    return x_BTd.gather(1, rows_BR[:, :, None].expand(-1, -1, x_BTd.shape[-1]))


class Eagle3Session(DraftSession):
    """Drafting with a key/value cache of committed positions; a round's nodes are written behind them level by level."""

    def __init__(self, head: Eagle3Head, verifier: Verifier, batch: int, capacity: int) -> None:
        self.head, self.verifier = head, verifier
        self.cache = RaggedCache(1, batch, capacity)
        self.states = torch.empty(0)  # [B, 1 + nodes, d]: pre-norm output of the root, then of every expanded node
        self.seen = torch.empty(0)  # bool [B, nodes, nodes]: which expanded nodes are on each one's path
        self.depths = torch.empty(0)  # [B, nodes]: 0 for a child of the root

    @torch.no_grad()
    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        head, device = self.head, next_ids.device
        self.cache.pending = 0
        size = next_ids.shape[1]
        fused = head.fuse(features.layers)
        x = head.midlayer.join(self.verifier.embed(next_ids).float(), fused)
        positions = self.cache.slots(size, device)
        last = torch.tensor(counts, device=device)[:, None] - 1
        causal = torch.ones(1, size, size, dtype=torch.bool, device=device).tril()
        seen = visible(self.cache.lengths, causal, torch.arange(size, device=device)[None], None)
        seen = seen.gather(1, last[:, :, None].expand(-1, -1, seen.shape[2]))  # only the last real row asks
        root = self.run(take_rows(fused, last), x, take_rows(x, last), positions, positions.gather(1, last), seen)
        self.cache.advance(counts)
        self.states = root
        self.seen = torch.zeros(len(counts), 0, 0, dtype=torch.bool, device=device)
        self.depths = torch.zeros(len(counts), 0, dtype=torch.long, device=device)
        return head.log_q(root)[:, 0]

    @torch.no_grad()
    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        size = ids.shape[1]
        nodes = self.seen.shape[1]
        self.grow(parents)
        hidden = take_rows(self.states, parents + 1)
        x = self.head.midlayer.join(self.verifier.embed(ids).float(), hidden)
        starts = torch.tensor(self.cache.lengths, device=ids.device)[:, None]
        positions = starts + self.depths[:, nodes:]
        seen = visible(self.cache.lengths, self.seen[:, nodes:], self.depths, None)
        state = self.run(hidden, x, x, positions, positions, seen)
        self.cache.pending += size
        self.states = torch.cat([self.states, state], 1)
        return self.head.log_q(state)

    def grow(self, parents: Tensor) -> None:
        """Append one level to the ancestry: a node sees what its parent sees, and itself."""
        batch, size = parents.shape
        nodes = self.seen.shape[1]
        seen = self.seen.new_zeros(batch, nodes + size, nodes + size)
        seen[:, :nodes, :nodes] = self.seen
        if nodes:
            up = parents.clamp(min=0)
            inherited = self.seen.gather(1, up[:, :, None].expand(-1, -1, nodes)) & (parents >= 0)[:, :, None]
            seen[:, nodes:, :nodes] = inherited
            depth = torch.where(parents >= 0, self.depths.gather(1, up) + 1, 0)
        else:
            depth = torch.zeros_like(parents)
        seen[:, nodes:, nodes:] = torch.eye(size, dtype=torch.bool, device=seen.device)
        self.seen, self.depths = seen, torch.cat([self.depths, depth], 1)

    def run(self, hidden: Tensor, x_keys: Tensor, x: Tensor, key_positions: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """The layer at `x` [B, M, 2d] with residual `hidden`, after writing the keys and values of `x_keys`."""
        attention, rotary = self.head.midlayer.self_attn, self.head.rotary
        keys, values = self.cache.layers[0].update(*attention.key_value(x_keys, *rotary(key_positions)))
        q = attention.query(x, *rotary(positions))
        return self.head.midlayer.finish(hidden, attend(q, keys, values, additive(seen, q.dtype)))

    def keep_rows(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)


def build(config: dict[str, Any]) -> Eagle3Head:
    return Eagle3Head(Eagle3Config(**config))


register("eagle3", build)
