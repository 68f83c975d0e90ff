"""The loader contracts for EAGLE-3 folders: one rule a few lines, each broken rule one line.

Shapes: d hidden size, Q draft vocabulary, V verifier vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .fields import head_dim_of, kv_heads_of, legacy_rope, modern_rope
from .folder import Folder

STATES = 3
LAYER_SHAPES = {  # of the decoder layer's weights, by the names of their sizes
    "self_attn.q_proj": ("q", "in"), "self_attn.k_proj": ("kv", "in"), "self_attn.v_proj": ("kv", "in"),
    "self_attn.o_proj": ("d", "q"), "mlp.gate_proj": ("wide", "d"), "mlp.up_proj": ("wide", "d"),
    "mlp.down_proj": ("d", "wide"), "hidden_norm": ("d",), "input_layernorm": ("d",), "post_attention_layernorm": ("d",),
}  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps")


@dataclass(frozen=True)
class Engine:
    """How one engine's loader differs. layer_offset: state entering layer = index + offset; reads_*: whether the field counts
    at all; residual_default: norm_before_residual where a folder is silent; own_table: an embed_tokens tensor is used."""

    architectures: tuple[str, ...]
    layer_offset: int = 0
    reads_layers: bool = True
    reads_residual: bool = False
    residual_default: bool = False
    own_table: bool = True


PLAIN = ("LlamaForCausalLMEagle3",)
ENGINES = {
    "vllm": Engine((*PLAIN, "Eagle3LlamaForCausalLM"), reads_residual=True),
    "sglang": Engine(PLAIN, layer_offset=1, own_table=False),
    "speculators": Engine(("Eagle3Speculator", "Eagle3DraftModel"), reads_residual=True, residual_default=True),
    "eagle": Engine(PLAIN, reads_layers=False),
    "tensorrt-llm": Engine(PLAIN, reads_layers=False, own_table=False),
}


def prefix_of(folder: Folder) -> str:
    return "midlayer" if any(name.startswith("midlayer.") for name in folder.tensors) else "layers.0"


def norm_before_residual(folder: Folder, engine: Engine) -> bool:
    """What the engine does: the residual is the normed hidden state, or the one before `hidden_norm`."""
    return bool(folder.config.get("norm_before_residual", engine.residual_default)) and engine.reads_residual


def named_layers(folder: Folder) -> Any:
    """The layer indices a folder names, None where it leaves them to the engine."""
    nested = folder.config.get("eagle_config")
    found = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    return folder.config.get("eagle_aux_hidden_state_layer_ids") or found


def captured_layers(folder: Folder, engine: Engine, verifier_layers: int) -> tuple[int, ...]:
    """The states the engine hands to fc: those entering these verifier layers."""
    named = named_layers(folder) if engine.reads_layers else None
    if not named:
        return (2, verifier_layers // 2, verifier_layers - 3)
    return tuple(sorted({layer + engine.layer_offset for layer in named}))


def expected_shapes(folder: Folder, prefix: str) -> dict[str, list[int]]:
    layer = folder.layer
    d, wide = layer["hidden_size"], layer["intermediate_size"]
    q_size, kv_size = layer["num_attention_heads"] * head_dim_of(layer), kv_heads_of(layer) * head_dim_of(layer)
    read = folder.config.get("target_hidden_size") or d
    rows = folder.config.get("draft_vocab_size") or layer["vocab_size"]
    sizes = {"q": q_size, "kv": kv_size, "d": d, "in": 2 * d, "wide": wide}
    inner = {name: [sizes[axis] for axis in axes] for name, axes in LAYER_SHAPES.items()}
    outer = {"fc": [d, STATES * read], "norm": [d], "lm_head": [rows, d]}
    return {f"{name}.weight": shape for name, shape in outer.items()} | {
        f"{prefix}.{name}.weight": shape for name, shape in inner.items()
    }


def broken_rules(folder: Folder, name: str) -> Iterator[str]:
    """Every rule of the engine's loader that the folder breaks: "rule: what is wrong"."""
    engine = ENGINES[name]
    missing = [field for field in SIZES if not isinstance(folder.layer.get(field), int | float)]
    if missing:
        yield f"fields: {', '.join(missing)} missing from config.json"
        return
    yield from check_kind(folder, name, engine)
    yield from check_tensors(folder, engine)
    yield from check_vocabulary(folder)
    yield from check_fields(folder)
    yield from check_flags(folder, name, engine)
    yield from check_rope(folder.layer)
    yield from check_layers(folder, name, engine)


