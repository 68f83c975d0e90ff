"""What is left out of a run and why: each dropped row is counted under a reason, and skipped.jsonl can list them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import UserError
from ..heads.files import write_text

OnBad = Literal["error", "skip"]


class BadRow(Exception):
    """A row that cannot be used. `reason` is a noun shared by many ("broken JSON"), `detail` speaks of this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class EmptyRow(BadRow):
    """A row that holds nothing: counted as skipped, never an error, because public chat files are full of them."""


@dataclass
class Skips:
    """The account of one pass over the data.

    read: rows met in the files. dropped: rows that gave no sample. counts: reason -> rows, including rows that were
    kept in part (`note`). rows: one record a drop or note, in the order met.
    """

    read: int = 0
    dropped: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    rows: list[dict[str, str]] = field(default_factory=list)

    def drop(self, reason: str, source: str, detail: str = "") -> None:
        """Record a row that is left out altogether."""
        self.dropped += 1
        self.note(reason, source, detail)

    def note(self, reason: str, source: str, detail: str = "") -> None:
        """Record something left out of a row that is kept."""
        self.counts[reason] += 1
        self.rows.append({"source": source, "reason": reason} | ({"detail": detail} if detail else {}))

    def refuse(self, bad: BadRow, source: str, on_bad: OnBad) -> None:
        """Raise UserError("file:line: reason: detail"), or count the row when the user asked to skip bad rows."""
        if on_bad == "error" and not isinstance(bad, EmptyRow):
            raise UserError(f"{source}: {bad}") from None
        self.drop(bad.reason, source, bad.detail)

    def summary(self, total: int) -> list[str]:
        """Lines for people, the commonest reason first: "1 of 2 rows have no supervised token after max_length=64"."""
        return [f"{number} of {total} rows have {reason}" for reason, number in self.counts.most_common()]

    def write(self, path: Path) -> None:
        """Write the records as JSON lines."""
        write_text(path, "".join(json.dumps(row) + "\n" for row in self.rows))
