"""Pictures of training and acceptance: matplotlib figures, as PNG files and as SVG for a page.

Call everything inside `style()`. Colours hold for the common kinds of colour blindness, and a second sign (marker, line, hatch)
stands beside each. In the SVG the ink is a CSS variable of the page, so that it follows the page into the dark.
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

HUES = ("#0072b2", "#d55e00", "#8c6d1f", "#56b4e9", "#6b7280")  # one a run
PARTS = {"prefill": "#c9ced6", "draft": "#009e73", "verify": "#a55a85", "other": "#8b939e"}
INK, MUTED, LINE = "#1c2128", "#5a6371", "#e1e4e8"
VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line"}
MARKERS, DASHES, HATCHES = "osD^vP", ("-", "--", ":", "-."), ("", "///", "...", "xxx")
WIDTH = 420  # points; a page shows it at 330 to 520 pixels
STYLE = {
    "svg.fonttype": "none",  # letters stay text: they can be searched, and take the page's font
    "text.parse_math": False,  # a category may be called "$"
    "font.size": 11, "text.color": INK, "axes.labelcolor": MUTED, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "axes.facecolor": "none", "axes.edgecolor": LINE, "xtick.color": LINE, "ytick.color": LINE, "grid.color": LINE,
    "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 12,
    "xtick.major.size": 0, "ytick.major.size": 0, "legend.frameon": False, "legend.fontsize": 10,
    "lines.linewidth": 2, "lines.markersize": 5, "figure.constrained_layout.use": True, "hatch.linewidth": 0.6,
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One colour of a picture. style: the how-manieth of its run; values: what stands on the axis, and the number there."""

    label: str
    color: str
    style: int
    values: Mapping[str, float]

    @property
    def shade(self) -> str:
        return mix(self.color, (0, 0.375, 0.6)[min(self.style, 2)])


@contextmanager
def style() -> Iterator[None]:
    """The looks above, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def mix(color: str, white: float) -> str:
    return str(to_hex([white + (1 - white) * part for part in to_rgb(color)]))


def training(
    title: str,
    color: str,
    loss: Sequence[tuple[int, float]],
    by_depth: Sequence[tuple[int, Sequence[float]]],
    held_out: Sequence[tuple[int, float]],
) -> Figure:
    """Pairs of (step, value): the loss with the terms of each depth below it, and the held-out tau where it was measured."""
    depths = max((len(values) for _, values in by_depth), default=0)
    figure = sized(280 + 100 * bool(held_out))
    parts = figure.subplots(1 + bool(held_out), 1, sharex=True, squeeze=False, height_ratios=[5, 2][: 1 + bool(held_out)])
    axes = parts[0, 0]
    axes.set_title(title)
    axes.plot(*columns(loss), color=color, label="loss")
    for depth in range(depths):
        points = [(step, values[depth]) for step, values in by_depth if depth < len(values)]
        name = f"at depth {depth + 1}" if depth in (0, depths - 1) else None  # between them the shades say it
        axes.plot(*columns(points), color=mix(color, 0.15 + 0.55 * depth / depths), linewidth=1.2, label=name)
    axes.set_yscale("log")  # the sum stands far above its terms
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("loss, log scale")
    if held_out:
        tau_axes = parts[1, 0]
        tau_axes.plot(*columns(held_out), color=color, marker="o")
        tau_axes.set_ylabel("held-out tau")
        tau_axes.margins(y=0.35)
        step, tau = max(held_out, key=lambda point: point[1])
        tau_axes.annotate(f"{tau:.2f}", (step, tau), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=10)
    parts[-1, 0].set_xlabel("step")
    parts[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, axes, 4)
    return figure


def columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Steps and values; a loss of exactly zero had no label, and has no place on a log scale."""
    positive = [(step, value) for step, value in points if value > 0]
    return [step for step, _ in positive], [value for _, value in positive]


def lines(title: str, x_label: str, series: Sequence[Series]) -> Figure:
    """Shares between 0 and 1 over positions."""
    figure = sized(260 + 16 * len(series))
    axes = figure.subplots()
    names = union(series)
    for one in series:
        places = [names.index(name) for name in one.values]
        look: dict[str, Any] = {"marker": MARKERS[one.style % len(MARKERS)], "linestyle": DASHES[one.style % len(DASHES)]}
        axes.plot(places, list(one.values.values()), color=one.shade, label=one.label, **look)
    axes.set(title=title, xlabel=x_label, ylim=(0, 1))
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.3, max(len(names) - 0.7, 0.3))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    legend(figure, axes, 1)
    return figure


