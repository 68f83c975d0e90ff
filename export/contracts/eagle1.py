"""The loader contracts for EAGLE-1 folders: a Llama layer without its first norm, under the verifier's lm_head.

Shapes: d hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .eagle3 import LAYER_SHAPES, SIZES, check_fields, check_rope
from .fields import head_dim_of, kv_heads_of
from .folder import Folder


@dataclass(frozen=True)
class Engine:
    """bias: fc has one, left random where the folder has none; own_table: an embed_tokens tensor is used."""

    architectures: tuple[str, ...]
    bias: bool
    own_table: bool = True


ENGINES = {
    "vllm": Engine(("LlamaForCausalLM", "EagleLlamaForCausalLM"), bias=False),
    "sglang": Engine(("LlamaForCausalLMEagle",), bias=True, own_table=False),
    "eagle": Engine(("LlamaForCausalLM",), bias=True),
}


def expected_shapes(folder: Folder, bias: bool) -> dict[str, list[int]]:
    layer = folder.layer
    d, wide = layer["hidden_size"], layer["intermediate_size"]
    q_size, kv_size = layer["num_attention_heads"] * head_dim_of(layer), kv_heads_of(layer) * head_dim_of(layer)
    sizes = {"q": q_size, "kv": kv_size, "d": d, "in": d, "wide": wide}
    shapes = {
        f"layers.0.{name}.weight": [sizes[axis] for axis in axes]
        for name, axes in LAYER_SHAPES.items()
        if name not in ("hidden_norm", "input_layernorm")
    }
    return shapes | {"fc.weight": [d, 2 * d]} | ({"fc.bias": [d]} if bias else {})


def broken_rules(folder: Folder, name: str) -> Iterator[str]:
    """Every rule of the engine's loader that the folder breaks: "rule: what is wrong"."""
    if name not in ENGINES:
        yield f"engine: {name} does not load EAGLE-1 heads"
        return
    engine = ENGINES[name]
    missing = [field for field in SIZES if not isinstance(folder.layer.get(field), int | float)]
    if missing:
        yield f"fields: {', '.join(missing)} missing from config.json"
        return
    architectures = folder.config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in engine.architectures:
        yield f"architectures: {architectures}, {name} knows {' and '.join(engine.architectures)}"
    if folder.layer.get("num_hidden_layers") != 1:
        yield f"layers: num_hidden_layers is {folder.layer.get('num_hidden_layers')}, the head has 1"
    lowered = folder.path.absolute().name.lower()
    if name == "vllm" and "eagle3" in lowered and "eagle-" not in lowered:
        yield f"path: a name like {folder.path.name} makes vLLM guess EAGLE-3 where no method is given"
    yield from check_tensors(folder, name, engine)
    for field in ("attention_bias", "mlp_bias", "bias"):
        if folder.layer.get(field):
            yield f"bias: {field} is true, the layout has no such biases"
    yield from check_fields(folder)
    yield from check_rope(folder.layer)


def check_tensors(folder: Folder, name: str, engine: Engine) -> Iterator[str]:
    expected = expected_shapes(folder, engine.bias)
    for tensor in sorted(expected.keys() - folder.tensors.keys()):
        why = f"; {name} leaves it random" if tensor == "fc.bias" else ""
        yield f"names: tensor {tensor} is missing{why}"
    for tensor in sorted(folder.tensors.keys() - expected.keys() - {"embed_tokens.weight"}):
        yield f"names: tensor {tensor} is unknown to the loader"
    if "embed_tokens.weight" in folder.tensors:
        expected["embed_tokens.weight"] = [folder.layer["vocab_size"], folder.layer["hidden_size"]]
        if not engine.own_table:
            yield "names: embed_tokens.weight is ignored, the engine takes the verifier's table"
    for tensor, shape in expected.items():
        if tensor in folder.tensors and list(folder.tensors[tensor].shape) != shape:
            yield f"shapes: {tensor} is {list(folder.tensors[tensor].shape)}, the fields say {shape}"
