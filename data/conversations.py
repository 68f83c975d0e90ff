"""Chat files of any common format to one stream of conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError
from .normalise import parse_row
from .skips import BadRow, OnBad, Skips
from .sources import Source, file_source
from .spool import Chosen

T = TypeVar("T")


@dataclass(frozen=True)
class Conversation:
    """messages: dicts with `role` (system, user, assistant or tool), `content` (text) and whatever else a turn needs.
    source: "file:line", for JSON arrays, Parquet and datasets "name:row". id: the row's own, else "<stem>-<line>"."""

    id: str
    messages: tuple[dict[str, Any], ...]
    category: str | None
    split: str | None
    source: str
    tools: list[dict[str, Any]] | None = None
    cut_short: bool = False  # the last answer was stopped by a limit: what ends its turn is not the verifier's

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The messages up to the last question."""
        messages = list(self.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        return messages


def read_conversations(sources: Sequence[Path | str | Source], skips: Skips, on_bad: OnBad = "error") -> Iterator[Conversation]:
    """Read JSON lines, JSON arrays, Parquet, CSV, text (one prompt a line) or datasets, row by row, in the order given.

    Rows may be ShareGPT (`conversations`), OpenAI `messages`, Alpaca, prompt and response, a bare prompt, a benchmark
    question with `turns`, or a tree of replies. A row gives one conversation: of several unanswered turns only the
    first is kept, of a tree the best reply at each level, and `skips` notes it. Empty rows are counted in `skips`.
    Raises UserError at once when a path cannot be read, and while reading for a broken row (unless `on_bad` is
    "skip") and for a file that gives no conversation at all.
    """
    if not sources:
        raise UserError("no chat files are given")
    # Every file is looked for before an hour of work on the first one, not after it.
    opened = [source if isinstance(source, Source) else file_source(source) for source in sources]
    return (conversation for source in opened for conversation in _read_source(source, skips, on_bad))


def _read_source(source: Source, skips: Skips, on_bad: OnBad) -> Iterator[Conversation]:
    found, before = 0, skips.read
    counted = Counter(skips.counts)
    for number, row in source.rows():
        skips.read += 1
        place = f"{source.name}:{number}"
        try:
            conversation, left_out = _conversation(place, f"{source.stem}-{number}", row)
        except BadRow as bad:
            skips.refuse(bad, place, on_bad)
            continue
        if left_out:
            skips.note(left_out, place)
        found += 1
        yield conversation
    if not found:
        rows, reasons = skips.read - before, skips.counts - counted
        told = "".join(f"; {number} have {reason}" for reason, number in reasons.most_common())
        raise UserError(f"{source.name}: 0 conversations" + (f" in {rows} rows{told}" if rows else ""))


def _conversation(place: str, id: str, row: Any) -> tuple[Conversation, str]:
    if isinstance(row, BadRow):
        raise row
    parsed = parse_row(row)
    keys = row if isinstance(row, dict) else {}
    return (
        Conversation(
            id=_label(keys, "id", "question_id") or id,
            messages=tuple(parsed.messages),
            category=_label(keys, "category"),
            split=_label(keys, "split"),
            source=place,
            tools=parsed.tools,
        ),
        parsed.left_out,
    )


def _label(row: dict[str, Any], *names: str) -> str | None:
    return next((str(row[name]) for name in names if isinstance(row.get(name), str | int) and row[name] != ""), None)


def spread(rows: Sequence[T], limit: int | None) -> Sequence[T]:
    """At most `limit` of the rows, evenly spaced, so that every file and category keeps its share."""
    count = len(rows) if limit is None else min(limit, len(rows))
    return Chosen(rows, (i * len(rows) // count for i in range(count)))
