"""Tables for the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from .evaluation.advise import Advice
    from .evaluation.analysis_file import Analysis
    from .evaluation.diagnosis import Diagnosis
    from .evaluation.lossless import Gate
    from .evaluation.tree_search import Found, RankCounts


def results_table(*evaluations: dict[str, Any]) -> Table:
    """The results of evaluation.json files as a rich table that fits into 80 columns."""
    table = Table("drafter", "tree", "depth", "nodes", "rule", "tau", "greedy", "speed-up")
    for head, result in ((e["head"]["kind"], result) for e in evaluations for result in e["results"]):
        tree, tau, speedup, temperature = result["tree"], result["tau"], result["speedup"], result["temperature"]
        greedy = {True: "identical", False: "DIFFERS", None: "-"}[result["identical_to_greedy"]]
        rule = result.get("rule", "greedy") + ("" if result.get("lossless", True) else " (lossy)")
        rule += f", T {temperature:g}" if temperature else ""
        measured = ["-" if tau is None else f"{tau:.2f}", greedy, "-" if speedup is None else f"{speedup:.2f}x"]
        drafter = result.get("drafter", "head")
        table.add_row(
            head if drafter == "head" else drafter, tree["kind"], str(tree["depth"]), str(tree["nodes"]), rule, *measured
        )
    return table


def gates_table(gates: "Sequence[Gate]") -> Table:
    """The gates of `headstart lossless` as a rich table."""
    table = Table("part", "what", "measured", "needed", "", "by")
    for gate in gates:
        verdict = "passed" if gate.passed else "[bold red]FAILED[/]"
        table.add_row(gate.part, gate.name, f"{gate.measure} {gate.value:.3g}", gate.needed, verdict, gate.note)
    return table


def facts_table(title: str, facts: dict[str, Any]) -> Table:
    """Names and values, those of inner dicts as `outer: inner`; bytes in megabytes."""
    table = Table("", "", show_header=False, title=title)
    for name, value in facts.items():
        label = name.replace("_", " ")
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for key, one in inner:
            words = f"{label}: {key}" if key else label
            if words.endswith("bytes"):
                table.add_row(words.removesuffix("bytes") + "MB", f"{one / 1e6:,.1f}")
            else:
                table.add_row(words, f"{one:,}" if isinstance(one, int | float) and not isinstance(one, bool) else str(one))
    return table


def ranks_table(ranks: "RankCounts", found: "Found") -> Table:
    """How often each choice is right, level by level, and how much of the found tree lies there."""
    tree, shown = found.tree, 5
    title = f"{tree.nodes} nodes, depth {tree.depth}, predicted tau {found.tau:.2f}"
    table = Table("depth", "positions", *(f"choice {rank + 1}" for rank in range(shown)), "nodes", title=title)
    for depth, (reached, row) in enumerate(zip(ranks.reached, ranks.shares, strict=True), 1):
        shares = [f"{share:.3f}" for share in [*row, *[0.0] * shown][:shown]]
        table.add_row(str(depth), str(reached), *shares, str(sum(len(path) == depth for path in found.paths)))
    return table


def advice_table(advice: "Sequence[Advice]") -> Table:
    """The fastest trees by batch size, with what was measured of them."""
    table = Table("batch", "tree", "depth", "nodes", "tau", "speed-up", "measured tau", "measured")
    for one in advice:
        told = one.measured or {}
        tau, speedup = told.get("tau"), told.get("speedup")
        measured = ["-" if tau is None else f"{tau:.2f}", "-" if speedup is None else f"{speedup:.2f}x"]
        tree = one.tree
        table.add_row(
            str(one.batch), tree.kind, str(tree.depth), str(tree.nodes), f"{one.tau:.2f}", f"{one.speedup:.2f}x", *measured
        )
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
        drafts.add_row("measured", chain.label, f"{chain.tau:.2f}", "-")
    count = max((len(depth.accuracy) for depth in analysis.top_k), default=0)
    accuracy = Table("depth", "labels", "in vocabulary", *(f"top {k + 1}" for k in range(count)))
    for number, depth in enumerate(analysis.top_k, 1):
        shares = ("-" if share is None else f"{share:.3f}" for share in depth.accuracy)
        accuracy.add_row(str(number), str(depth.labels), str(depth.in_vocabulary), *shares)
    parts = Table("text", "tau", "rounds")
    for name, part in (analysis.by_category | analysis.by_context).items():
        parts.add_row(name, "-" if part.tau is None else f"{part.tau:.2f}", str(part.rounds))
    return Group(ranks, drafts, accuracy, parts, f"pictures: {page}")


def plan_table(plan: dict[str, Any]) -> Table:
    """What `headstart train --dry-run` found."""
    table = Table("what", "how much", title=f"{plan['head']['kind']} for {plan['verifier']['name']}")
    verifier, head = plan["verifier"], plan["head"]
    active = f", {verifier['active'] / 1e9:.2f}B of them a token" if verifier["active"] < 0.8 * verifier["parameters"] else ""
    table.add_row("verifier", f"{verifier['parameters'] / 1e9:.2f}B parameters{active}, {verifier['dtype']}")
    table.add_row("head", f"{head['parameters'] / 1e6:.1f}M parameters")
    for name, size in plan["memory_gb"].items():
        table.add_row(f"  {name}", f"{size:.2f} GB")
    table.add_row(
        f"each of {plan['ranks']} ({plan['strategy']})", f"{plan['memory_total_gb']:.1f} of {plan['device_memory_gb']:.1f} GB"
    )
    if plan["host_features_gb"]:
        table.add_row("states in main memory", f"{plan['host_features_gb']:.1f} GB a process")
    table.add_row("steps", "unknown" if plan["steps"] is None else f"{plan['steps']:,}")
    table.add_row("tokens", "unknown" if plan["tokens"] is None else f"at most {plan['tokens']:,}")
    if plan["tokens_per_second"]:
        rate = f"{plan['tokens_per_second']:,.0f} tokens/s (ten steps of one process, times {plan['ranks']})"
        table.add_row("time", f"{plan['hours']:.2f} h at {rate}")
    else:
        table.add_row("time", f"not measured: {plan['not_probed']}")
    for warning in plan["warnings"]:
        table.add_row("[bold red]warning[/]", escape(warning))
    return table
