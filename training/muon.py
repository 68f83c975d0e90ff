"""Muon (Jordan 2024): momentum whose matrix is made nearly orthogonal before use, so that no direction is left behind.

torch.optim.Muon is the same rule, fixed to bfloat16 products, which CPUs without them compute a hundred times slower; here the
products are in the precision of the training step (autocast's, or the weights' own).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that pulls every singular value towards one
ITERATIONS = 5


class Muon(Optimizer):
    """For matrices only. `lr` means what it means for AdamW: updates have a root mean square of 0.2 lr (Liu 2025)."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype  # of the products

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(momentum, group["momentum"]).to(self.dtype))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.to(parameter.dtype), alpha=-0.2 * group["lr"] * max(parameter.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """U Vᵀ of the matrix's singular value decomposition, nearly: singular values end between about 0.7 and 1.2. [m, n]."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
