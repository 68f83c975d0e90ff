"""A key/value cache whose rows have lengths of their own: what tree verification and ragged batches need.

Committed tokens of row b lie densely in slots [0, lengths[b]), so a slot is a position. A forward pass of T new tokens writes
slots lengths[b] .. lengths[b] + T and commits nothing: `commit` keeps the accepted ones and the rest is overwritten next time.
Sliding-window layers keep every token here and the window lives in the mask, so a rollback never needs what was evicted.

Shapes: B rows, H key/value heads, T new tokens, N uncommitted tokens, S slots, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .batch import sent


class RaggedLayer(CacheLayerMixin):
    """Keys and values [B, H, capacity, D] of one layer, written where the owning cache says."""

    is_sliding = False

    def __init__(self, owner: "RaggedCache") -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        b, h, _, _ = key_states.shape
        self.keys = key_states.new_zeros(b, h, self.owner.capacity, key_states.shape[-1])
        self.values = value_states.new_zeros(b, h, self.owner.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write T new tokens; returns every slot that any row uses: [B, H, S, D] twice."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.owner.write(self.keys, key_states), self.owner.write(self.values, value_states)

    def get_seq_length(self) -> int:
        return max(self.owner.lengths)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length  # its name in older transformers


class RaggedCache(Cache):
    """Key/value cache of `layers` layers and `batch` rows with room for `capacity` tokens a row."""

    def __init__(self, layers: int, batch: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths: list[int] = [0] * batch  # kept on the host: reading them never waits for the device
        self.pending = 0  # uncommitted tokens a row already holds, where a tree is written level by level
        self.recorded: dict[Any, Any] = {}  # passes over these very tensors, or their number (see repeated.py)
        self.fixed: tuple[Tensor, int] | None = None  # slots [B, T] and end of a pass that is being recorded
        super().__init__(layers=[RaggedLayer(self) for _ in range(layers)])

    def write(self, store_BHSD: Tensor, new_BHTD: Tensor) -> Tensor:
        """Put T new tokens behind those that each row holds; returns the slots that any row uses, [B, H, S, D]."""
        tokens = new_BHTD.shape[2]
        end = self.end(tokens)
        assert end <= self.capacity, f"cache of {self.capacity} slots is too small for {end} tokens"
        if self.fixed is None and min(self.lengths) == max(self.lengths):
            store_BHSD[:, :, end - tokens : end] = new_BHTD
            return store_BHSD[:, :, :end]
        slots, end = (self.slots(tokens, store_BHSD.device), end) if self.fixed is None else self.fixed
        rows = torch.arange(len(self.lengths), device=store_BHSD.device)[:, None]
        store_BHSD[rows, :, slots] = new_BHTD.transpose(1, 2)
        return store_BHSD[:, :, :end]

    @contextmanager
    def writing_at(self, slots: Tensor, end: int) -> Iterator[None]:
        """A pass that does not know the rows' lengths: new tokens go to `slots` [B, T], all slots before `end` are read."""
        self.fixed = slots, end
        try:
            yield
        finally:
            self.fixed = None

    def end(self, tokens: int) -> int:
        """Slots in use by the longest row with `tokens` new tokens."""
        return max(self.lengths) + self.pending + tokens

    def slots(self, tokens: int, device: torch.device) -> Tensor:
        """[B, T]: where the next `tokens` tokens of every row go."""
        starts = sent(self.lengths, device)
        return starts[:, None] + self.pending + torch.arange(tokens, device=device)

    def commit(self, nodes_BP: Tensor, counts: list[int]) -> None:
        """Keep, of the uncommitted tokens, nodes_BP[b, : counts[b]] in that order; forget the others.

        nodes_BP: [B, P] indices among the new tokens; entries beyond counts[b] may be any valid index.
        """
        device = nodes_BP.device
        sources = sent(self.lengths, device)[:, None] + nodes_BP
        targets = self.slots(nodes_BP.shape[1], device)
        rows = torch.arange(len(counts), device=device)[:, None]
        for layer in self.layers:
            for store in (layer.keys, layer.values):
                # advanced indexing copies first: sources and targets overlap
                store[rows, :, targets] = store[rows, :, sources]
        self.advance(counts)

    def advance(self, counts: list[int]) -> None:
        """Commit the first counts[b] of the uncommitted tokens, which already lie in place."""
        self.pending = 0
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def keep_rows(self, rows: list[int]) -> None:
        """Drop all rows but these (finished sequences leave the batch)."""
        self.lengths = [self.lengths[row] for row in rows]
        self.recorded.clear()
        for layer in self.layers:
            if layer.is_initialized:  # a row may leave before the first forward pass
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]


