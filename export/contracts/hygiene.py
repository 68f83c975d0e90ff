"""What holds for every folder that others download: finite tensors of one dtype, nothing of this machine, no pickles."""

from collections.abc import Iterator
from typing import Any

import torch

from .folder import Folder


def broken_rules(folder: Folder) -> Iterator[str]:
    floats = {name: tensor for name, tensor in folder.tensors.items() if tensor.is_floating_point()}
    for name, tensor in folder.tensors.items():
        if tensor.numel() == 0:
            yield f"tensors: {name} is empty"
    for name, tensor in floats.items():
        if not bool(torch.isfinite(tensor).all()):
            yield f"tensors: {name} holds NaN or infinity"
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in floats.values()})
    said = folder.config.get("dtype") or folder.config.get("torch_dtype")
    if dtypes != [said]:
        yield f"dtype: config.json says {said}, the tensors are {', '.join(dtypes)}"
    if "" in (folder.config.get("auto_map") or {}):
        yield "auto_map: has an empty key"
    for key, value in strings(folder.config):
        if value.startswith(("/", "~", "./", "../")) or value[1:3] == ":\\":
            yield f"paths: {key} is a path of some machine: {value}"
    for path in sorted(folder.path.iterdir()):
        if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
            yield f"pickles: {path.name} lies in the folder; safetensors only"


def strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string in a configuration with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from strings(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner, key)
