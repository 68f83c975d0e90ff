"""benchmarks/results.py: the cells of the table, to the digit."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

import headstart

SCRIPT = Path(headstart.__file__).parent / "benchmarks" / "results.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="runs in a checkout")

GREEDY: dict[str, Any] = {
    "tree": {"kind": "dynamic", "depth": 5, "nodes": 64}, "temperature": 0.0, "rule": "greedy", "lossless": True, "tau": 2.6667,
    "survival": [0.6667, 0.5, None], "alpha": 0.7125, "identical_to_greedy": True, "speedup": 1.9375,
}  # fmt: skip
SAMPLED = GREEDY | {
    "tree": {"kind": "chain", "depth": 4, "nodes": 5}, "temperature": 1.0, "rule": "without_replacement",
    "identical_to_greedy": None, "speedup": None,
}  # fmt: skip
LOSSY = SAMPLED | {"temperature": 0.7, "rule": "typical", "lossless": False}
OTHER = SAMPLED | {"drafter": "prompt_lookup", "alpha": None}


def test_the_table(tmp_path: Path) -> None:
    evaluation = {"head": {"kind": "eagle3"}, "results": [SAMPLED, OTHER, LOSSY, GREEDY]}
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    values = {"head, without_replacement": 0.41234, "head, candidates": 0.9, "prompt_lookup, without_replacement": 0.25}
    gates = [{"part": "own model", "name": f"{name}, chain of 5 nodes, T 1", "value": p} for name, p in values.items()]
    (tmp_path / "lossless.json").write_text(json.dumps({"gates": gates}), encoding="utf-8")
    table = runpy.run_path(str(SCRIPT))["table"]
    lines = list(table([tmp_path]))
    assert lines == [
        "| drafter | tree | rule | T | tau | survival | alpha | identical | p-value | speedup |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| eagle3 | dynamic 5/64 | greedy | 0 | 2.67 | 0.67 0.50 - | 0.713 | yes | - | 1.94 |",
        "| eagle3 | chain 4/5 | typical (lossy) | 0.7 | 2.67 | 0.67 0.50 - | 0.713 | - | - | - |",
        "| eagle3 | chain 4/5 | without_replacement | 1 | 2.67 | 0.67 0.50 - | 0.713 | - | 0.412 | - |",
        "| prompt_lookup | chain 4/5 | without_replacement | 1 | 2.67 | 0.67 0.50 - | - | - | 0.250 | - |",
    ]
    (tmp_path / "lossless.json").unlink()
    assert list(table([tmp_path / "evaluation.json"]))[4].split(" | ")[8] == "-"
