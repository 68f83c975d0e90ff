"""torch.compile for what a head computes row by row: its MLPs and residual blocks.

Rows alone vary from batch to batch, so one graph serves all (attention, whose shapes vary in every way, stays as it is).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..heads.base import DraftHead
from ..heads.layers import Mlp
from ..heads.medusa import ResidualBlock


def compile_layers(head: DraftHead, backend: str = "inductor") -> None:
    """Have the head's MLPs and residual blocks compiled the first time they train."""
    for module in head.modules():
        if isinstance(module, Mlp | ResidualBlock):
            module.forward = by_rows(module, torch.compile(module.forward, dynamic=True, backend=backend))  # type: ignore[assignment]


def by_rows(module: nn.Module, compiled: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The compiled form over rows [N, d] where gradients are wanted; none or one would be a graph of its own."""
    eager = module.forward

    def forward(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if not torch.is_grad_enabled() or len(rows) < 2:
            return eager(x)
        return compiled(rows.clone()).view(x.shape)  # a copy: graphs are told apart by the shape of what is viewed

    return forward
