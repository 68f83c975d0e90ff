"""Samples to batches: which samples go together, in which order, and as padded tensors."""

import bisect
import math
import random
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..heads.batch import Batch
from .chat import Sample

GROUP = 32  # batches whose samples are sorted by length together: little padding, still random


def batch_order(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int, grouped: bool = True) -> list[list[int]]:
    """One epoch of batches of sample indices, each of at most `batch_tokens` tokens with its padding (one sample at least).

    grouped: samples of like length go together. The order depends on seed and epoch alone, so a resumed run finds its place
    by counting.
    """
    rng = random.Random(f"{seed}-{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    average = sum(lengths) / len(lengths)
    window = max(1, math.ceil(GROUP * batch_tokens / average))
    batches = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        batches += split_by_tokens(sorted(part, key=lambda i: lengths[i]) if grouped else part, lengths, batch_tokens)
    rng.shuffle(batches)
    return batches


def split_by_tokens(indices: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    longest = 0
    for i in indices:
        longest = max(longest, lengths[i])
        if batches[-1] and longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    return batches


def packed_order(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """As `batch_order` for packed rows, as long as the longest sample: batches of samples of any length, which `packed_rows`
    lays out in at most `batch_tokens` tokens (one row at least).

    A batch lies in order of length where that takes no more rows: dealt out one by one, as several processes do, all shares
    are about equal and pack as well.
    """
    rng = random.Random(f"{seed}-{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    size = max(lengths)
    window = max(1, math.ceil(GROUP * batch_tokens / (sum(lengths) / len(lengths))))
    rows: list[list[int]] = []
    for start in range(0, len(order), window):
        rows += best_fit(order[start : start + window], lengths, size)
    rng.shuffle(rows)
    together = max(1, batch_tokens // size)
    batches = []
    for start in range(0, len(rows), together):
        batch = [i for row in rows[start : start + together] for i in row]
        by_length = sorted(batch, key=lambda i: lengths[i])
        as_many = len(packed_rows([lengths[i] for i in by_length], size)) <= together
        batches.append(by_length if as_many else batch)
    return batches


def best_fit(indices: Sequence[int], lengths: Sequence[int], size: int) -> list[list[int]]:
    """Samples in rows of at most `size` tokens: the longest first, each into the fullest row that still takes it. (One
    that is longer than a row gets a row alone.)"""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for i in sorted(indices, key=lambda i: -lengths[i]):
        at = bisect.bisect_left(room, (lengths[i], -1))
        left, row = room.pop(at) if at < len(room) else (size, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        bisect.insort(room, (left - lengths[i], row))
    return rows


def packed_rows(lengths: Sequence[int], size: int) -> list[list[int]]:
    """A batch's samples as rows of at most `size` tokens: as they come, or sorted anew where that takes fewer rows (the share
    of one process does not come in rows)."""
    return min(as_they_come(lengths, size), best_fit(range(len(lengths)), lengths, size), key=len)


def as_they_come(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Samples in the order given, a new row where one is full (a longer sample alone)."""
    rows: list[list[int]] = []
    left = 0
    for i, length in enumerate(lengths):
        if not rows or length > left:
            rows.append([])
            left = size
        rows[-1].append(i)
        left -= length
    return rows


def batch_plan(
    lengths: Sequence[int],
    batch_tokens: int,
    seed: int,
    steps: int | None,
    epochs: float | None,
    packing: bool = False,
    grouped: bool = True,
) -> list[list[int]]:
    """The batches of a whole run, an entry an optimizer step: `steps` of them, or `epochs` passes (the last may be partial)."""
    order = packed_order if packing else partial(batch_order, grouped=grouped)
    plan: list[list[int]] = []
    epoch = 0
    while len(plan) < steps if steps is not None else epoch < (epochs or 0):
        batches = order(lengths, batch_tokens, seed, epoch)
        if epochs is not None:
            batches = batches[: math.ceil(round(len(batches) * min(1.0, epochs - epoch), 6))]
        plan += batches
        epoch += 1
    return plan if steps is None else plan[:steps]


def collate(samples: Sequence[Sample], device: torch.device, rows: Sequence[Sequence[int]] | None = None) -> Batch:
    """Right-padded tensors. Padding is told by lengths and masks, never by a token id: the pad id may be the stop id.

    rows: which of the samples each row holds, one behind the other (see `packed_rows`); None gives each a row of its own.
    """
    ids = lay_out([torch.tensor(sample.ids) for sample in samples], 0, rows)
    mask = lay_out([torch.tensor(sample.mask) for sample in samples], False, rows)
    places = [torch.arange(len(sample.ids)) for sample in samples]
    lengths = torch.tensor([sum(len(samples[i].ids) for i in row) for row in rows or [[i] for i in range(len(samples))]])
    positions = None if rows is None else lay_out(places, 0, rows).to(device)
    return Batch(ids.to(device), mask.to(device), lengths.to(device), positions=positions)


def lay_out(parts: Sequence[Tensor], fill: float, rows: Sequence[Sequence[int]] | None = None) -> Tensor:
    """Tensors [T_i, ...] of a batch's samples as its rows [B, T, ...], `fill` behind their end; rows as in `collate`."""
    joined = list(parts) if rows is None else [torch.cat([parts[i] for i in row]) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(joined, batch_first=True, padding_value=fill)
