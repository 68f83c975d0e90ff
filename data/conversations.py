"""Chat files of any common format to one stream of conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError
from .normalise import parse_row
from .readers import check_path, read_rows
from .skips import BadRow, OnBad, Skips
from .spool import Chosen

T = TypeVar("T")


@dataclass(frozen=True)
class Conversation:
    """messages: dicts with `role` (system, user, assistant or tool), `content` (text) and whatever else a turn needs.
    source: "file:line", for JSON arrays and Parquet "file:row". id: the row's own, else "<stem>-<line>"."""

    id: str
    messages: tuple[dict[str, Any], ...]
    category: str | None
    split: str | None
    source: str
    tools: list[dict[str, Any]] | None = None


def read_conversations(paths: Sequence[Path], skips: Skips, on_bad: OnBad = "error") -> Iterator[Conversation]:
    """Read JSON lines, JSON arrays, Parquet, CSV or text (one prompt a line), row by row, in the order given.

    Rows may be ShareGPT (`conversations`), OpenAI `messages`, Alpaca, prompt and response, a bare prompt, a benchmark
    question with `turns`, or a tree of replies. A row gives one conversation: of several unanswered turns only the
    first is kept, of a tree the best reply at each level, and `skips` notes it. Empty rows are counted in `skips`.
    Raises UserError at once when a path cannot be read, and while reading for a broken row (unless `on_bad` is
    "skip") and for a file that gives no conversation at all.
    """
    paths = [Path(path) for path in paths]
    if not paths:
        raise UserError("no chat files are given")
    for path in paths:  # before an hour of work on the first file, not after it
        check_path(path)
    return (conversation for path in paths for conversation in _read_file(path, skips, on_bad))


def _read_file(path: Path, skips: Skips, on_bad: OnBad) -> Iterator[Conversation]:
    found, read_before = 0, skips.read
    for number, row in read_rows(path):
        skips.read += 1
        source = f"{path}:{number}"
        try:
            conversation, left_out = _conversation(path, number, row)
        except BadRow as bad:
            skips.refuse(bad, source, on_bad)
            continue
        if left_out:
            skips.note(left_out, source)
        found += 1
        yield conversation
    if not found:
        rows = skips.read - read_before
        raise UserError(f"{path}: 0 conversations" + (f" in {rows} rows, none of them usable" if rows else ""))


def _conversation(path: Path, number: int, row: Any) -> tuple[Conversation, str]:
    if isinstance(row, BadRow):
        raise row
    parsed = parse_row(row)
    keys = row if isinstance(row, dict) else {}
    return (
        Conversation(
            id=_label(keys, "id", "question_id") or f"{path.stem}-{number}",
            messages=tuple(parsed.messages),
            category=_label(keys, "category"),
            split=_label(keys, "split"),
            source=f"{path}:{number}",
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
