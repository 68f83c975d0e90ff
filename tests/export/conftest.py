"""Orders of tiny heads, and the folders they become."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.export.layout import Order
from headstart.export.write import write_export
from headstart.heads.base import DraftHead
from headstart.heads.verifier import Verifier


@pytest.fixture
def export_to(tmp_path: Path) -> Callable[..., Path]:
    """`export_to(engine, head, verifier, name="owner/name", dtype=torch.float32, folder="out")`: the written folder."""

    def write(engine: str, head: DraftHead, verifier: Verifier, name: str | None = "owner/name",
              dtype: torch.dtype = torch.float32, folder: str = "out") -> Path:  # fmt: skip
        target = tmp_path / folder
        write_export(Order(head, verifier, name, dtype), engine, target)
        return target

    return write


@pytest.fixture
def read() -> Callable[[Path], tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """`read(folder)`: its config.json and its tensors, by json and safetensors alone."""

    def open_folder(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        (weights,) = folder.glob("*.safetensors")
        return json.loads((folder / "config.json").read_text()), load_file(weights)

    return open_folder


@pytest.fixture
def edit() -> Callable[..., None]:
    """`edit(folder, {"a.b": value or None to delete}, {"tensor": tensor or None})`."""

    def change(folder: Path, fields: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> None:
        config = json.loads((folder / "config.json").read_text())
        for key, value in (fields or {}).items():
            *path, last = key.split(".")
            place = config
            for name in path:
                place = place[name]
            if value is None:
                del place[last]
            else:
                place[last] = value if value != "null" else None
        (folder / "config.json").write_text(json.dumps(config))
        (weights,) = folder.glob("*.safetensors")
        held = load_file(weights)
        for name, tensor in (tensors or {}).items():
            if tensor is None:
                del held[name]
            else:
                held[name] = tensor.contiguous()
        save_file(held, weights)

    return change