def check_kind(folder: Folder, name: str, engine: Engine) -> Iterator[str]:
    architectures = folder.config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in engine.architectures:
        yield f"architectures: {architectures}, {name} knows {' and '.join(engine.architectures)}"
    if folder.layer.get("num_hidden_layers") != 1:
        yield f"layers: num_hidden_layers is {folder.layer.get('num_hidden_layers')}, the head has 1"
    if name == "vllm" and "eagle-" in folder.path.absolute().name.lower():
        yield f"path: a name like {folder.path.name} makes vLLM guess EAGLE-1 where no method is given"
    if name == "speculators":
        yield from check_speculators(folder.config)


def check_speculators(config: dict[str, Any]) -> Iterator[str]:
    if config.get("speculators_model_type") != "eagle3":
        yield f"speculators: speculators_model_type is {config.get('speculators_model_type')!r}, must be 'eagle3'"
    if not config.get("speculators_version"):
        yield "speculators: speculators_version is missing"
    nested = config.get("transformer_layer_config")
    if not isinstance(nested, dict) or nested.get("model_type") not in ("llama", "qwen3"):
        yield "speculators: transformer_layer_config must have model_type llama or qwen3"
    try:
        outer = config["speculators_config"]
        method = next(m for m in outer["proposal_methods"] if m["proposal_type"] == outer["default_proposal_method"])
        whole = outer["algorithm"] == "eagle3" and method["speculative_tokens"] >= 1 and bool(outer["verifier"]["name_or_path"])
        whole = whole and isinstance(outer["verifier"]["architectures"], list)
    except (KeyError, TypeError, StopIteration):
        whole = False
    if not whole:
        yield "speculators: speculators_config needs algorithm eagle3, a proposal method with speculative_tokens and a verifier"
    if not isinstance(config.get("norm_before_residual"), bool):
        yield "residual: norm_before_residual is absent, and then vLLM takes it as true"


def check_tensors(folder: Folder, engine: Engine) -> Iterator[str]:
    expected = expected_shapes(folder, prefix_of(folder))
    known = expected.keys() | {"d2t", "t2d", "embed_tokens.weight"}
    for name in sorted(expected.keys() - folder.tensors.keys()):
        yield f"names: tensor {name} is missing"
    for name in sorted(folder.tensors.keys() - known):
        yield f"names: tensor {name} is unknown to the loader"
    table = folder.tensors.get("embed_tokens.weight")
    if table is not None:
        expected["embed_tokens.weight"] = [folder.layer["vocab_size"], folder.layer["hidden_size"]]
        if not engine.own_table:
            yield "names: embed_tokens.weight is ignored, the engine takes the verifier's table"
    for name, shape in expected.items():
        if name in folder.tensors and list(folder.tensors[name].shape) != shape:
            yield f"shapes: {name} is {list(folder.tensors[name].shape)}, the fields say {shape}"


def check_vocabulary(folder: Folder) -> Iterator[str]:
    size, drafted = folder.layer["vocab_size"], folder.config.get("draft_vocab_size")
    if not isinstance(drafted, int):
        yield "vocabulary: draft_vocab_size is missing, and then the whole vocabulary is assumed"
        return
    d2t = folder.tensors.get("d2t")
    if d2t is None:
        if drafted < size:
            yield "d2t: missing, and then the first draft_vocab_size tokens are drafted, without an error"
        return
    if d2t.dtype != torch.int64 or list(d2t.shape) != [drafted]:
        yield f"d2t: is {d2t.dtype} {list(d2t.shape)}, must be torch.int64 [{drafted}]"
        return
    yield from check_offsets(d2t + torch.arange(drafted), folder.tensors.get("t2d"), size)


