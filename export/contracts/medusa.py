"""The loader contracts for Medusa folders: vLLM's and the original one.

Shapes: d hidden size, Q rows of a head's lm_head, V verifier vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .folder import Folder

VLLM_VOCABULARY = 32001  # what vLLM takes where vocab_size is absent


@dataclass(frozen=True)
class Parsed:
    """The head as a loader builds it. target_ids: [Q] verifier ids of the lm_head's rows, None for all in order."""

    blocks: list[list[tuple[Tensor, Tensor | None]]]  # a list of (weight, bias) a head
    outputs: list[Tensor]  # [Q, d] a head
    target_ids: Tensor | None


def counted(config: dict[str, Any]) -> dict[str, Any]:
    """vLLM's own parsing: any key with "num" and "heads", or "num" and "layers", is the number; the last one wins."""
    found: dict[str, Any] = {"num_heads": 5, "num_hidden_layers": 1}
    for key, value in config.items():
        if "num" in key and "heads" in key:
            found["num_heads"] = value
        elif "num" in key and "layers" in key:
            found["num_hidden_layers"] = value
    return found


def broken_rules(folder: Folder, engine: str) -> Iterator[str]:
    """Every rule of the engine's loader that the folder breaks: "rule: what is wrong"."""
    if engine == "vllm":
        yield from broken_vllm(folder)
    elif engine == "medusa":
        yield from broken_original(folder)
    else:
        yield f"engine: {engine} does not load Medusa heads"


def broken_vllm(folder: Folder) -> Iterator[str]:
    config, tensors = folder.config, folder.tensors
    if config.get("model_type") != "medusa":
        yield f"model_type: {config.get('model_type')!r}, must be 'medusa'"
    if config.get("architectures") != ["MedusaModel"]:
        yield f"architectures: {config.get('architectures')}, must be ['MedusaModel']"
    if folder.weights != "model.safetensors":
        yield f"file: {folder.weights}, must be model.safetensors"
    if any(word in folder.path.absolute().name.lower() for word in ("eagle-", "eagle3")):
        yield f"path: a name like {folder.path.name} makes vLLM guess EAGLE where no method is given"
    for field, default in (("hidden_size", 4096), ("vocab_size", VLLM_VOCABULARY)):
        if not isinstance(config.get(field), int):
            yield f"fields: {field} is missing, and then {default} is assumed"
            return
    strangers = [key for key in config if "num" in key and ("heads" in key or "layers" in key)
                 and key not in ("num_heads", "num_hidden_layers")]  # fmt: skip
    if strangers:
        yield f"counts: {', '.join(strangers)} would be read as num_heads or num_hidden_layers"
    yield from check_vllm_tensors(folder, counted(config))
    yield from check_token_map(tensors.get("token_map"), config)


def check_vllm_tensors(folder: Folder, counts: dict[str, Any]) -> Iterator[str]:
    config, d = folder.config, folder.config["hidden_size"]
    rows = config.get("truncated_vocab_size") or config["vocab_size"]
    heads, layers = counts["num_heads"], counts["num_hidden_layers"]
    expected: dict[str, list[int]] = {}
    for h in range(heads):
        for block in range(layers):
            expected[f"blocks.{h}.layers.{block}.weight"] = [d, d]
            if config.get("medusa_fc_bias", False):
                expected[f"blocks.{h}.layers.{block}.bias"] = [d]
    for h in range(1 if config.get("original_lm_head", False) else heads):
        expected[f"lm_heads.{h}.weight"] = [rows, d]
    known = expected.keys() | {"token_map"}
    for name in sorted(expected.keys() - folder.tensors.keys()):
        yield f"names: tensor {name} is missing"
    for name in sorted(folder.tensors.keys() - known):
        why = "; medusa_fc_bias is not true" if name.endswith(".bias") else ""
        yield f"names: tensor {name} is dropped without an error{why}"
    for name, shape in expected.items():
        if name in folder.tensors and list(folder.tensors[name].shape) != shape:
            yield f"shapes: {name} is {list(folder.tensors[name].shape)}, the fields say {shape}"


