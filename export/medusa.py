"""Medusa heads in vLLM's layout and in the original one.

Shapes: K heads, L residual blocks, d hidden size, Q columns of the heads' vocabulary, V rows of the verifier's lm_head.
"""

from typing import Any

from torch import Tensor

from ..heads.medusa import MedusaHead
from .layout import Export, Order, needs_name, refusal


def export(order: Order) -> Export:
    """The original layout: every head has all V rows, so a shared lm_head is written once for each head."""
    head = order.head
    if not isinstance(head, MedusaHead):
        raise refusal("medusa", f"this layout holds Medusa heads, this one is {head.kind}", "--to vllm")
    config = head.config
    if config.draft_vocab_size != config.vocab_size:
        raise refusal("medusa", f"its heads rank the whole vocabulary of {config.vocab_size}, this head knows "
                      f"{config.draft_vocab_size} tokens", "--to vllm, which can leave tokens out")  # fmt: skip
    name = needs_name(order, "medusa")
    tensors: dict[str, Tensor] = {}
    for (h, block, part), tensor in block_tensors(head).items():
        tensors[f"{h}.{block}.linear.{part}"] = order.cast(tensor)
    for h, weight in enumerate(head.output_weights(order.verifier)):
        tensors[f"{h}.{config.blocks}.weight"] = order.cast(weight).clone()
    settings = {
        "medusa_num_heads": config.heads,
        "medusa_num_layers": config.blocks,
        "base_model_name_or_path": name,
        "dtype": order.dtype_name,
    }
    return Export("the Medusa repository", settings, tensors, "python -m medusa.inference.cli --model THIS_FOLDER",
                  weights="medusa_lm_head.safetensors")  # fmt: skip


def vllm_config(order: Order, head: MedusaHead) -> dict[str, Any]:
    """vLLM maps any key with "num" and "heads" or "layers" to these two, the last one wins: there must be no others."""
    config = head.config
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,  # 32001 when absent
        "num_heads": config.heads,
        "num_hidden_layers": config.blocks,
        "medusa_fc_bias": True,  # false when absent, and then the biases are dropped silently
        "original_lm_head": config.lm_head == "shared",
        "truncated_vocab_size": config.vocab_size,  # vLLM fails on the token_map that a smaller one needs
        "dtype": order.dtype_name,
    }


def vllm_tensors(order: Order, head: MedusaHead) -> dict[str, Tensor]:
    """One lm_head [V, d] where it is shared (with the verifier's logit scale in it), else one a head.

    Rows of tokens that the head does not know are zero: their logits are 0, below those that a head is sure of.
    """
    config = head.config
    tensors: dict[str, Tensor] = {}
    for (h, block, part), tensor in block_tensors(head).items():
        tensors[f"blocks.{h}.layers.{block}.{part}"] = order.cast(tensor)
    outputs = head.output_weights(order.verifier)
    for h, weight in enumerate(outputs[:1] if config.lm_head == "shared" else outputs):
        rows = order.cast(weight)
        whole = rows.new_zeros(config.vocab_size, rows.shape[1])
        tensors[f"lm_heads.{h}.weight"] = whole.index_copy(0, head.target_ids.cpu(), rows)
    return tensors


def block_tensors(head: MedusaHead) -> dict[tuple[int, int, str], Tensor]:
    """(head, block, "weight" or "bias") -> [d, d] or [d]."""
    found: dict[tuple[int, int, str], Tensor] = {}
    for name, tensor in head.blocks.named_parameters():
        h, block, _, part = name.split(".")
        found[int(h), int(block), part] = tensor
    return found
