"""Heads that read a hidden state and the next token, and then their own output: how they are trained and how they draft.

Training-time test: step k predicts token t + 2 + k from position t, reading its own output of step k - 1, embedding the true
token t + 1 + k, and attending over the step-0 keys of its document up to t and its own keys of steps 1..k. Only supervised
rows run as queries; the other positions only lend keys and values.

Shapes: B rows, T tokens, R query rows a sample (padded), K steps, d hidden size, Q columns of the head's vocabulary.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from .attention import Sight, attend_with_own, sight
from .base import DraftHead, check_fits, columns_of
from .batch import Batch, sent, take_rows
from .cache import Ancestry, RaggedCache, additive, visible
from .drafter import DraftSession
from .layers import DecoderLayer, RotaryPositions, attend
from .repeated import Inputs
from .verifier import Features, Verifier


class RecurrentHead(DraftHead):
    """One decoder layer that runs once for every drafted token."""

    rotary: RotaryPositions

    @property
    @abstractmethod
    def block(self) -> DecoderLayer:
        """The layer."""

    @abstractmethod
    def source(self, features: Features) -> Tensor:
        """The hidden state that step 0 reads: [B, T, d], float32."""

    @abstractmethod
    def join(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """A token's embedding and the hidden state before it -> the residual stream [..., d] and what attention reads."""

    @abstractmethod
    def log_q(self, state: Tensor, verifier: Verifier) -> Tensor:
        """The layer's output [..., d] -> float32 log-probabilities [..., Q]."""

    def feedback(self, state: Tensor) -> Tensor:
        """What the next step reads of the layer's output."""
        return state

    @property
    def depth(self) -> None:
        return None

    def training_states(
        self, batch: Batch, features: Features, verifier: Verifier, queries: Tensor, steps: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Outputs of the first `steps` steps at the query positions.

        queries: bool [B, T] -> rows [B, R], the positions (-1 pads), and a state [B, R, d] for each step.
        """
        layer, attention = self.block, self.block.self_attn
        source = self.source(features)
        residual, x = self.join(verifier.embed(batch.ahead(batch.ids, 1, 0)).float(), source)
        keys, values = attention.key_value(x, *self.rotary(batch.places))
        rows = padded_positions(queries)
        at = rows.clamp(min=0)
        places = batch.places.expand(len(at), -1).gather(1, at)
        seen = sight(at - places, at, rows >= 0, attention.heads)  # from the document's first token to one's own
        residual, x = take_rows(residual, at), take_rows(x, at)
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        states: list[Tensor] = []
        for k in range(steps):
            cos_sin = self.rotary(places + k)
            if k > 0:
                embedding = verifier.embed(batch.ahead(batch.ids, 1 + k, 0).gather(1, at)).float()
                residual, x = self.join(embedding, self.feedback(states[-1]))
                key, value = attention.key_value(x, *cos_sin)
                own_keys.append(key)
                own_values.append(value)
            q = attention.query(x, *cos_sin)
            states.append(self.kept(layer_output, layer, residual, q, keys, values, seen, [*own_keys], [*own_values]))
        return rows, states

    @torch.no_grad()
    def predictions(
        self, batch: Batch, features: Features, verifier: Verifier, where: Tensor, depths: int
    ) -> list[Tensor]:  # fmt: skip
        rows, states = self.training_states(batch, features, verifier, where, depths)
        return [self.log_q(state[rows >= 0], verifier) for state in states]

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> "RecurrentSession":
        check_fits(self.config, verifier.facts, verifier.name)
        return RecurrentSession(self, verifier, batch, capacity)


def layer_output(
    layer: DecoderLayer, residual: Tensor, q: Tensor, keys: Tensor, values: Tensor, seen: Sight, own_keys: list[Tensor],
    own_values: list[Tensor],
) -> Tensor:  # fmt: skip
    """A step of the training-time test behind its queries: attention and MLP."""
    return layer.finish(residual, attend_with_own(q, keys, values, seen, own_keys, own_values))


def supervised_drafts(batch: Batch, features: Features, target_ids: Tensor, vocab_size: int, depth: int) -> Tensor:
    """bool [K, B, T]: step k at t is supervised iff tokens t + 1 .. t + 2 + k are all one answer's, and the verifier's own
    choice for t + 2 + k can be drafted. (Decoding never drafts from before the answer's first token.)"""
    assert features.choice is not None
    columns = columns_of(target_ids, vocab_size)
    known = (features.choice >= 0) & (columns[features.choice.clamp(min=0)] >= 0)
    inside = batch.ahead(batch.mask, 1, False)
    steps = []
    for k in range(depth):
        inside = inside & batch.ahead(batch.mask, 2 + k, False)
        steps.append(inside & batch.ahead(known, 1 + k, False))
    return torch.stack(steps)


def padded_positions(queries: Tensor) -> Tensor:
    """Positions [B, R] where `queries` [B, T] is true, in order, -1 behind a sample's last."""
    counts = queries.sum(1)
    order = torch.argsort(queries.int(), dim=1, descending=True, stable=True)[:, : int(counts.max())]
    return torch.where(torch.arange(order.shape[1], device=order.device) < counts[:, None], order, -1)


class RecurrentSession(DraftSession):
    """Drafting with a key/value cache of committed positions; a round's nodes are written behind them level by level."""

    def __init__(self, head: RecurrentHead, verifier: Verifier, batch: int, capacity: int) -> None:
        self.head, self.verifier = head, verifier
        self.cache = RaggedCache(1, batch, capacity)
        self.states = torch.empty(0)  # [B, 1 + nodes, d]: the layer's output at the root, then at every expanded node
        self.nodes = Ancestry(batch, verifier.device)

    @torch.no_grad()
    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        head, device = self.head, next_ids.device
        self.cache.pending = 0
        size = next_ids.shape[1]
        residual, x = head.join(self.verifier.embed(next_ids).float(), head.source(features))
        positions = self.cache.slots(size, device)
        last = sent(counts, device)[:, None] - 1
        causal = torch.ones(1, size, size, dtype=torch.bool, device=device).tril()
        seen = visible(self.cache.lengths, causal, torch.arange(size, device=device)[None], None)
        seen = seen.gather(1, last[:, :, None].expand(-1, -1, seen.shape[2]))  # only the last real row asks
        root = self.run(take_rows(residual, last), x, take_rows(x, last), positions, positions.gather(1, last), seen)
        self.cache.advance(counts)
        self.states = root
        self.nodes = Ancestry(len(counts), device)
        return head.log_q(root, self.verifier)[:, 0]

    @torch.no_grad()
    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        self.nodes.grow(parents)
        hidden = self.head.feedback(take_rows(self.states, parents + 1))
        residual, x = self.head.join(self.verifier.embed(ids).float(), hidden)
        positions, seen = self.nodes.newest(self.cache.lengths, ids.shape[1])
        state = self.run(residual, x, x, positions, positions, seen)
        self.cache.pending += ids.shape[1]
        self.states = torch.cat([self.states, state], 1)
        return self.head.log_q(state, self.verifier)

    def run(
        self, residual: Tensor, x_keys: Tensor, x: Tensor, key_positions: Tensor, positions: Tensor, seen: Tensor
    ) -> Tensor:
        """The layer at `x` [B, M, i] with its residual, after writing the keys and values of `x_keys`."""
        inputs = {"residual": residual, "x_keys": x_keys, "x": x, "key_positions": key_positions, "positions": positions}
        (state,) = self.verifier.repeated.run(
            self.cache, f"{self.head.kind} layer", x_keys.shape[1], inputs, {"": seen}, self.layer
        )
        return state

    def layer(self, inputs: Inputs, seen: Inputs) -> list[Tensor]:
        attention, rotary = self.head.block.self_attn, self.head.rotary
        keys_values = attention.key_value(inputs["x_keys"], *rotary(inputs["key_positions"]))
        keys, values = self.cache.layers[0].update(*keys_values)
        q = attention.query(inputs["x"], *rotary(inputs["positions"]))
        return [self.head.block.finish(inputs["residual"], attend(q, keys, values, additive(seen[""], q.dtype)))]

    def keep_rows(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)
