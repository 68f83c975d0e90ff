"""Tables for the terminal."""

from typing import Any

from rich.table import Table


def results_table(evaluation: dict[str, Any]) -> Table:
    """The results of an evaluation.json as a rich table."""
    table = Table("tree", "depth", "nodes", "temperature", "tau", "acceptance rate", "greedy", "speed-up")
    for result in evaluation["results"]:
        tree, speedup = result["tree"], result["speedup"]
        greedy = {True: "identical", False: "DIFFERS", None: "-"}[result["identical_to_greedy"]]
        shape = [tree["kind"], str(tree["depth"]), str(tree["nodes"]), f"{result['temperature']:g}"]
        tau, accepted = result["tau"], result["draft_acceptance_rate"]
        measured = ["-" if tau is None else f"{tau:.2f}", "-" if accepted is None else f"{accepted:.1%}", greedy]
        table.add_row(*shape, *measured, "-" if speedup is None else f"{speedup:.2f}x")
    return table
