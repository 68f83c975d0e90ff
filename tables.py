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
        measured = [f"{result['tau']:.2f}", f"{result['draft_acceptance_rate']:.1%}", greedy]
        table.add_row(*shape, *measured, "-" if speedup is None else f"{speedup:.2f}x")
    return table
