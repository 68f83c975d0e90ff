"""Tables for the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from .evaluation.lossless import Gate


def results_table(evaluation: dict[str, Any]) -> Table:
    """The results of an evaluation.json as a rich table."""
    table = Table("tree", "depth", "nodes", "temperature", "rule", "tau", "acceptance rate", "greedy", "speed-up")
    for result in evaluation["results"]:
        tree, speedup = result["tree"], result["speedup"]
        greedy = {True: "identical", False: "DIFFERS", None: "-"}[result["identical_to_greedy"]]
        rule = result.get("rule", "greedy") + ("" if result.get("lossless", True) else " (lossy)")
        shape = [tree["kind"], str(tree["depth"]), str(tree["nodes"]), f"{result['temperature']:g}", rule]
        tau, accepted = result["tau"], result["draft_acceptance_rate"]
        measured = ["-" if tau is None else f"{tau:.2f}", "-" if accepted is None else f"{accepted:.1%}", greedy]
        table.add_row(*shape, *measured, "-" if speedup is None else f"{speedup:.2f}x")
    return table


def gates_table(gates: "Sequence[Gate]") -> Table:
    """The gates of `headstart lossless` as a rich table."""
    table = Table("part", "what", "measured", "needed", "", "by")
    for gate in gates:
        verdict = "passed" if gate.passed else "[bold red]FAILED[/]"
        table.add_row(gate.part, gate.name, f"{gate.measure} {gate.value:.3g}", gate.needed, verdict, gate.note)
    return table
