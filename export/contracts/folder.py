"""A folder as a loader finds it: config.json and tensors. Bad files are told in one line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...errors import UserError, first_line

WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")


@dataclass(frozen=True)
class Folder:
    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str  # the file they came from

    @property
    def is_medusa(self) -> bool:
        return self.config.get("model_type") == "medusa" or "medusa_num_heads" in self.config

    @property
    def is_eagle1(self) -> bool:
        """An fc, but neither an lm_head of its own nor a draft vocabulary."""
        own = "lm_head.weight" in self.tensors or "draft_vocab_size" in self.config
        return not self.is_medusa and not self.is_speculators and "fc.weight" in self.tensors and not own

    @property
    def is_speculators(self) -> bool:
        return "speculators_model_type" in self.config

    @property
    def layer(self) -> dict[str, Any]:
        """The fields of the draft layer: a section of their own in the speculators layout."""
        nested = self.config.get("transformer_layer_config")
        return nested if self.is_speculators and isinstance(nested, dict) else self.config


def read_folder(path: Path, allow_pickle: bool = False) -> Folder:
    """Raises UserError when there is no head in it, or a damaged one, or only pickles and those are not allowed."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    config = read_config(path / "config.json")
    for name in WEIGHTS:
        if (path / name).is_file():
            return Folder(path, config, read_safetensors(path / name), name)
    for name in PICKLES:
        if (path / name).is_file():
            if not allow_pickle:
                raise UserError(f"{path / name}: a pickle can run code; convert it to safetensors, or trust its maker: "
                                "headstart import --allow-pickle")  # fmt: skip
            return Folder(path, config, read_pickle(path / name), name)
    raise UserError(f"{path}: not a draft head: none of {', '.join(WEIGHTS + PICKLES)} is there")


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent}: not a draft head: config.json is missing") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable JSON: {first_line(error)}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return config


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path}: not a whole safetensors file: {first_line(error)}") from None


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors of a pickle, by torch's loader that builds nothing but tensors."""
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a broken or hostile pickle raises is anybody's guess
        raise UserError(f"{path}: not loadable as weights alone: {first_line(error)}") from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise UserError(f"{path}: holds something else than named tensors")
    return loaded
