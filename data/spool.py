"""A sequence that lies on disk: memory stays flat however many rows there are."""

import os
import pickle
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeVar, overload

from ..heads.files import writing

T = TypeVar("T")


class Spool(Sequence[T], Generic[T]):
    """The items of an iterable, in a nameless temporary file in `folder`; eight bytes each in memory."""

    def __init__(self, items: Iterable[T], folder: Path) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (as long as the spool lives)
        weakref.finalize(self, self.file.close)
        self.edges = array("q", [0])
        for item in items:
            with writing(folder):
                self.edges.append(self.edges[-1] + self.file.write(pickle.dumps(item, pickle.HIGHEST_PROTOCOL)))
        with writing(folder):
            self.file.flush()

    def __len__(self) -> int:
        return len(self.edges) - 1

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        start, end = (self.edges[i] for i in (range(len(self))[index], range(len(self))[index] + 1))
        return pickle.loads(os.pread(self.file.fileno(), end - start, start))


class Chosen(Sequence[T], Generic[T]):
    """Some items of another sequence, by index."""

    def __init__(self, items: Sequence[T], indices: Iterable[int]) -> None:
        self.items, self.indices = items, array("q", indices)

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return [self.items[i] for i in self.indices[index]] if isinstance(index, slice) else self.items[self.indices[index]]
