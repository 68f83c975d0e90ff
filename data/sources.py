"""Where rows come from: a file, or a dataset of the hub or a folder, read by the library `datasets`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line
from .readers import Rows, check_path, read_rows, without_nulls
from .skips import BadRow


@dataclass(frozen=True)
class Source:
    """name: begins every row's `source` ("name:line"). stem: begins the ids of rows without one of their own.
    columns: our key -> the column that has it; only these are read, {} reads the row as it is."""

    name: str
    stem: str
    read: Callable[[], Rows] = field(repr=False)
    columns: Mapping[str, str]

    def rows(self) -> Rows:
        """Yield (number, row). Raises UserError when the source as a whole is unreadable."""
        for number, row in self.read():
            yield number, self._chosen(row) if self.columns else row

    def _chosen(self, row: Any) -> Any:
        if isinstance(row, BadRow):
            return row
        found = {key: row[column] for key, column in self.columns.items() if isinstance(row, dict) and column in row}
        return found or BadRow("none of the columns", f"{', '.join(self.columns.values())} are asked for")


def file_source(path: Path | str, columns: Mapping[str, str] | None = None) -> Source:
    """A chat file. Raises UserError unless it is there and of a known kind."""
    path = Path(path)
    check_path(path)
    return Source(str(path), path.stem, partial(read_rows, path), columns or {})


def dataset_source(
    name: str,
    subset: str | None = None,
    split: str = "train",
    revision: str | None = None,
    columns: Mapping[str, str] | None = None,
    streaming: bool = False,
) -> Source:
    """A split of a dataset: a hub id, a folder of data files, or a folder that `save_to_disk` wrote.

    Raises UserError when the library is not installed, there is no such dataset, or it lacks a column.
    """
    label = "/".join(part for part in (name, subset, split) if part)
    table = _load(label, name, subset, split, revision, streaming)
    known = table.column_names  # None: a stream tells only when it is read
    missing = [column for column in (columns or {}).values() if known is not None and column not in known]
    if missing:
        raise UserError(f"{label}: no column {missing[0]}; there are {', '.join(known)}")
    if columns and known is not None:
        table = table.select_columns(list(dict.fromkeys(columns.values())))  # pictures beside the text stay undecoded
    return Source(label, Path(name).name, partial(_rows, label, table), columns or {})


def _load(label: str, name: str, subset: str | None, split: str, revision: str | None, streaming: bool) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{label}: reading it needs the package datasets; install it with: pip install 'headstart[data]'"
        ) from None
    folder = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not folder.is_dir():
        raise UserError(f"{name}: no such folder")
    path = str(folder) if folder.is_dir() else name
    try:
        if any((folder / saved).is_file() for saved in ("state.json", "dataset_dict.json")):
            table = datasets.load_from_disk(path)
            return table[split] if isinstance(table, datasets.DatasetDict) else table
        return datasets.load_dataset(path, subset, split=split, revision=revision, streaming=streaming)
    except Exception as error:  # no hub, no such id, subset or split, files that do not go together: it has no class for all
        raise UserError(f"{label}: cannot be loaded: {_cause(error)}") from error


def _rows(label: str, table: Any) -> Iterator[tuple[int, Any]]:
    try:
        for number, row in enumerate(table, start=1):
            yield number, {key: without_nulls(value) for key, value in row.items()}
    except (OSError, ValueError, TypeError) as error:  # a stream may break, or hold files that do not go together
        raise UserError(f"{label}: cannot be read further: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """ "An error occurred while generating the dataset" alone helps nobody."""
    return first_line(error.__cause__ or error)
