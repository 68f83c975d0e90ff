"""What a pass over the samples finds out that their stored features depend on, in a few bytes a sample."""

import hashlib
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .chat import Sample
from .encoding import row_bytes

HEADER = 700  # bytes of a shard beside its tensors: names, shapes and offsets
SHARD = 128 << 20  # bytes of a shard, about


@dataclass(frozen=True)
class Layout:
    """What of the verifier's states is stored. everywhere: the last state of every token, else only before supervised ones."""

    layers: tuple[int, ...]
    width: int  # the verifier's hidden size
    dtype: str
    everywhere: bool


@dataclass(frozen=True)
class Survey:
    """An entry a sample. tokens; last_rows: rows of the last state; checksums of ids and mask. digest: of all samples."""

    layout: Layout
    tokens: np.ndarray
    last_rows: np.ndarray
    checksums: np.ndarray
    digest: str

    def sample_bytes(self) -> np.ndarray:
        """[samples]: bytes of each sample's tensors in a shard."""
        row = row_bytes(self.layout.width, self.layout.dtype)
        each_token = len(self.layout.layers) * row + 4  # the verifier's choice
        return self.tokens * each_token + self.last_rows * row + 16  # its number and its checksum

    def chunks(self) -> list[range]:
        """Consecutive samples that make a shard, all of them in order."""
        edges, held = [0], 0
        for i, size in enumerate(self.sample_bytes().tolist()):
            if held and held + size > SHARD:
                edges.append(i)
                held = 0
            held += size
        edges.append(len(self.tokens))
        return [range(start, end) for start, end in pairwise(edges)]

    def total_bytes(self) -> int:
        """Bytes of all shards."""
        return int(self.sample_bytes().sum()) + HEADER * len(self.chunks())


def survey(samples: Iterable[Sample], layout: Layout) -> Survey:
    tokens, last_rows, checksums = array("q"), array("q"), array("q")
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        ids, mask = np.asarray(sample.ids, np.int32).tobytes(), bytes(sample.mask)
        digest.update(len(mask).to_bytes(8, "little") + ids + mask)
        tokens.append(len(mask))
        last_rows.append(len(mask) if layout.everywhere else sum(sample.mask[1:]))
        checksums.append(zlib.crc32(mask, zlib.crc32(ids)))
    return Survey(layout, np.array(tokens), np.array(last_rows), np.array(checksums), digest.hexdigest())
