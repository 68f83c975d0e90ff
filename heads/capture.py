"""The states that enter decoder layers, taken during a forward pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def captured(layers: nn.ModuleList, wanted: Sequence[int]) -> Iterator[list[Tensor]]:
    """Collect the states [B, T, d] entering the wanted decoder layers during one forward pass, in the order asked."""
    found: dict[int, Tensor] = {}

    def hook(index: int) -> Any:
        def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[index] = args[0] if args else kwargs["hidden_states"]

        return take

    handles = [layers[i].register_forward_pre_hook(hook(i), with_kwargs=True) for i in set(wanted)]
    states: list[Tensor] = []
    try:
        yield states
        states.extend(found[i] for i in wanted)
    finally:
        for handle in handles:
            handle.remove()


def concatenate(states: list[Tensor], last: Tensor) -> Tensor:
    """States side by side, [B, T, L * d]; of none, a tensor like `last` [B, T, d] without width."""
    return torch.cat(states, -1) if states else last[..., :0]