def bars(title: str, x_label: str, series: Sequence[Series]) -> Figure:
    """Upright groups of bars of shares."""
    figure = sized(260 + 16 * len(series))
    axes = figure.subplots()
    names = union(series)
    thick = 0.8 / len(series)
    for i, one in enumerate(series):
        places = [names.index(name) + (i - (len(series) - 1) / 2) * thick for name in one.values]
        axes.bar(places, list(one.values.values()), thick * 0.94, label=one.label, **filling(one))
    axes.set(title=title, xlabel=x_label)
    axes.set_xticks(range(len(names)), names)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    legend(figure, axes, 1)
    return figure


def levels(title: str, x_label: str, series: Sequence[Series]) -> Figure:
    """Lying groups of bars with their numbers, one group a name, for names of any length."""
    names = union(series)
    figure = sized(90 + len(names) * (16 + 15 * len(series)) + 16 * len(series))
    axes = figure.subplots()
    thick = 0.8 / len(series)
    for i, one in enumerate(series):
        places = [names.index(name) + (i - (len(series) - 1) / 2) * thick for name in one.values]
        drawn = axes.barh(places, list(one.values.values()), thick * 0.9, label=one.label, **filling(one))
        axes.bar_label(drawn, fmt="%.2f", padding=4, fontsize=9, color=MUTED)
    axes.set(title=title, xlabel=x_label)
    axes.set_yticks(range(len(names)), [elide(name, 28) for name in names], color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.grid(visible=False, axis="y")
    legend(figure, axes, 1)
    return figure


def shares(title: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> Figure:
    """One lying bar a row, cut into its parts (names of PARTS)."""
    figure = sized(95 + 46 * len(rows))
    axes = figure.subplots()
    found = [part for part in PARTS if any(seconds.get(part) for _, seconds in rows)]
    for part in found:
        for row, (_, seconds) in enumerate(rows):
            total = sum(seconds.values()) or 1.0
            left = sum(seconds.get(before, 0.0) for before in found[: found.index(part)]) / total
            width = seconds.get(part, 0.0) / total
            axes.barh(row, width, 0.42, left, color=PARTS[part], label=part if row == 0 else None)
            if width >= 0.08:
                ink = INK if part == "prefill" else "#ffffff"
                axes.text(left + width / 2, row, f"{width:.0%}", ha="center", va="center_baseline", color=ink, fontsize=10)
    for row, (label, _) in enumerate(rows):  # above the bar: beside it a long label would leave no room
        axes.text(0, row - 0.27, label, va="bottom", fontsize=10).set_in_layout(False)
    axes.set(title=title, xlim=(0, 1), yticks=[])
    axes.set_ylim(len(rows) - 0.7, -0.7)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(visible=False)
    legend(figure, axes, 4)
    return figure


def sized(height: float) -> Figure:
    return Figure(figsize=(WIDTH / 72, height / 72))


def union(series: Sequence[Series]) -> list[str]:
    """The names of all series, in the order of the longest first."""
    return list(dict.fromkeys(name for one in sorted(series, key=lambda one: -len(one.values)) for name in one.values))


def filling(one: Series) -> dict[str, Any]:
    """Hatched from a run's second series on: its shades alone are close."""
    return {"color": one.shade, "hatch": HATCHES[one.style % len(HATCHES)], "edgecolor": "#ffffff", "linewidth": 0}


def elide(text: str, most: int) -> str:
    """Cut the middle out of a text of more than `most` characters: names differ at their ends."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[: most - 1 - half]}…{text[-half:]}"


def legend(figure: Figure, axes: Axes, per_row: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower left", ncols=per_row, handlelength=2.2, columnspacing=1.4)


def to_png(figure: Figure) -> bytes:
    return save(figure, format="png", dpi=160, facecolor="#ffffff", metadata={"Software": None})


def to_svg(figure: Figure, name: str, alt: str) -> str:
    """An <svg> element to stand inside HTML: transparent, as wide as its place, its ids prefixed with the name.

    The same figure gives the same bytes.
    """
    matplotlib.rcParams["svg.hashsalt"] = name
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    text = save(figure, format="svg", facecolor="none", metadata=nothing).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    box = re.search(r'viewBox="[^"]+"', text)
    assert box is not None
    label = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<svg {box[0]} role="img" aria-label="{label}">' + text[text.index(">") + 1 :].rstrip()


def save(figure: Figure, **options: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # of a PNG: no reason to trouble anyone
        figure.savefig(file, **options)
    return file.getvalue()
