"""Writing files and folders so that a kill at any moment leaves either the old state or the new one."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary sibling, then put it in the folder's place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        temporary.chmod(0o755)  # mkdtemp makes it private
        write(temporary)
        old = temporary.with_name(temporary.name + "-old")
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
