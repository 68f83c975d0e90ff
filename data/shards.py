"""One shard: a safetensors file, written and read piece by piece.

The library's own functions want whole tensors, joined before and mapped after; with pieces a shard is written and a sample is
read at the speed of the disk, and a file that is too short is told, not a fault of the memory.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CODES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.int32: "I32",
         torch.int64: "I64"}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}


class TornError(Exception):
    """A file that is not all there."""


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in main memory."""
    return tensor.view(torch.uint8).numpy().data


def write_shard(
    path: Path, samples: list[int], parts: Mapping[str, Sequence[Tensor]], checksums: Callable[[], list[int]]
) -> None:
    """Each part as its pieces [n_i, ...], one after the other, and on the disk before this returns. The checksums are asked for
    last: they may be computed meanwhile."""
    numbers = torch.tensor(samples)
    header: dict[str, Any] = {}
    end = 0
    for name, pieces in {**parts, "samples": [numbers], "checksums": [numbers]}.items():
        start, end = end, end + sum(piece.nbytes for piece in pieces)
        shape = [sum(len(piece) for piece in pieces), *pieces[0].shape[1:]]
        header[name] = {"dtype": CODES[pieces[0].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for pieces in parts.values():
            for piece in pieces:
                file.write(raw(piece.contiguous()))
        file.write(raw(numbers))
        file.write(raw(torch.tensor(checksums())))
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Part:
    """Where a tensor lies in a shard, and what its rows are."""

    start: int
    rows: int
    dtype: torch.dtype
    shape: tuple[int, ...]  # of a row

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Shard:
    """A shard's header. Raises TornError when the file is shorter or longer than it says, OSError when there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = 8 + int.from_bytes(file.read(8), "little")
            if data > size:
                raise TornError(f"{size} bytes, the header alone takes {data}")
            try:
                header = json.loads(file.read(data - 8))
            except ValueError:
                raise TornError("its header is not readable") from None
        self.parts = {
            name: Part(data + its["data_offsets"][0], its["shape"][0], DTYPES[its["dtype"]], tuple(its["shape"][1:]))
            for name, its in header.items()
        }
        whole = data + max(its["data_offsets"][1] for its in header.values())
        if size != whole:
            raise TornError(f"{size} bytes of {whole}")

    def read(self, ranges: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
        """Rows [start, end) of some tensors."""
        found = {}
        with self.path.open("rb", buffering=0) as file:
            for name, (start, end) in ranges.items():
                part = self.parts[name]
                rows = torch.empty(end - start, *part.shape, dtype=part.dtype)
                buffer = raw(rows)
                if os.preadv(file.fileno(), [buffer], part.start + start * part.row_bytes) != buffer.nbytes:
                    raise TornError(f"{self.path} ends early")
                found[name] = rows
        return found

    def column(self, name: str) -> Tensor:
        """All of a tensor."""
        return self.read({name: (0, self.parts[name].rows)})[name]
