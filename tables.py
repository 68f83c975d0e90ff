"""Tables for the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
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
