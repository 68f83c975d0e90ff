"""Samples to batches: which samples go together, in which order, and as padded tensors."""

import math
import random
from collections.abc import Sequence

import torch

from ..heads.base import Batch
from .chat import Sample

GROUP = 32  # batches whose samples are sorted by length together: little padding, still random


def batch_order(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """One epoch of batches of sample indices, each of at most `batch_tokens` tokens with its padding (one sample at least).

    The order depends on seed and epoch alone, so a resumed run finds its place by counting.
    """
    rng = random.Random(f"{seed}-{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    average = sum(lengths) / len(lengths)
    window = max(1, math.ceil(GROUP * batch_tokens / average))
    batches = []
    for start in range(0, len(order), window):
        batches += split_by_tokens(sorted(order[start : start + window], key=lambda i: lengths[i]), lengths, batch_tokens)
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


def batch_plan(
    lengths: Sequence[int], batch_tokens: int, seed: int, steps: int | None, epochs: float | None
) -> list[list[int]]:
    """The batches of a whole run, an entry an optimizer step: `steps` of them, or `epochs` passes (the last may be partial)."""
    plan: list[list[int]] = []
    epoch = 0
    while len(plan) < steps if steps is not None else epoch < (epochs or 0):
        batches = batch_order(lengths, batch_tokens, seed, epoch)
        if epochs is not None:
            batches = batches[: math.ceil(round(len(batches) * min(1.0, epochs - epoch), 6))]
        plan += batches
        epoch += 1
    return plan if steps is None else plan[:steps]


def collate(samples: Sequence[Sample], device: torch.device) -> Batch:
    """Right-padded tensors. Padding is told by lengths and masks, never by a token id: the pad id may be the stop id."""
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    ids = torch.zeros(len(samples), int(lengths.max()), dtype=torch.long)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        mask[row, : len(sample.ids)] = torch.tensor(sample.mask)
    return Batch(ids.to(device), mask.to(device), lengths.to(device))
