"""The EAGLE-3 tensors and Llama fields that every engine's layout shares.

Shapes: d hidden size, Q columns of the draft vocabulary, V rows of the verifier's lm_head.
"""

from typing import Any

import torch
from torch import Tensor

from ..heads.base import DraftHead, LayerConfig
from ..heads.eagle3 import Eagle3Head
from ..heads.verifier import Verifier
from .layout import Order, refusal

STATES = 3  # verifier states that engines build `fc` for


def eagle3_head(order: Order, engine: str, instead: str) -> Eagle3Head:
    """The head, if it is one that EAGLE-3 layouts can hold."""
    head: DraftHead = order.head
    if not isinstance(head, Eagle3Head):
        raise refusal(engine, f"this layout holds EAGLE-3 heads, this one is {head.kind}", instead)
    if len(head.config.layers) != STATES:
        raise refusal(engine, f"engines build fc for {STATES} verifier states, this head reads {len(head.config.layers)}",
                      "train with three head.layers")  # fmt: skip
    if head.config.fc_norm or head.config.norm_output:
        raise refusal(engine, "the layout has no place for the norms of EAGLE-3.1 (head.fc_norm, head.norm_output)",
                      "headstart eval, which decodes with every head")  # fmt: skip
    return head


def default_layers(verifier: Verifier) -> tuple[int, ...]:
    """The states that engines capture when a folder names none: those entering layers 2, n//2, n-3."""
    n = verifier.facts.num_hidden_layers
    return (2, n // 2, n - 3)


def has_default_layers(head: Eagle3Head, verifier: Verifier) -> bool:
    return head.config.layers == default_layers(verifier)


def llama_fields(config: LayerConfig) -> dict[str, Any]:
    """The draft layer as a one-layer Llama. It rotates every dimension: a verifier's partial factor is not written."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0} | (config.rope_parameters or {})
    rope.pop("partial_rotary_factor", None)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],  # readers from before transformers 5 look here
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "tie_word_embeddings": False,
    }


def plain_config(order: Order, head: Eagle3Head) -> dict[str, Any]:
    """config.json of the layout that EAGLE, vLLM, SGLang and TensorRT-LLM share, without layer indices."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_fields(head.config),
        "draft_vocab_size": head.config.draft_vocab_size,
        "norm_before_residual": False,  # our residual is the hidden state before hidden_norm
        "dtype": order.dtype_name,
    }


def eagle3_tensors(order: Order, head: Eagle3Head, layer: str) -> dict[str, Tensor]:
    """All tensors, the decoder layer's under the name `layer`; `input_scale` goes into fc."""
    own: dict[str, Tensor] = {name.replace("midlayer.", f"{layer}."): tensor for name, tensor in head.named_parameters()}
    own["fc.weight"] = own["fc.weight"] * head.input_scale
    tensors = {name: order.cast(tensor) for name, tensor in own.items()}
    tensors |= shared_table(order)
    ids = head.target_ids.detach().cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))  # offsets: verifier id = draft id + d2t
    tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def shared_table(order: Order) -> dict[str, Tensor]:
    """No embedding table where the engine's look-up in the verifier's own does, else the scaled one."""
    if shares_table(order.verifier):
        return {}
    ids = torch.arange(order.verifier.facts.vocab_size, device=order.verifier.device)
    return {"embed_tokens.weight": order.cast(order.verifier.embed(ids))}


def shares_table(verifier: Verifier) -> bool:
    """Whether a plain look-up in the verifier's table gives what the head was trained on (Gemma and Granite scale it)."""
    table = verifier.embedding_table
    ids = torch.arange(min(64, len(table)), device=verifier.device)
    return torch.equal(verifier.embed(ids), table[ids])


def needs_shared_table(order: Order, engine: str) -> None:
    if not shares_table(order.verifier):
        raise refusal(engine, "it gives the draft layer the verifier's unscaled embedding table, this verifier scales it",
                      "--to vllm, which reads a table from the folder")  # fmt: skip
