"""Print evaluation.json files as one Markdown table: drafter x rule x temperature.

    python benchmarks/results.py runs/quickstart/*/

A folder's p-value comes from `lossless.json` beside its evaluation.json, where there is one:

    headstart lossless runs/quickstart/eagle3 --json > runs/quickstart/eagle3/lossless.json
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = ("drafter", "tree", "rule", "T", "tau", "survival", "alpha", "identical", "p-value", "speedup")
IDENTICAL = {True: "yes", False: "**no**", None: "-"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or evaluation.json files")
    print("\n".join(table(parser.parse_args().runs)))


def table(runs: list[Path]) -> Iterator[str]:
    """Lines of the table, the runs in the order given and their results by drafter, temperature and tree."""
    yield line(COLUMNS)
    yield line(["---"] * 4 + ["---:"] * (len(COLUMNS) - 4))
    for run in runs:
        path = run / "evaluation.json" if run.is_dir() else run
        evaluation = json.loads(path.read_text(encoding="utf-8"))
        proof = path.with_name("lossless.json")
        gates = json.loads(proof.read_text(encoding="utf-8"))["gates"] if proof.exists() else []
        for result in sorted(evaluation["results"], key=lambda result: (drafter(evaluation, result), result["temperature"])):
            yield line(cells(evaluation, result, gates))


def cells(evaluation: dict[str, Any], result: dict[str, Any], gates: list[dict[str, Any]]) -> list[str]:
    tree = result["tree"]
    survival = " ".join(number(share, 2) for share in result["survival"])
    rule = result.get("rule", "greedy") + ("" if result.get("lossless", True) else " (lossy)")
    return [
        drafter(evaluation, result), f"{tree['kind']} {tree['depth']}/{tree['nodes']}", rule, f"{result['temperature']:g}",
        number(result["tau"], 2), survival, number(result["alpha"], 3), IDENTICAL[result["identical_to_greedy"]],
        number(p_value(result, gates), 3), number(result["speedup"], 2),
    ]  # fmt: skip


def drafter(evaluation: dict[str, Any], result: dict[str, Any]) -> str:
    """The head's kind, or the name of another drafter that was evaluated beside it."""
    name = result.get("drafter", "head")
    return str(evaluation["head"]["kind"] if name == "head" else name)


def p_value(result: dict[str, Any], gates: list[dict[str, Any]]) -> float | None:
    """Of the chi-square test of sampled text with this drafter, rule, tree and temperature."""
    tree = result["tree"]
    drafts, temperature = result.get("drafter", "head"), f"T {result['temperature']:g}"
    name = f"{drafts}, {result['rule']}, {tree['kind']} of {tree['nodes']} nodes, {temperature}"
    return next((gate["value"] for gate in gates if gate["part"] == "own model" and gate["name"] == name), None)


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def line(parts: Any) -> str:
    return f"| {' | '.join(parts)} |"


if __name__ == "__main__":
    main()