def visible(cache_lengths: list[int], tree_BTN: Tensor, depth_BN: Tensor, window: int | None) -> Tensor:
    """Which slots each of the last T of N uncommitted tokens sees: bool [B, T, S], S = longest row + N.

    tree_BTN: [B or 1, T, N], entry (i, j) true where token j is query i itself or an ancestor of it.
    depth_BN: [B or 1, N], distance from the row's length, so an uncommitted token's position is lengths[b] + depth.
    window: tokens at a distance of `window` or more are hidden (sliding attention); None sees all.
    """
    device = tree_BTN.device
    lengths_B = sent(cache_lengths, device)
    batch, queries, tokens = len(cache_lengths), tree_BTN.shape[-2], tree_BTN.shape[-1]
    slots_S = torch.arange(max(cache_lengths) + tokens, device=device)
    new_BS = slots_S[None] - lengths_B[:, None]  # index among the uncommitted tokens, negative for committed ones
    index = new_BS.clamp(0, tokens - 1)[:, None, :].expand(batch, queries, -1)
    seen = torch.gather(tree_BTN.expand(batch, -1, -1), 2, index)
    seen = torch.where((new_BS < 0)[:, None], True, seen & (new_BS < tokens)[:, None])
    if window is None:
        return seen
    depth_BN = depth_BN.expand(batch, -1)
    new_position = lengths_B[:, None] + torch.gather(depth_BN, 1, index[:, 0])
    key_position_BS = torch.where(new_BS < 0, slots_S[None], new_position)
    query_position_BT = lengths_B[:, None] + depth_BN[:, -queries:]
    return seen & (query_position_BT[:, :, None] - key_position_BS[:, None, :] < window)


def within_documents(positions_BT: Tensor, window: int | None) -> Tensor:
    """Which tokens each one sees where documents lie one behind the other in a row: bool [B, T, T].

    positions_BT: [B, T], counted within a document; a document sees itself alone, causally, and within `window` as above.
    """
    place_T = torch.arange(positions_BT.shape[1], device=positions_BT.device)
    distance_TT = place_T[:, None] - place_T
    reach_BT = positions_BT if window is None else positions_BT.clamp(max=window - 1)
    return (distance_TT >= 0) & (distance_TT <= reach_BT[:, :, None])


class Ancestry:
    """The nodes that a head has expanded in a round, in the order given, behind the committed tokens of each row."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.seen = torch.zeros(
            batch, 0, 0, dtype=torch.bool, device=device
        )  # [B, N, N]: who is on whose path, itself included
        self.depths = torch.zeros(batch, 0, dtype=torch.long, device=device)  # [B, N]: 0 for a child of the root

    def grow(self, parents: Tensor) -> None:
        """Append a level. parents: [B, M], index of each new node's parent, -1 for the root."""
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

    def newest(self, lengths: list[int], count: int) -> tuple[Tensor, Tensor]:
        """Of the last `count` nodes: positions [B, M], and which slots they see, bool [B, M, S]."""
        starts = sent(lengths, self.depths.device)[:, None]
        first = self.depths.shape[1] - count
        return starts + self.depths[:, first:], visible(lengths, self.seen[:, first:], self.depths, None)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Bool mask [B, T, S] as the additive mask [B, 1, T, S] that every attention implementation takes.

    finfo.min rather than -inf: a padding row that sees nothing stays finite.
    """
    hidden = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, hidden)[:, None]
