"""Samples as the rows of a batch. Shapes: B rows, T tokens, K depths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Samples as right-padded rows: one a row, or several documents one behind the other (packed).

    ids: [B, T]; mask: bool [B, T], true where the token is an answer's, to be learned; lengths: [B], tokens of a row;
    positions: [B, T], each token's position within its document, zero in the padding; None where a row is one document.
    counts: [K], the supervised labels of the whole optimizer step by depth, where it has other batches too and they are known:
    a hint that spares a loss work, the sums are the same without it.
    """

    ids: Tensor
    mask: Tensor
    lengths: Tensor
    positions: Tensor | None = None
    counts: Tensor | None = None

    @property
    def places(self) -> Tensor:
        """The positions: [B, T], or [1, T] where all rows have the same."""
        return torch.arange(self.ids.shape[1], device=self.ids.device)[None] if self.positions is None else self.positions

    def document_lengths(self) -> Tensor:
        """Tokens of the document that each token is of: [B, T] or [B, 1]."""
        if self.positions is None:
            return self.lengths[:, None]
        starts = torch.arange(self.ids.shape[1], device=self.ids.device) - self.positions
        return torch.zeros_like(starts).scatter_add_(1, starts, torch.ones_like(starts)).gather(1, starts)

    def ahead(self, x: Tensor, by: int, fill: Any) -> Tensor:
        """x[:, t + by] at every t, `fill` past the end of t's document. x: [B, T, ...]."""
        out = shifted(x, by, fill)
        if self.positions is None:
            return out
        inside = shifted(self.positions, by, -1) == self.positions + by
        return torch.where(inside.view(*inside.shape, *[1] * (x.dim() - 2)), out, fill)


def shifted(x: Tensor, by: int, fill: Any) -> Tensor:
    """x[:, t + by] at every t, `fill` past the end: a shift never wraps around. x: [B, T, ...]."""
    out = torch.full_like(x, fill)
    if by < x.shape[1]:
        out[:, : x.shape[1] - by] = x[:, by:]
    return out


def sent(values: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Numbers from the host to a device. A GPU is not waited for."""
    here = torch.as_tensor(values)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def take_rows(x_BTd: Tensor, rows_BR: Tensor) -> Tensor:
    """Of each sequence the positions asked for: [B, R, d]."""
    return x_BTd.gather(1, rows_BR[:, :, None].expand(-1, -1, x_BTd.shape[-1]))
