"""Files to raw rows, one at a time, so that memory stays flat however long the file is.

A reader yields `(number, row)`. The number is the line in the file (JSON lines, CSV, text) or the row counted from 1
(JSON arrays, Parquet). A line that cannot be read is yielded as a `BadRow`, so the caller decides whether it stops the
run. Lines end at "\\n" and nowhere else: U+2028, U+2029 and U+0085 are text, although `str.splitlines` disagrees.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from ..errors import UserError, first_line
from .skips import BadRow

Rows = Iterator[tuple[int, Any]]
_CHUNK = 1 << 16  # characters read at a time from a JSON array
_SPACE = re.compile(r"[ \t\r\n]*")


def check_path(path: Path) -> None:
    """Raise UserError unless `path` is a file in a format that can be read."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name the chat files inside it")
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if path.suffix.lower() not in _READERS:
        raise UserError(f"{path}: unknown kind of file; known are {', '.join(_READERS)}")


def read_rows(path: Path) -> Rows:
    """Yield the raw rows of a file that passed `check_path`. Raises UserError if the file as a whole is unreadable."""
    try:
        yield from _READERS[path.suffix.lower()](path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def _lines(path: Path) -> Iterator[tuple[int, str | BadRow]]:
    with path.open("rb") as file:  # a binary file breaks lines at b"\n" only
        for number, raw in enumerate(file, start=1):
            try:
                # Files glued together carry a byte order mark in the middle.
                yield number, raw.decode("utf-8").removeprefix("\ufeff")
            except UnicodeDecodeError as error:
                yield (
                    number,
                    BadRow("bytes that are not UTF-8", f"byte {error.start + 1} of the line is 0x{raw[error.start]:02x}"),
                )


def _text(path: Path) -> Rows:
    for number, line in _lines(path):
        if isinstance(line, BadRow):
            yield number, line
        elif prompt := line.strip(" \t\r\n"):
            yield number, prompt


def _json_lines(path: Path) -> Rows:
    for number, line in _lines(path):
        if isinstance(line, BadRow):
            yield number, line
        elif line.strip():
            yield number, _parse(line.rstrip("\r\n"))


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return BadRow("broken JSON", f"{error.msg.removesuffix(' at')} at column {error.colno}")
    except RecursionError:
        return BadRow("broken JSON", "nested too deeply")
    except ValueError:
        return BadRow("broken JSON", "a number of more digits than can be read")


def _json(path: Path) -> Rows:
    """A `.json` file holds one array, or JSON lines under the wrong name."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            if not (opening := _opening(file)).startswith("["):
                yield from _json_lines(path)
                return
            yield from _ArrayStream(path, file, opening).rows()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason}") from None


def _opening(file: TextIO) -> str:
    """The beginning of the file without leading white space."""
    text = file.read(_CHUNK)
    while text and not text.strip():
        text = file.read(_CHUNK)
    return text.lstrip(" \t\r\n")


class _ArrayStream:
    """A JSON array read element by element; `json.load` would hold all of it in memory at once."""

    def __init__(self, path: Path, file: TextIO, text: str) -> None:
        self.path, self.file, self.text, self.at = path, file, text, 1
        self.decoder = json.JSONDecoder()

    def rows(self) -> Rows:
        number, mark = 0, ","
        if self._peek() == "]":
            mark, self.at = "]", self.at + 1
        while mark == ",":
            number += 1
            yield number, self._element(number)
            mark, self.at = self._peek(), self.at + 1
        if mark != "]" or self._peek():
            self._fail(number, "expecting ',' or the end of the array after it")

    def _element(self, number: int) -> Any:
        self._peek()
        while True:
            try:
                value, self.at = self.decoder.raw_decode(self.text, self.at)
                return value
            except json.JSONDecodeError as error:
                # The element may only be cut by the end of the buffer: read as much again, so the work stays linear.
                if not self._fill():
                    self._fail(number, error.msg)
            except RecursionError:
                self._fail(number, "nested too deeply")
            except ValueError:
                self._fail(number, "a number of more digits than can be read")

    def _peek(self) -> str:
        """Move to the next character that is not white space and return it; "" at the end of the file."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # matches the empty string
            if self.at < len(self.text) or not self._fill():
                return self.text[self.at : self.at + 1]

    def _fill(self) -> bool:
        more = self.file.read(max(_CHUNK, len(self.text) - self.at))
        self.text, self.at = self.text[self.at :] + more, 0
        return bool(more)

    def _fail(self, number: int, reason: str) -> None:
        # No way to know where the next element begins, so this ends the file even when bad rows are skipped.
        raise UserError(f"{self.path}:{number}: broken JSON: row {number} of the array: {reason}")


def _csv(path: Path) -> Rows:
    csv.field_size_limit(sys.maxsize)  # the default refuses an answer of more than 128 KiB
    lines = _csv_lines(path)
    first = next(lines, "")
    # Spreadsheets write semicolons where the comma is the decimal point. Column names hold none of the three.
    table = csv.reader(chain([first], lines), delimiter=max(",;\t", key=first.count))
    header, number = _cells(table), table.line_num + 1
    while (cells := _cells(table)) is not None:
        yield number, cells if isinstance(cells, BadRow) else _named(header, cells)
        number = table.line_num + 1


def _cells(table: Any) -> list[str] | BadRow | None:
    """The next row that is not blank, or None at the end."""
    try:
        return next(filter(None, table), None)
    except csv.Error as error:
        return BadRow("broken CSV", str(error))


def _named(header: Any, cells: list[str]) -> Any:
    if isinstance(header, BadRow):
        return header
    if len(cells) > len(header):
        return BadRow("broken CSV", f"{len(cells)} cells under a header of {len(header)} columns")
    return {key: cell for key, cell in zip(header, cells, strict=False) if cell}  # an empty cell is an absent key


def _csv_lines(path: Path) -> Iterator[str]:
    for number, line in _lines(path):
        if isinstance(line, BadRow):  # it may lie inside a quoted cell, so the row it belongs to is unknown
            raise UserError(f"{path}:{number}: {line}")
        yield line


def _parquet(path: Path) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs the package pyarrow: pip install 'headstart[data]'") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            rows = (row for batch in table.iter_batches(batch_size=256) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield number, {key: without_nulls(value) for key, value in row.items()}
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a readable Parquet file: {first_line(error)}") from None


def without_nulls(value: Any) -> Any:
    """Columns of structs give every row the keys of all rows, filled with nulls that nobody wrote.

    A null `content` stays: every chat message has that key, and without text it is told from a message of another shape.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None or key == "content"}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".txt": _text,
}
