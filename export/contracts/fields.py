"""Reading Llama fields as engines do, with the defaults they assume."""

from typing import Any

LEGACY = {"type": "rope_type"}  # its name before transformers 4.45


def modern_rope(layer: dict[str, Any]) -> dict[str, Any] | None:
    """`rope_parameters`, as transformers 5 writes it; None where it is absent."""
    return normal_rope(layer["rope_parameters"]) if isinstance(layer.get("rope_parameters"), dict) else None


def legacy_rope(layer: dict[str, Any]) -> dict[str, Any] | None:
    """`rope_theta` and `rope_scaling`, as older readers look for them; None where there is no rope_theta."""
    if layer.get("rope_theta") is None:
        return None
    return normal_rope({**(layer.get("rope_scaling") or {}), "rope_theta": layer["rope_theta"]})


def normal_rope(rope: dict[str, Any]) -> dict[str, Any]:
    named = {LEGACY.get(name, name): value for name, value in rope.items()}
    return {"rope_type": "default", "rope_theta": 10_000.0} | named


def rope_of(layer: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters of a folder, whichever way it has them."""
    return modern_rope(layer) or legacy_rope(layer) or normal_rope(layer.get("rope_scaling") or {})


def head_dim_of(layer: dict[str, Any]) -> int:
    return layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]


def kv_heads_of(layer: dict[str, Any]) -> int:
    return layer.get("num_key_value_heads") or layer["num_attention_heads"]
