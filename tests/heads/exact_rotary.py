"""Rotary positions in float64, written from the definition: what the loss references of the test modules turn with."""

import torch
from torch import Tensor, nn


class ExactRotary(nn.Module):
    """Plain rotary positions in float64; the head's own module rounds to float32 (its values are tested elsewhere)."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        powers = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        angles = (positions.double()[..., None] * 10_000.0**-powers).repeat(1, 1, 2)
        return angles.cos()[:, None], angles.sin()[:, None]


def turned(x: Tensor, position: int) -> Tensor:
    """Rotate pairs (i, i + D/2) of x [n, D] as complex numbers."""
    half = x.shape[-1] // 2
    speeds = torch.tensor([10_000.0 ** (-i / half) for i in range(half)], dtype=torch.float64)
    spun = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(half).double(), position * speeds)
    return torch.cat([spun.real, spun.imag], -1)
