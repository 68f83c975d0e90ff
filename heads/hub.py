"""Save and load draft heads as folders: config.json and model.safetensors, and what a head keeps beside them."""

import json
from pathlib import Path

from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from ..errors import UserError, first_line
from . import eagle1, eagle3, medusa, mtp  # noqa: F401  (they register their kinds)
from .base import DraftHead, build_head
from .files import replace_folder


def save_head(head: DraftHead, folder: Path) -> None:
    """Write the head so that a killed process leaves the old folder or the new one, never a mixture."""

    def write(target: Path) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.own_state().items()}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        head.save_beside(target)
        (target / "config.json").write_text(json.dumps(head.config.model_dump(mode="json"), indent=2) + "\n")

    replace_folder(folder, write)


def load_head(folder: Path) -> DraftHead:
    """The head of a folder, in eval mode on the CPU. Raises UserError when the folder holds none or it is damaged."""
    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: not a draft head: {name} is missing")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise UserError("config.json must be a JSON object")
        head = build_head(config)
        tensors = load_file(folder / "model.safetensors")
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"]))
        raise UserError(f"{folder}/config.json: {field}: {fault['msg']}") from None
    except Exception as error:
        raise UserError(f"{folder}: not a readable draft head: {first_line(error)}") from error
    own = head.state_dict()
    for name in sorted(own.keys() | tensors.keys()):
        if name not in own or name not in tensors:
            raise UserError(f"{folder}/model.safetensors: tensor {name} is {'missing' if name in own else 'unknown'}")
        if own[name].shape != tensors[name].shape:
            raise UserError(f"{folder}/model.safetensors: tensor {name} is {list(tensors[name].shape)}, the config says "
                            f"{list(own[name].shape)}")  # fmt: skip
        if not bool(tensors[name].isfinite().all()):
            raise UserError(f"{folder}/model.safetensors: tensor {name} holds NaN or infinity: a broken training, or file")
    ids, size = tensors["target_ids"], head.config.vocab_size
    if not bool(((ids >= 0) & (ids < size)).all()):
        raise UserError(f"{folder}/model.safetensors: target_ids are from {int(ids.min())} to {int(ids.max())}, of a "
                        f"vocabulary of {size}")  # fmt: skip
    head.load_state_dict(tensors)
    return head.eval()
