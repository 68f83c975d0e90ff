"""What a chat file gives once rendered: coverage statistics, and samples as runs of supervised and other text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from ..heads.verifier import Verifier
from .agreement import Agreement, read_agreement
from .chat import Sample, samples
from .conversations import read_conversations
from .skips import OnBad, Skips
from .vocabulary import choose_by_count, template_tokens


@dataclass
class Coverage:
    """Counts over all samples of a file. tokens and supervised are counted after truncation, longest before it."""

    tokens: int = 0
    supervised: int = 0
    truncated: int = 0  # samples
    duplicates: int = 0  # samples whose tokens came before
    longest: int = 0  # tokens
    cut: int = 0  # tokens
    seen: set[int] = field(default_factory=set, repr=False)
    counts: Counter[int] = field(default_factory=Counter, repr=False)  # supervised token ids

    def add(self, sample: Sample) -> None:
        self.tokens += len(sample.ids)
        self.supervised += sum(sample.mask)
        self.truncated += sample.cut > 0
        self.cut += sample.cut
        self.longest = max(self.longest, len(sample.ids) + sample.cut)
        key = hash(tuple(sample.ids))  # 8 bytes a sample; the samples themselves would not fit in memory
        self.duplicates += key in self.seen
        self.seen.add(key)
        self.counts.update(id for id, learned in zip(sample.ids, sample.mask, strict=True) if learned)


@dataclass(frozen=True)
class Example:
    """One sample, and its text as runs of equal mask: (text, supervised)."""

    sample: Sample
    runs: list[tuple[str, bool]]


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect_file`. vocabulary: size -> share of the supervised tokens that a draft vocabulary of it covers."""

    rows: int
    samples: int
    skips: Skips
    coverage: Coverage
    vocabulary: dict[int, float]
    agreement: Agreement | None
    examples: list[Example]

    def to_json(self) -> dict[str, Any]:
        """Plain data: counts, reasons, and for each example its ids, its mask and the text of each supervised run."""
        counts = self.coverage
        agreement = self.agreement
        examples = [
            {"ids": one.sample.ids, "mask": one.sample.mask, "supervised": [text for text, on in one.runs if on]}
            for one in self.examples
        ]
        return {
            "rows": self.rows,
            "samples": self.samples,
            "dropped": self.skips.dropped,
            "skipped": dict(self.skips.counts.most_common()),
            "tokens": counts.tokens,
            "supervised": counts.supervised,
            "truncated": counts.truncated,
            "cut_tokens": counts.cut,
            "duplicates": counts.duplicates,
            "longest": counts.longest,
            "different": len(counts.counts),
            "draft_vocabulary": [{"size": size, "coverage": share} for size, share in self.vocabulary.items()],
            "agreement": agreement and {"tokens": agreement.tokens, "agreeing": agreement.agreeing, "share": agreement.share},
            "examples": examples,
        }


def inspect_file(
    paths: Sequence[Path],
    tokenizer: Any,
    max_length: int,
    limit: int,
    on_bad: OnBad = "error",
    sizes: Sequence[int] = (),
    verifier: Verifier | None = None,
    read: int = 0,
) -> Inspection:
    """Render every row of the files, keep the first `limit` samples to show, let `verifier` read the first `read`.

    sizes: of draft vocabularies, which keep the tokenizer's special tokens and those of its template.
    Raises UserError as `read_conversations` and `samples` do, so also when no row gives a sample.
    """
    skips, coverage, examples, number = Skips(), Coverage(), list[Example](), 0
    first: list[Sample] = []
    for sample in samples(tokenizer, read_conversations(paths, skips, on_bad), max_length, skips, on_bad):
        number += 1
        coverage.add(sample)
        if len(examples) < limit:
            examples.append(Example(sample, _runs(tokenizer, sample)))
        if verifier is not None and len(first) < read:
            first.append(sample)
    rows = len(tokenizer)  # of the verifier's lm_head at least, which may be padded
    vocabulary = {
        size: choose_by_count(coverage.counts, size, rows, template_tokens(tokenizer)).coverage for size in sorted(set(sizes))
    }
    agreement = read_agreement(verifier, first) if verifier is not None else None
    return Inspection(skips.read, number, skips, coverage, vocabulary, agreement, examples)


def _runs(tokenizer: Any, sample: Sample) -> list[tuple[str, bool]]:
    """Decode run by run: single tokens may hold half a character."""
    groups = groupby(zip(sample.ids, sample.mask, strict=True), key=lambda pair: pair[1])
    return [
        (tokenizer.decode([id for id, _ in group], clean_up_tokenization_spaces=False), supervised)
        for supervised, group in groups
    ]
