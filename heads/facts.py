"""What is read off a transformers model's configuration and modules: its sizes, its layers, how far they see."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..errors import UserError


@dataclass(frozen=True)
class Facts:
    """Sizes of the verifier that draft heads and masks are built from; `rope_parameters` is None where nothing rotates."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any] | None
    stop_ids: tuple[int, ...]


def check_attends(config: Any) -> None:
    """Refuse builds whose memory of earlier tokens is not masked keys and values, or whose masks no known field announces."""
    name = config.model_type
    if getattr(config, "num_attention_heads", None) is None:
        raise UserError(f"verifier {name}: it has no attention heads; a recurrent state cannot be rolled back or branched")
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo
        raise UserError(f"verifier {name}: its local attention layers are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type"), *(value.get("rope_type") for value in rope.values() if isinstance(value, dict))}
    if "longrope" in kinds:
        raise UserError(f"verifier {name}: longrope turns all positions by the longest row of a batch; not supported")


def find_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"verifier {type(decoder).__name__}: no list of {count} decoder layers found; not supported")


def attention_windows(config: Any) -> dict[str, int | None]:
    """Kinds of attention layer and how far each sees (None: everything)."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    known = {"full_attention": None, "sliding_attention": window}
    if unknown := kinds - known.keys():
        raise UserError(f"verifier {config.model_type}: {', '.join(sorted(unknown))} layers keep a state that cannot be "
                        "rolled back or branched; trees and drafts are not supported")  # fmt: skip
    return {kind: known[kind] for kind in sorted(kinds)}


def read_facts(model: PreTrainedModel, lm_head: nn.Linear) -> Facts:
    config = model.config.get_text_config(decoder=True)
    hidden, heads = config.hidden_size, config.num_attention_heads
    try:
        head_dim = getattr(config, "head_dim", None)
    except Exception as error:  # layers with head sizes of their own (Gemma 4)
        raise UserError(f"verifier {config.model_type}: its layers differ in head size; not supported") from error
    if head_dim is None:
        if hidden % heads:
            raise UserError(f"verifier {config.model_type}: hidden size {hidden} is not divisible by {heads} heads and no "
                            "head_dim is given")  # fmt: skip
        head_dim = hidden // heads
    if getattr(config, "max_position_embeddings", None) is None:
        raise UserError(f"verifier {config.model_type}: its configuration names no max_position_embeddings; not supported")
    sizes = [module.weight.shape[1] for module in (model.get_input_embeddings(), lm_head)]
    if sizes != [hidden, hidden]:
        raise UserError(f"verifier {config.model_type}: hidden states of {hidden}, but embeddings of {sizes[0]} and an "
                        f"lm_head for {sizes[1]}; not supported")  # fmt: skip
    rope = getattr(config, "rope_parameters", None) or None
    if rope is not None and "rope_type" not in rope:  # one set of parameters a kind of layer (Gemma 3)
        rope = rope.get("full_attention") or next(iter(rope.values()))
    stop = model.generation_config.eos_token_id if model.generation_config is not None else None
    stop = config.eos_token_id if stop is None else stop
    return Facts(
        hidden_size=hidden,
        vocab_size=lm_head.weight.shape[0],
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        intermediate_size=getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
        stop_ids=tuple(stop) if isinstance(stop, list | tuple) else () if stop is None else (stop,),
    )
