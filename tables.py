"""Tables for the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

if TYPE_CHECKING:
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
