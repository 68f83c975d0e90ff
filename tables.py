"""Tables for the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