def check_offsets(ids: Tensor, t2d: Tensor | None, size: int) -> Iterator[str]:
    """ids: [Q], what d2t makes of 0..Q."""
    if len(ids.unique()) != len(ids) or bool((ids < 0).any()) or bool((ids >= size).any()):
        yield f"d2t: draft id + d2t must be distinct ids below {size}; d2t holds offsets, not ids"
        return
    if t2d is None:
        yield "t2d: missing"
    elif t2d.dtype != torch.bool or list(t2d.shape) != [size]:
        yield f"t2d: is {t2d.dtype} {list(t2d.shape)}, must be torch.bool [{size}]"
    elif not torch.equal(t2d.nonzero()[:, 0], ids.sort().values):
        yield "t2d: is not true exactly at draft id + d2t; d2t holds offsets, not ids"


def check_fields(folder: Folder) -> Iterator[str]:
    layer = folder.layer
    if not isinstance(layer.get("head_dim"), int):
        yield "head_dim: must be explicit; hidden_size / heads is a guess"
    if not isinstance(layer.get("max_position_embeddings"), int):
        yield "positions: max_position_embeddings is missing"
    if folder.config.get("tie_word_embeddings") is not False or layer.get("tie_word_embeddings") is not False:
        yield "tie: tie_word_embeddings must be false, or the lm_head is replaced by the embeddings"
    if layer.get("hidden_act", "silu") != "silu":
        yield f"activation: hidden_act {layer['hidden_act']!r}, must be 'silu'"
    if "target_hidden_size" in folder.config and folder.config["target_hidden_size"] is None:
        yield "target: target_hidden_size is null, loaders multiply it; leave it out"


def check_flags(folder: Folder, name: str, engine: Engine) -> Iterator[str]:
    for field in ("attention_bias", "mlp_bias", "bias"):
        if folder.layer.get(field):
            yield f"bias: {field} is true, the layout has no biases"
    for field in ("norm_before_fc", "fc_norm", "norm_output"):
        if folder.config.get(field):
            yield f"flags: {field} is true; {name} has no tensors for it in this layout"
    if folder.config.get("norm_before_residual") and not engine.reads_residual:
        yield f"residual: norm_before_residual is true, {name} ignores it"


def check_rope(layer: dict[str, Any]) -> Iterator[str]:
    modern, legacy = modern_rope(layer), legacy_rope(layer)
    if modern is None:
        yield "rope: rope_parameters is missing; transformers 5 readers take theta 10000 without scaling"
    if legacy is None:
        yield "rope: rope_theta is missing; older readers take theta 10000"
    if modern and legacy and modern != legacy:
        differing = sorted(k for k in modern.keys() | legacy.keys() if modern.get(k) != legacy.get(k))
        yield f"rope: rope_parameters and the legacy rope_theta/rope_scaling differ in {', '.join(differing)}"
    factor = layer.get("partial_rotary_factor") or (modern or {}).get("partial_rotary_factor")
    if factor not in (None, 1, 1.0):
        yield f"rope: partial_rotary_factor {factor}; the draft layer rotates every dimension"


def check_layers(folder: Folder, name: str, engine: Engine) -> Iterator[str]:
    named = named_layers(folder)
    if named is None:
        return
    if not isinstance(named, list) or not all(isinstance(i, int) for i in named) or named != sorted(set(named)):
        yield f"layer ids: {named} must be distinct whole numbers in ascending order; loaders sort them"
    elif named[0] + engine.layer_offset < 1:
        yield f"layer ids: {named} begins before the first layer's output"
    elif len(named) != STATES:
        yield f"layer ids: {len(named)} of them, fc reads {STATES}"
    elif not engine.reads_layers:
        yield f"layer ids: {name} ignores them and reads its defaults; leave them out"
