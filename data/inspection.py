"""What a chat file gives once rendered: coverage statistics, and samples with the supervised tokens in colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .chat import Sample, samples
from .conversations import read_conversations
from .skips import OnBad, Skips


@dataclass
class Coverage:
    """Counts over all samples of a file. tokens and supervised are counted after truncation, longest before it."""

    tokens: int = 0
    supervised: int = 0
    truncated: int = 0  # samples
    duplicates: int = 0  # samples whose tokens came before
    longest: int = 0  # tokens
    seen: set[int] = field(default_factory=set, repr=False)

    def add(self, sample: Sample) -> None:
        self.tokens += len(sample.ids)
        self.supervised += sum(sample.mask)
        self.truncated += sample.cut > 0
        self.longest = max(self.longest, len(sample.ids) + sample.cut)
        key = hash(tuple(sample.ids))  # 8 bytes a sample; the samples themselves would not fit in memory
        self.duplicates += key in self.seen
        self.seen.add(key)


@dataclass(frozen=True)
class Example:
    """One sample, and its text as runs of equal mask: (text, supervised)."""

    sample: Sample
    runs: list[tuple[str, bool]]


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect_file`; a rich console prints it, `to_json` serves machines."""

    rows: int
    samples: int
    dropped: int
    skipped: dict[str, int]
    coverage: Coverage
    examples: list[Example]

    def to_json(self) -> dict[str, Any]:
        """Plain data: counts, reasons, and for each example its ids, its mask and the text of each supervised run."""
        counts = {key: value for key, value in asdict(self.coverage).items() if key != "seen"}
        examples = [
            {"ids": one.sample.ids, "mask": one.sample.mask, "supervised": [text for text, on in one.runs if on]}
            for one in self.examples
        ]
        return {
            "rows": self.rows,
            "samples": self.samples,
            "dropped": self.dropped,
            "skipped": self.skipped,
            **counts,
            "examples": examples,
        }

    def __rich__(self) -> Group:
        return Group(*(part for one in self.examples for part in _shown(one)), self._table())

    def _table(self) -> Table:
        table = Table("", "", show_header=False, title="coverage")
        for name, value in self._lines():
            table.add_row(name, value)
        return table

    def _lines(self) -> Iterator[tuple[str, str]]:
        counts = self.coverage
        yield "rows", f"{self.rows:,}"
        yield "samples", f"{self.samples:,}"
        yield "dropped rows", f"{self.dropped:,}"
        yield from ((f"left out: {reason}", f"{number:,}") for reason, number in self.skipped.items())
        yield "tokens", f"{counts.tokens:,}"
        yield "supervised tokens", f"{counts.supervised:,} ({counts.supervised / counts.tokens:.1%})"
        yield "duplicate samples", f"{counts.duplicates:,}"
        yield "truncated samples", f"{counts.truncated:,}"
        yield "longest sample", f"{counts.longest:,} tokens"


def inspect_file(paths: Sequence[Path], tokenizer: Any, max_length: int, limit: int, on_bad: OnBad = "error") -> Inspection:
    """Render every row of the files and keep the first `limit` samples to show.

    Raises UserError as `read_conversations` and `samples` do, so also when no row gives a sample.
    """
    skips, coverage, examples, number = Skips(), Coverage(), list[Example](), 0
    for sample in samples(tokenizer, read_conversations(paths, skips, on_bad), max_length, skips, on_bad):
        number += 1
        coverage.add(sample)
        if len(examples) < limit:
            examples.append(Example(sample, _runs(tokenizer, sample)))
    return Inspection(skips.read, number, skips.dropped, dict(skips.counts.most_common()), coverage, examples)


def _runs(tokenizer: Any, sample: Sample) -> list[tuple[str, bool]]:
    """Decode run by run: single tokens may hold half a character."""
    groups = groupby(zip(sample.ids, sample.mask, strict=True), key=lambda pair: pair[1])
    return [
        (tokenizer.decode([id for id, _ in group], clean_up_tokenization_spaces=False), supervised)
        for supervised, group in groups
    ]


def _shown(example: Example) -> Iterator[Text]:
    shown = Text()
    for text, supervised in example.runs:
        # Escape sequences in the data would take over the terminal.
        shown.append(text.replace("\x1b", "\u241b"), style="bold green" if supervised else "dim")
    yield Text(f"{example.sample.source}  {sum(example.sample.mask)} of {len(example.sample.ids)} tokens supervised")
    yield shown
    yield Text()
