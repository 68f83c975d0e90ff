"""Attention of some rows of a sample over shared keys and over keys of their own, without ever holding all of its scores.

Training-time test needs it: at step k a query attends causally to the step-0 keys of its document, and to its own keys of the
steps before, one a step. That is one softmax over S + k logits. As causal attention with a log-sum-exp, merged with the k own
logits, it needs neither the (S·K)² mask nor the [R, S + k] scores: rows run a few at a time, over the slots that they see, and
the backward pass makes their probabilities again from the merged log-sum-exp L (as FlashAttention does, Dao 2022):
p = exp(score - L), and with D = Σ grad · output every score's gradient is p · (grad · value - D), be its key shared or own.

Shapes: B rows, H query heads in G groups of g, R query rows a sample (padded), S slots, C rows and N slots of a piece, D head
size, J own keys of a query.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SCORES = 2**22  # scores in memory at once (16 MiB): a few hundred rows of a small model, a few dozen of a large one


@dataclass(frozen=True)
class Sight:
    """What query rows see of the shared slots: first[b, r] to last[b, r], both included.

    first, last: [B, R]; pieces: (rows, slots) that are computed at a time, every row in one of them, with all the slots that
    any real one of its rows sees.
    """

    first: Tensor
    last: Tensor
    pieces: tuple[tuple[slice, slice], ...]


def sight(first: Tensor, last: Tensor, real: Tensor, heads: int) -> Sight:
    """first, last: [B, R]; real: bool [B, R], false where a row is padding: what comes out there is finite, and no more."""
    batch, rows = first.shape
    largest = torch.iinfo(first.dtype).max
    lows = first.where(real, largest).amin(0).tolist() if batch and rows else []
    highs = last.where(real, -1).amax(0).tolist() if batch and rows else []
    pieces, start, width = [], 0, max(highs, default=0) + 1
    while start < rows:
        stop = min(rows, start + max(1, SCORES // (batch * heads * max(width, 1))))
        low, high = min(lows[start:stop]), max(highs[start:stop]) + 1
        pieces.append((slice(start, stop), slice(low, high) if low < high else slice(0, 1)))
        start = stop
    return Sight(first, last, tuple(pieces))


def attend_with_own(
    q: Tensor, k: Tensor, v: Tensor, seen: Sight, own_keys: Sequence[Tensor], own_values: Sequence[Tensor]
) -> Tensor:
    """One softmax over the shared keys that a query sees and its own keys.

    q: [B, H, R, D]; k, v: [B, G, S, D]; own_keys, own_values: [B, G, R, D] each, entry r read by query r alone. Returns
    [B, H, R, D]; products are made in autocast's type, the softmax in float32 (in float64 for float64 inputs).
    """
    return _AttendWithOwn.apply(seen, q, k, v, *own_keys, *own_values)


class _AttendWithOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seen: Sight, q: Tensor, *others: Tensor) -> Tensor:
        device = q.device.type
        products = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
        ctx.dtypes = [x.dtype for x in (q, *others)]
        q, k, v, *own = (x.to(products) for x in (q, *others))
        precise = torch.promote_types(products, torch.float32)
        out, total = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=precise)
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        for rows, slots in seen.pieces:
            scores, own_scores = piece_scores(seen, q, k, keys, rows, slots)
            highest = torch.maximum(scores.amax(-1, keepdim=True), own_scores.amax(-1, keepdim=True))
            weights, own_weights = scores.sub_(highest).exp_(), own_scores.sub_(highest).exp_()
            sums = weights.sum(-1, keepdim=True) + own_weights.sum(-1, keepdim=True)
            mixed = grouped_product(weights.to(products), v[:, :, slots]).to(precise)
            for j, value in enumerate(values):
                mixed += own_weights[..., j, None] * value[:, :, None, rows]
            out[:, :, rows] = (mixed / sums).flatten(1, 2).to(products)
            total[:, :, rows] = (highest + sums.log()).squeeze(-1).flatten(1, 2)
        ctx.seen = seen
        ctx.save_for_backward(out, total, q, k, v, *own)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, total, q, k, v, *own = ctx.saved_tensors
        precise, products = total.dtype, q.dtype
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        grad_out = grads[0].to(products)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(k, dtype=precise), torch.zeros_like(v, dtype=precise)
        grad_keys, grad_values = [torch.empty_like(x) for x in keys], [torch.empty_like(x) for x in values]
        for rows, slots in ctx.seen.pieces:
            weights, own_weights = piece_scores(ctx.seen, q, k, keys, rows, slots)
            merged = total[:, :, rows, None].unflatten(1, (-1, groups))
            weights, own_weights = weights.sub_(merged).exp_(), own_weights.sub_(merged).exp_()
            asked, given = (x[:, :, rows].unflatten(1, (-1, groups)) for x in (q, grad_out))  # [B, G, g, C, D]
            mean = (given.to(precise) * out[:, :, rows].unflatten(1, (-1, groups))).sum(-1, keepdim=True)
            by_value = given.flatten(2, 3)
            grad_v[:, :, slots] += weights.to(products).flatten(2, 3).transpose(-1, -2) @ by_value
            of_scores = grouped_product(given, v[:, :, slots].transpose(-1, -2)).to(precise)
            of_scores = of_scores.sub_(mean).mul_(weights).mul_(scale).to(products)
            grad_k[:, :, slots] += of_scores.flatten(2, 3).transpose(-1, -2) @ asked.flatten(2, 3)
            found = grouped_product(of_scores, k[:, :, slots]).to(precise)
            for j, (key, value) in enumerate(zip(keys, values, strict=True)):
                weight, value = own_weights[..., j, None], value[:, :, None, rows]
                of_score = weight * ((given.to(precise) * value).sum(-1, keepdim=True) - mean) * scale
                found += of_score * key[:, :, None, rows]
                grad_keys[j][:, :, rows] = (of_score * asked).sum(2).to(products)
                grad_values[j][:, :, rows] = (weight * given).sum(2).to(products)
            grad_q[:, :, rows] = found.flatten(1, 2).to(products)
        found_all = (grad_q, grad_k, grad_v, *grad_keys, *grad_values)
        return None, *(x.to(dtype) for x, dtype in zip(found_all, ctx.dtypes, strict=True))


def piece_scores(seen: Sight, q: Tensor, k: Tensor, own: Sequence[Tensor], rows: slice, slots: slice) -> tuple[Tensor, Tensor]:
    """Scaled logits of a piece: over the shared slots [B, G, g, C, N], and over the rows' own keys [B, G, g, C, J].

    Without own keys J is 1 and the logit so low that it has no weight: a maximum over nothing is none.
    """
    precise = torch.promote_types(q.dtype, torch.float32)
    lowest, scale = torch.finfo(precise).min, q.shape[-1] ** -0.5
    asked = q[:, :, rows].unflatten(1, (k.shape[1], -1))
    scores = grouped_product(asked, k[:, :, slots].transpose(-1, -2)).to(precise).mul_(scale)
    index = torch.arange(slots.start, slots.stop, device=q.device)
    hidden = (index < seen.first[:, rows, None]) | (index > seen.last[:, rows, None])
    scores.masked_fill_(hidden[:, None, None], lowest)
    if not own:
        return scores, scores.new_full((*scores.shape[:-1], 1), lowest)
    return scores, torch.stack([(asked.to(precise) * key[:, :, None, rows]).sum(-1) * scale for key in own], -1)


def grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """[B, G, g, C, N] times [B, G, N, D], the query heads of a group over one matrix: [B, G, g, C, D]."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])
