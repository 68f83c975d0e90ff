"""EAGLE-1 (and EAGLE-2, HASS: the same weights): one Llama layer without its first norm, under the verifier's own lm_head.

Shapes: d hidden size, V rows of the verifier's lm_head.
"""

from typing import Any

import torch
from torch import Tensor

from ..heads.eagle1 import Eagle1Head
from .eagle3 import llama_fields, shared_table
from .layout import Order


def eagle1_config(order: Order, head: Eagle1Head, architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture], **llama_fields(head.config), "dtype": order.dtype_name}


def eagle1_tensors(order: Order, head: Eagle1Head, bias: bool) -> dict[str, Tensor]:
    """bias: write one of zeros for fc. vLLM fails on it; SGLang and EAGLE build one and leave it random otherwise."""
    own: dict[str, Tensor] = {name.replace("layer.", "layers.0.", 1): tensor for name, tensor in head.named_parameters()}
    if bias:
        own["fc.bias"] = torch.zeros(head.config.hidden_size)
    return {name: order.cast(tensor) for name, tensor in own.items()} | shared_table(order)


def eagle1_notes(head: Eagle1Head) -> tuple[str, ...]:
    drafted, size = len(head.target_ids), head.config.vocab_size
    if drafted == size:
        return ()
    return (f"The engine drafts from the verifier's whole vocabulary of {size}; the run drafted from {drafted} tokens of it.",)
