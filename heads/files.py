"""Writing files and folders so that a kill at any moment leaves either the old state or the new one."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A place that cannot be written, or a full disk, is told in a line: UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def check_writable(folder: Path) -> None:
    """Raises UserError where the folder cannot be made, or nothing in it. Leaves nothing behind."""
    with writing(folder):
        there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        Path(tempfile.mkdtemp(prefix=".headstart-", dir=there)).rmdir()


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step. Raises UserError."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file in one step. Raises UserError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary sibling, then put it in the folder's place. Raises UserError."""
    with writing(folder):
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
