"""A folder of hidden states: safetensors shards, each a group of samples, and a manifest of everything they depend on.

A shard appears under its name only when it is whole, so a killed writer leaves nothing to clean up and several processes may
write at once; one sample in two shards is only wasted work. Each sample has a checksum over its states, its ids and its mask.
Shards hold: samples [n], checksums [n]; layers [T, L, d] and choice [T] of all their tokens one after the other; last [A, d],
of every token or only of those before a supervised one; layers_scale [T, L] and last_scale [A] where a value is one byte.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from ..errors import UserError
from ..progress import say
from .shards import Shard, TornError, raw, write_shard
from .survey import Survey

READERS = 4  # threads
PARTS = ("layers", "layers_scale", "last", "last_scale", "choice")  # of a sample, in the order of its checksum

Rows = dict[str, Tensor]  # one sample's tensors, by the names in PARTS


@dataclass(frozen=True)
class Known:
    """A shard, its checksums, and the boundaries of its samples in tokens and in rows of `last`: [n + 1]."""

    shard: Shard
    checksums: list[int]
    tokens: np.ndarray
    last: np.ndarray


class FeatureStore:
    """The shards of one folder, for the samples that `survey` counted. keep: bytes of shards, None is all of them."""

    def __init__(self, folder: Path, survey: Survey, keep: int | None = None) -> None:
        self.folder, self.survey, self.keep = folder, survey, keep
        self.shard_of = np.full(len(survey.tokens), -1, np.int32)  # a key of `shards`, -1 where missing
        self.number = np.zeros(len(survey.tokens), np.int32)  # a sample's place in its shard
        self.shards: dict[int, Known] = {}  # those that are there, as far as this process knows
        self.keys: dict[Path, int] = {}
        self.next_key = 0
        sweep(folder)
        self.scan()

    def missing(self, samples: Sequence[int]) -> list[int]:
        return [i for i in samples if self.shard_of[i] < 0]

    def scan(self) -> None:
        """Take in shards that appeared since; a torn one is deleted, and its samples are missing again."""
        for path in sorted(self.folder.glob("*.safetensors")):
            if path not in self.keys:
                self._know(path)

    def _know(self, path: Path) -> None:
        try:
            shard = Shard(path)
            numbers, checksums = shard.column("samples").tolist(), shard.column("checksums").tolist()
        except FileNotFoundError:  # evicted by another process
            return
        except TornError as error:
            self._discard(path, f"torn ({error})")
            return
        tokens, last = (np.cumsum([0, *counts[numbers]]) for counts in (self.survey.tokens, self.survey.last_rows))
        self.shard_of[numbers] = self.next_key
        self.number[numbers] = range(len(numbers))
        self.shards[self.next_key] = Known(shard, checksums, tokens, last)
        self.keys[path] = self.next_key
        self.next_key += 1

    def read_all(self, samples: Sequence[int]) -> dict[int, Rows | None]:
        """Several samples at a time: disk and checksums keep both a core and the bus busy."""
        with ThreadPoolExecutor(READERS) as readers:
            return dict(zip(samples, readers.map(self.read, samples), strict=True))

    def read(self, i: int) -> Rows | None:
        """One sample; None where it is missing or does not match its checksum."""
        known, number = self.shards.get(int(self.shard_of[i])), int(self.number[i])
        if known is None:
            return None
        tokens, last = ((int(edges[number]), int(edges[number + 1])) for edges in (known.tokens, known.last))
        ranges = {name: last if name.startswith("last") else tokens for name in PARTS if name in known.shard.parts}
        path = known.shard.path
        try:
            rows = known.shard.read(ranges)
        except FileNotFoundError:  # evicted by another process
            self.forget(path)
            return None
        except TornError as error:
            self._discard(path, f"torn ({error})")
            return None
        if self.checksum(i, rows) != known.checksums[number]:
            self._discard(path, f"sample {i} does not match its checksum")
            return None
        return rows

    def _discard(self, path: Path, reason: str) -> None:
        say(f"{path}: {reason}; the shard will be written again")
        path.unlink(missing_ok=True)
        self.forget(path)

    def checksum(self, i: int, rows: Rows) -> int:
        value = int(self.survey.checksums[i])
        for name in PARTS:
            if name in rows:
                value = zlib.crc32(raw(rows[name].contiguous()), value)
        return value

    def write(self, samples: dict[int, Rows]) -> None:
        """Add a shard of these samples, then evict the oldest ones beyond `keep`."""
        numbers = list(samples)
        first = samples[numbers[0]]
        pieces = {name: [rows[name] for rows in samples.values()] for name in PARTS if name in first}
        digest = hashlib.blake2b(str(numbers).encode(), digest_size=4).hexdigest()
        path = self.folder / f"{numbers[0]:08d}-{digest}.safetensors"
        try:
            with own_folder(self.folder) as own, ThreadPoolExecutor(1) as beside:  # the checksums take half the time of a write
                checksums = beside.submit(lambda: [self.checksum(i, rows) for i, rows in samples.items()])
                write_shard(own / path.name, numbers, pieces, checksums.result)
                (own / path.name).replace(path)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written: {error.strerror}; what is complete stays, so make room and run again"
            ) from None
        self.forget(path)
        self._know(path)
        self._evict(path)

    def _evict(self, newest: Path) -> None:
        if self.keep is None:
            return
        files = [(stat.st_mtime_ns, path, stat.st_size) for path, stat in shard_files(self.folder)]
        total = sum(size for _, _, size in files)
        for _, path, size in sorted(files):
            if total <= self.keep:
                break
            if path != newest:
                path.unlink(missing_ok=True)
                self.forget(path)
                total -= size

    def forget(self, path: Path) -> None:
        if (key := self.keys.pop(path, None)) is not None:
            self.shards.pop(key)
            self.shard_of[self.shard_of == key] = -1

    @contextmanager
    def claim(self, chunk: int, wait: bool) -> Iterator[bool]:
        """Whether this process is the one to write a chunk now. The claim ends with the process, however that ends."""
        path = self.folder / f".{chunk}.claim"
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True
            path.unlink(missing_ok=True)


def check_room(folder: Path, needed: int, keep: int | None = None) -> None:
    """Refuse shards of `needed` bytes (or `keep`, if that is less) that the disk has no room for beside those there are."""
    needed = needed if keep is None else min(needed, keep)
    more, free = needed - sum(stat.st_size for _, stat in shard_files(folder)), free_bytes(folder)
    if more > free:
        raise UserError(f"data.features.stored: {folder} needs {more / 1e9:.2f} GB more and the disk has {free / 1e9:.2f} GB "
                        "free; set keep, a smaller dtype or fewer data.rows")  # fmt: skip


def free_bytes(folder: Path) -> int:
    """Free on the disk that holds the folder, or will."""
    return shutil.disk_usage(next(there for there in (folder, *folder.absolute().parents) if there.is_dir())).free


def shard_files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The shards there are; one that another process evicts meanwhile is none."""
    found = []
    for path in folder.glob("*.safetensors"):
        try:
            found.append((path, path.stat()))
        except FileNotFoundError:
            continue
    return found


@contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """A folder to write in that `sweep` leaves alone while this process lives."""
    own = Path(tempfile.mkdtemp(prefix=".writing-", dir=parent))
    handle = os.open(own, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield own
    finally:
        os.close(handle)
        shutil.rmtree(own, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what killed writers left."""
    for left in folder.glob(".writing-*"):
        try:
            handle = os.open(left, os.O_RDONLY)
        except FileNotFoundError:  # its writer has just finished
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(handle)
