"""How much of each source goes into the mixture."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from ..errors import UserError

Row = TypeVar("Row")


def mix(
    sources: Sequence[Iterator[Row]], weights: Sequence[float], limit: int | None, endless: Sequence[bool], seed: int
) -> list[Row]:
    """Rows of all sources in the proportion of the weights, none of them twice: as many as the scarcest source allows.

    limit: most rows of the mixture. Of a source that is read to its end the seed chooses which rows; an endless one
    (a stream) gives its first rows, and then `limit` must be given. The order is that of the sources.
    """
    known = [None if stream else list(rows) for rows, stream in zip(sources, endless, strict=True)]
    counts = shares([None if rows is None else len(rows) for rows in known], weights, limit)
    mixture: list[Row] = []
    for i, (rows, count) in enumerate(zip(known, counts, strict=True)):
        if rows is not None:
            chosen = sorted(random.Random(f"{seed}-{i}").sample(range(len(rows)), count))
            mixture += [rows[row] for row in chosen]
            continue
        first = list(islice(sources[i], count))
        if len(first) < count:
            raise UserError(f"data.train.{i}: {len(first)} rows, its weight asks for {count}; lower data.rows or the weight")
        mixture += first
    return mixture


def shares(available: Sequence[int | None], weights: Sequence[float], limit: int | None) -> list[int]:
    """The number of rows of each source (available None: without end), by largest remainders, so that the sum is exact."""
    parts = [weight / sum(weights) for weight in weights]
    most = [math.inf if limit is None else limit]
    most += [count / part for count, part in zip(available, parts, strict=True) if count is not None]
    total = math.floor(min(most) + 1e-9)
    exact = [total * part for part in parts]
    counts = [math.floor(share + 1e-9) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
