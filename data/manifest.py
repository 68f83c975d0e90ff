"""What stored features depend on, written beside them: a folder made for anything else is refused, and told why."""

import json
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..heads.files import write_text

NAME = "manifest.json"
MASK_RULE = "assistant turns with their end of turn"


def claim_folder(folder: Path, key: dict[str, Any], about: dict[str, Any]) -> None:
    """Write the manifest of a new folder, or refuse one whose key differs. about: more for people, compared with nothing."""
    check_folder(folder, key)
    if not (folder / NAME).exists():
        write_text(folder / NAME, json.dumps({"key": key, "about": about}, indent=1) + "\n")


def check_folder(folder: Path, key: dict[str, Any]) -> None:
    path = folder / NAME
    if not path.exists():
        if folder.is_dir() and any(not there.name.startswith(".") for there in folder.iterdir()):
            raise UserError(f"data.features.stored: {folder} is not empty and has no {NAME}; name another folder")
        return
    try:
        there = dict(json.loads(path.read_text(encoding="utf-8"))["key"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: is no manifest of stored features; name another folder") from None
    names = [*key, *(name for name in there if name not in key)]
    changed = [f"{name}: {there.get(name)} there, {key.get(name)} here" for name in names if there.get(name) != key.get(name)]
    if changed:
        raise UserError(f"{folder} holds features of something else ({'; '.join(changed)}); name another folder or delete it")
