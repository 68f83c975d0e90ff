"""report.html: one page, complete in itself, about one or more run folders.

It reads files alone (no model, no torch) and draws the same page from the same files.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from .. import __version__
from ..errors import UserError
from ..heads.files import write_bytes, write_text
from ..templates import html_environment
from . import analysis_plots, plots
from .evaluation_file import Result, Slice
from .plots import Series
from .run_folder import Run, read_run

SETTINGS = ("verifier", "prompts", "max_new_tokens", "dtype", "device")  # what must agree before two runs are compared


@dataclass(frozen=True)
class Picture:
    """name: of its file under plots/, without `.png`."""

    name: str
    caption: str
    svg: Markup
    png: bytes


def write_report(run_folders: Sequence[Path], output: Path) -> Path:
    """Write the page about the runs to `output`, and its pictures to `plots/*.png` beside it. Returns `output`.

    Raises UserError when a run folder lacks a file, or a file cannot be read.
    """
    if not run_folders:
        raise UserError("no run folders are given to report on")
    runs = label([read_run(Path(folder)) for folder in run_folders])
    with plots.style():
        pictures = draw(runs)
    differing = [name for name in SETTINGS if len({getattr(run.evaluation, name) for run in runs}) > 1]
    page = environment().get_template("report.html.j2").render(
        runs=runs, pictures=pictures, differing=differing, version=__version__
    )  # fmt: skip
    for picture in pictures:
        write_bytes(output.parent / "plots" / f"{picture.name}.png", picture.png)
    write_text(output, page)
    return output


def label(runs: list[Run]) -> list[Run]:
    """Name the runs by the shortest of kind, folder name and path that tells them apart, and colour them."""
    names: list[Callable[[Run], str]] = [
        lambda run: run.evaluation.head.kind,
        lambda run: f"{run.evaluation.head.kind} ({run.folder.resolve().name})",
        lambda run: f"{run.evaluation.head.kind} ({run.folder})",
    ]
    name = next((name for name in names if len({name(run) for run in runs}) == len(runs)), names[-1])
    for i, run in enumerate(runs):
        run.label, run.color = name(run), plots.HUES[i % len(plots.HUES)]
    return runs


def draw(runs: Sequence[Run]) -> list[Picture]:
    """Every picture that the files have numbers for."""
    pictures = []

    def add(name: str, figure: Any, caption: str) -> None:
        svg = Markup(plots.to_svg(figure, name, caption))
        pictures.append(Picture(name, caption, svg, plots.to_png(figure)))

    for i, run in enumerate(runs, 1):
        if curves := training_curves(run):
            caption = "Training loss, with its terms by draft depth; below it tau in real decoding of held-out prompts."
            name = "training" if len(runs) == 1 else f"training-{i}"
            add(name, plots.training(f"Training: {plots.elide(run.label, 34)}", run.color, *curves), caption)
    if survival := series_of(runs, lambda r: {str(i): s for i, s in enumerate(r.survival, 1) if s is not None}):
        caption = "Share of rounds whose first drafts, up to this position, were all accepted."
        add("survival", plots.lines("Survival by draft position", "draft position", survival), caption)
    if histogram := series_of(runs, lambda r: dict(enumerate_shares(r.accepted_histogram))):
        caption = "How many drafts a round accepts: the more to the right, the fewer verifier passes."
        add("accepted", plots.bars("Accepted drafts a round", "accepted drafts", histogram), caption)
    if categories := series_of(runs, lambda r: taus(r.by_category), best=True):
        caption = "Mean tokens a round by the kind of prompt; each head with its best tree."
        add("categories", plots.levels("tau by category", "tau", categories), caption)
    contexts = series_of(runs, lambda r: taus(r.by_context), best=True)
    if any(len(one.values) > 1 for one in contexts):
        caption = "Mean tokens a round by the number of tokens before it; each head with its best tree."
        add("contexts", plots.levels("tau by context length", "tau", contexts), caption)
    for i, run in enumerate(runs, 1):
        suffix = "" if len(runs) == 1 else f"-{i}"
        for name, figure, caption in analysed(run):
            add(name + suffix, figure, caption)
    if rows := [(run.legend(r), parts) for run in runs for r in run.evaluation.results if (parts := parts_of(r))]:
        caption = "Where the wall time of speculative decoding goes."
        add("time", plots.shares("Time shares", rows), caption)
    return pictures


def analysed(run: Run) -> Iterator[tuple[str, Any, str]]:
    """Names, figures and captions of what analysis.json has numbers for."""
    if run.analysis is None:
        return
    stages, lengths, depths = run.analysis.stages, run.analysis.lengths, run.analysis.top_k
    label = plots.elide(run.label, 22)
    if stages.looks:
        figure = analysis_plots.alpha_against_kl(f"alpha against KL: {label}", run.color, stages)
        ranks = "" if stages.spearman is None else f" Spearman's rank correlation {stages.spearman:.3f} (p {stages.p:.2g})."
        yield "alpha-kl", figure, f"Overlap with the verifier against the divergence from it, at looks during training.{ranks}"
    cost = f"{lengths.cost:.3g} verifier passes a draft ({'measured' if lengths.cost_is_measured else 'assumed'})"
    caption = f"Expected under independent acceptance; a star marks the most worthwhile number of drafts at {cost}."
    yield "draft-length", analysis_plots.tokens_by_length(f"Tokens by draft length: {label}", lengths), caption
    if depths:
        labels = ", ".join(str(depth.labels) for depth in depths)
        figure = analysis_plots.accuracy_by_depth(f"Top-k accuracy: {label}", run.color, depths)
        yield "top-k", figure, f"Share of the text's tokens among the k likeliest drafts, by depth, of {labels} labels."


def training_curves(run: Run) -> Any:
    loss = [(line.step, line.loss) for line in run.metrics if line.loss is not None]
    by_depth = [(line.step, line.loss_by_depth) for line in run.metrics if line.loss_by_depth]
    held_out = [(line.step, line.held_out.tau) for line in run.metrics if line.held_out and line.held_out.tau is not None]
    return (loss, by_depth, held_out) if loss or held_out else None


def series_of(runs: Sequence[Run], values: Callable[[Result], dict[str, float]], best: bool = False) -> list[Series]:
    """One series for each result that has values (best: only for each run's best tree)."""
    return [
        Series(run.legend(result), run.color, 0 if best else style, found)
        for run in runs
        for style, result in enumerate([run.best] if best else run.evaluation.results)
        if (found := values(result))
    ]


def enumerate_shares(counts: Sequence[int]) -> list[tuple[str, float]]:
    total = sum(counts)
    return [(str(i), count / total) for i, count in enumerate(counts)] if total else []


def taus(slices: dict[str, Slice]) -> dict[str, float]:
    return {key: part.tau for key, part in slices.items() if part.tau is not None}


def parts_of(result: Result) -> dict[str, float]:
    return {part: seconds for part in plots.PARTS if (seconds := result.seconds.get(part))}


def environment() -> Environment:
    env = html_environment(Path(__file__).parent)
    env.filters |= {"fixed": fixed, "count": "{:,}".format, "short": short, "duration": duration}
    return env


def fixed(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def short(count: int) -> str:
    """9500000 -> 9.5M"""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
