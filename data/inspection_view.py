"""An inspection for people: coloured text in the terminal, or a page complete in itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..heads.files import write_text
from ..templates import html_environment
from .inspection import Example, Inspection


def lines(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Name and value of every figure."""
    counts = inspection.coverage
    yield "rows", f"{inspection.rows:,}"
    yield "samples", f"{inspection.samples:,}"
    yield "dropped rows", f"{inspection.skips.dropped:,}"
    yield from ((f"left out: {reason}", f"{number:,}") for reason, number in inspection.skips.counts.most_common())
    yield "tokens", f"{counts.tokens:,}"
    yield "supervised tokens", f"{counts.supervised:,} ({counts.supervised / counts.tokens:.1%})"
    yield "different supervised tokens", f"{len(counts.counts):,}"
    yield "duplicate samples", f"{counts.duplicates:,}"
    yield "truncated samples", f"{counts.truncated:,}" + (f" ({counts.cut:,} tokens cut)" if counts.cut else "")
    yield "longest sample", f"{counts.longest:,} tokens"
    yield from ((f"draft vocabulary of {size:,}", f"covers {share:.2%}") for size, share in inspection.vocabulary.items())
    if found := inspection.agreement:
        yield "verifier's own choice", f"{found.agreeing:,} of {found.tokens:,} supervised tokens ({found.share:.1%})"


def to_terminal(inspection: Inspection) -> Group:
    """For a rich console: samples with supervised text in green, then the figures."""
    table = Table("", "", show_header=False, title="coverage")
    for name, value in lines(inspection):
        table.add_row(name, value)
    parts = [part for one in inspection.examples for part in _shown(one)]
    warning = inspection.agreement and inspection.agreement.warning
    return Group(*parts, table, *([Text(f"warning: {warning}", style="bold yellow")] if warning else []))


def _shown(example: Example) -> Iterator[Text]:
    shown = Text()
    for text, supervised in example.runs:
        # Escape sequences in the data would take over the terminal.
        shown.append(text.replace("\x1b", "\u241b"), style="bold green" if supervised else "dim")
    yield Text(caption(example))
    yield shown
    yield Text()


def caption(example: Example) -> str:
    sample = example.sample
    cut = f", {sample.cut} more cut off" if sample.cut else ""
    return f"{sample.source}  {sum(sample.mask)} of {len(sample.ids)} tokens supervised{cut}"


def write_page(inspection: Inspection, path: Path) -> None:
    """Write the page. Raises UserError when it cannot be written."""
    page = (
        html_environment(Path(__file__).parent)
        .get_template("inspection.html.j2")
        .render(
            lines=list(lines(inspection)),
            examples=[(caption(one), one.runs) for one in inspection.examples],
            warning=inspection.agreement and inspection.agreement.warning,
        )
    )
    write_text(path, page)
