"""Tables for the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

if TYPE_CHECKING:
    from .evaluation.analysis_file import Analysis
    from .evaluation.diagnosis import Diagnosis
    from .evaluation.lossless import Gate


def results_table(*evaluations: dict[str, Any]) -> Table:
    """The results of evaluation.json files as a rich table that fits into 80 columns."""
    table = Table("head", "tree", "depth", "nodes", "rule", "tau", "greedy", "speed-up")
    for head, result in ((e["head"]["kind"], result) for e in evaluations for result in e["results"]):
        tree, tau, speedup, temperature = result["tree"], result["tau"], result["speedup"], result["temperature"]
        greedy = {True: "identical", False: "DIFFERS", None: "-"}[result["identical_to_greedy"]]
        rule = result.get("rule", "greedy") + ("" if result.get("lossless", True) else " (lossy)")
        rule += f", T {temperature:g}" if temperature else ""
        measured = ["-" if tau is None else f"{tau:.2f}", greedy, "-" if speedup is None else f"{speedup:.2f}x"]
        table.add_row(head, tree["kind"], str(tree["depth"]), str(tree["nodes"]), rule, *measured)
    return table


def gates_table(gates: "Sequence[Gate]") -> Table:
    """The gates of `headstart lossless` as a rich table."""
    table = Table("part", "what", "measured", "needed", "", "by")
    for gate in gates:
        verdict = "passed" if gate.passed else "[bold red]FAILED[/]"
        table.add_row(gate.part, gate.name, f"{gate.measure} {gate.value:.3g}", gate.needed, verdict, gate.note)
    return table


def diagnosis_tables(diagnosis: "Diagnosis") -> Group:
    """What `headstart doctor` found: accuracy by depth, the checks, and the first place where training and decoding part."""
    shares = Table("depth", "labels", "hit, training", "hit, decoding", "hit, the loss", "logged in training")
    found = diagnosis.accuracy
    for k, labels in enumerate(found["labels"]):
        names = ("training", "decoding", "loss", "logged")
        cells = [found[name][k] if k < len(found[name]) else None for name in names]
        shares.add_row(str(k + 1), str(labels), *("-" if cell is None else f"{cell:.3f}" for cell in cells))
    checks = Table("check", "", "found")
    for check in diagnosis.checks:
        verdict = {True: "healthy", False: "[bold red]PARTS[/]", None: "-"}[check.healthy]
        checks.add_row(check.name, verdict, check.note)
    first = diagnosis.first
    if first is None:
        return Group(shares, checks, "training and decoding agree")
    places = {"depth": first.depth, "prompt": first.text, "position": first.position}
    place = ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)
    return Group(shares, checks, f"first parting: {first.name}{f' ({place})' if place else ''}; likely cause: {first.cause}")


def analysis_tables(analysis: "Analysis", page: Path) -> Group:
    """What `headstart analyse` found, and where its pictures are."""
    stages, lengths = analysis.stages, analysis.lengths
    ranks = "too few looks for a rank correlation (training.evaluate_every makes more)"
    if stages.spearman is not None:
        ranks = (
            f"rank correlation (Spearman) of alpha with KL {stages.spearman:.3f}, p {stages.p:.2g}, {len(stages.looks)} looks"
        )
    drafts = Table(
        "alpha", "best drafts a round", "tokens a pass", "speed-up", title=f"a draft costs {lengths.cost:.3g} passes"
    )
    for curve in lengths.curves:
        drafts.add_row(
            f"{curve.alpha:g}", str(curve.best), f"{curve.tokens[curve.best]:.2f}", f"{curve.speedup[curve.best]:.2f}x"
        )
    for chain in lengths.measured:
        drafts.add_row("measured", f"{len(chain.tokens) - 1} (T {chain.temperature:g})", f"{chain.tau:.2f}", "-")
    count = max((len(depth.accuracy) for depth in analysis.top_k), default=0)
    accuracy = Table("depth", "labels", "in vocabulary", *(f"top {k + 1}" for k in range(count)))
    for number, depth in enumerate(analysis.top_k, 1):
        shares = ("-" if share is None else f"{share:.3f}" for share in depth.accuracy)
        accuracy.add_row(str(number), str(depth.labels), str(depth.in_vocabulary), *shares)
    parts = Table("text", "tau", "rounds")
    for name, part in (analysis.by_category | analysis.by_context).items():
        parts.add_row(name, "-" if part.tau is None else f"{part.tau:.2f}", str(part.rounds))
    return Group(ranks, drafts, accuracy, parts, f"pictures: {page}")
