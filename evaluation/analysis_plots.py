"""Pictures of analysis.json, in the looks of plots.py and to be drawn inside its `style()`."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .analysis_file import Depth, Lengths, Stages
from .plots import DASHES, HUES, INK, MARKERS, legend, mix, sized


def alpha_against_kl(title: str, color: str, stages: Stages) -> Figure:
    """A point a look, the later the darker."""
    figure = sized(270)
    axes = figure.subplots()
    count = len(stages.looks)
    axes.plot([look.kl for look in stages.looks], [look.alpha for look in stages.looks], color=mix(color, 0.6), linewidth=1)
    for i, look in enumerate(stages.looks):
        axes.plot(look.kl, look.alpha, "o", color=mix(color, 0.6 * (1 - (i + 1) / count)))
        if i in (0, count - 1):
            axes.annotate(f"step {look.step}", (look.kl, look.alpha), xytext=(6, 4), textcoords="offset points", fontsize=10)
    axes.set(title=title, xlabel="KL(draft, verifier), nats", ylabel="alpha")
    axes.margins(0.12)
    return figure


def tokens_by_length(title: str, lengths: Lengths) -> Figure:
    """Expected tokens a verifier pass over the number of drafts, the best number marked, and measured chains beside them."""
    figure = sized(300 + 16 * len(lengths.measured))
    axes = figure.subplots()
    for i, curve in enumerate(lengths.curves):
        color = HUES[i % len(HUES)]
        label = f"alpha {curve.alpha:g}: best with {curve.best}"
        axes.plot(range(len(curve.tokens)), curve.tokens, color=color, linestyle=DASHES[i % len(DASHES)], label=label)
        axes.plot(curve.best, curve.tokens[curve.best], marker="*", markersize=13, color=color)
    for i, chain in enumerate(lengths.measured):
        marker, label = MARKERS[i % len(MARKERS)], f"measured: {chain.label}"
        axes.plot(range(len(chain.tokens)), chain.tokens, color=INK, marker=marker, linewidth=1, label=label)
    axes.set(title=title, xlabel="drafts a round", ylabel="tokens a verifier pass")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, axes, 1)
    return figure


def accuracy_by_depth(title: str, color: str, depths: list[Depth]) -> Figure:
    """A line for each k of top-k."""
    figure = sized(300)
    axes = figure.subplots()
    ranks = max(len(depth.accuracy) for depth in depths)
    for k in range(ranks):
        points = [(i, share) for i, depth in enumerate(depths, 1) if (share := depth.accuracy[k]) is not None]
        axes.plot([i for i, _ in points], [share for _, share in points], color=mix(color, 0.65 * k / ranks),
                  marker=MARKERS[k % len(MARKERS)], label=f"top {k + 1}")  # fmt: skip
    axes.set(title=title, xlabel="depth", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    legend(figure, axes, 5)
    return figure