def check_token_map(token_map: Tensor | None, config: dict[str, Any]) -> Iterator[str]:
    size, rows = config["vocab_size"], config.get("truncated_vocab_size") or config["vocab_size"]
    if rows == size:
        if token_map is not None:
            yield "token_map: ignored, truncated_vocab_size is the whole vocabulary"
    elif token_map is None:
        yield f"token_map: missing, truncated_vocab_size is {rows} of {size}"
    elif token_map.dtype != torch.int64 or list(token_map.shape) != [rows]:
        yield f"token_map: is {token_map.dtype} {list(token_map.shape)}, must be torch.int64 [{rows}]"
    elif len(token_map.unique()) != rows or int(token_map.min()) < 0 or int(token_map.max()) >= size:
        yield f"token_map: must be distinct ids below {size}"
    else:
        yield (
            'loading: vLLM 0.32 ends with "weights were not initialized" on any token_map; write all rows of lm_heads, zeros '
            "where nothing is drafted"
        )


def broken_original(folder: Folder) -> Iterator[str]:
    config, tensors = folder.config, folder.tensors
    if folder.weights != "medusa_lm_head.safetensors":
        yield f"file: {folder.weights}, must be medusa_lm_head.safetensors"
    for field in ("medusa_num_heads", "medusa_num_layers"):
        if not isinstance(config.get(field), int):
            yield f"fields: {field} is missing"
            return
    if not config.get("base_model_name_or_path"):
        yield "fields: base_model_name_or_path is missing, and then a Vicuna is loaded"
    heads, layers = config["medusa_num_heads"], config["medusa_num_layers"]
    expected = {f"{h}.{layers}.weight" for h in range(heads)} | {
        f"{h}.{block}.linear.{part}" for h in range(heads) for block in range(layers) for part in ("weight", "bias")
    }
    for name in sorted(expected - tensors.keys()):
        yield f"names: tensor {name} is missing"
    for name in sorted(tensors.keys() - expected):
        yield f"names: tensor {name} is unknown to the loader"
    outputs = [tensors[name] for h in range(heads) if (name := f"{h}.{layers}.weight") in tensors]
    if len({tuple(output.shape) for output in outputs}) > 1:
        yield "shapes: the heads' output layers differ in size"
    for name in sorted(expected & tensors.keys()):
        d = outputs[0].shape[1] if outputs else 0
        shape = [d] if name.endswith("bias") else [d, d]
        if ".linear." in name and list(tensors[name].shape) != shape:
            yield f"shapes: {name} is {list(tensors[name].shape)}, the output layers say {shape}"


def parse(folder: Folder, engine: str) -> Parsed:
    """The head a loader builds of a folder that breaks no rule."""
    tensors, config = folder.tensors, folder.config
    if engine == "medusa":
        heads, layers = config["medusa_num_heads"], config["medusa_num_layers"]
        blocks: list[list[tuple[Tensor, Tensor | None]]] = [
            [(tensors[f"{h}.{b}.linear.weight"], tensors[f"{h}.{b}.linear.bias"]) for b in range(layers)] for h in range(heads)
        ]
        return Parsed(blocks, [tensors[f"{h}.{layers}.weight"] for h in range(heads)], None)
    counts = counted(config)
    heads, layers = counts["num_heads"], counts["num_hidden_layers"]
    biased, shared = config.get("medusa_fc_bias", False), config.get("original_lm_head", False)
    blocks = [
        [
            (tensors[f"blocks.{h}.layers.{b}.weight"], tensors[f"blocks.{h}.layers.{b}.bias"] if biased else None)
            for b in range(layers)
        ]
        for h in range(heads)
    ]
    outputs = [tensors[f"lm_heads.{0 if shared else h}.weight"] for h in range(heads)]
    return Parsed(blocks, *drafted_rows(outputs, tensors.get("token_map")))


def drafted_rows(outputs: list[Tensor], token_map: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
    """Without rows that are zero in every head: such a token is never drafted while any logit is above 0."""
    drafted = torch.stack([output.ne(0).any(1) for output in outputs]).any(0)
    if token_map is not None or bool(drafted.all()):
        return outputs, token_map
    kept = drafted.nonzero()[:, 0]
    return [output[kept] for output in outputs], kept
