"""`headstart eval` with other drafters, trees and prompts, `tree`, `advise` and the benchmark of a round, on a tiny run."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import headstart
from test_jobs import cache, refused, verifier, write_recipe  # noqa: F401  (fixtures)

from headstart.cli_trees import overrides, parse_tree
from headstart.errors import UserError
from headstart.training.recipe import RecipeError, load_recipe

SPEC_BENCH = [
    {"question_id": 81 + i, "category": category, "turns": [f"what is {i}?", "say it again"]}
    for i, category in enumerate(["writing", "maths", "writing", "rag"])
]
DRAFTERS = ["head", "prompt_lookup", "lookahead", "hierarchical", "truncated:2"]


@pytest.fixture(scope="module")
def trained() -> dict[str, Path]:
    """The run that was trained for the first test; the others copy it."""
    return {}


@pytest.fixture
def run(trained: dict[str, Path], write_recipe: Callable[..., Path], tmp_path: Path) -> Path:  # noqa: F811
    """A Medusa run of six steps, without timing."""
    if not trained:
        ended = headstart("train", write_recipe("medusa", evaluation__timing_prompts=0), "--run-folder", tmp_path / "trained")
        assert ended.code == 0, ended.err
        trained["run"] = tmp_path / "trained"
    shutil.copytree(trained["run"], tmp_path / "run")
    return tmp_path / "run"


def test_eval_of_every_drafter_with_trees_of_the_command_line(run: Path, verifier: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    drafters = [*DRAFTERS, f"model:{verifier}"]
    trees = ["chain:2", "dynamic:3,3,8", f"static:{tmp_path / 'tree.json'}"]
    chosen = [part for name in drafters for part in ("--drafter", name)] + [part for tree in trees for part in ("--tree", tree)]
    ended = headstart("eval", run, *chosen, "--json")
    assert ended.code == 0, ended.err
    results = json.loads(ended.out)["results"]
    assert [(r["drafter"], r["tree"]["kind"]) for r in results] == [
        (drafter, kind) for drafter in drafters for kind in ("chain", "dynamic", "static")
    ]
    assert all(r["identical_to_greedy"] is True for r in results)
    for r in results:
        without = r["drafter"] in ("prompt_lookup", "lookahead", "hierarchical")
        assert (r["alpha"] is None) == without
        if r["drafter"].startswith("model:"):
            assert r["alpha"] == pytest.approx(1.0, abs=1e-5)
            if r["tree"]["kind"] == "chain":
                assert set(r["survival"]) == {1.0} or r["tau"] > 2
    table = headstart("eval", run, "--drafter", "prompt_lookup", "--tree", "chain:2").out
    assert "prompt_lookup" in table
    reported = headstart("report", run)
    assert reported.code == 0, reported.err
    assert "prompt_lookup" in (run / "report.html").read_text(encoding="utf-8")


def test_eval_of_a_benchmark_by_path_and_category(run: Path, tmp_path: Path) -> None:
    """A folder in the form of Spec-Bench, a licence beside it; its first turns are asked."""
    bench = tmp_path / "bench"
    bench.mkdir()
    (bench / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SPEC_BENCH))
    (bench / "LICENSE.txt").write_text("no prompt\n")
    judged = headstart("eval", run, "--prompts", bench, "--json")
    assert "left out: 4 of 4 rows have later turns without answers" in judged.err
    by_folder = json.loads(judged.out)
    by_file = json.loads(headstart("eval", run, "--prompts", bench / "question.jsonl", "--json").out)
    assert by_folder["prompts"] == by_file["prompts"] == 4
    assert set(by_folder["results"][0]["by_category"]) == {"writing", "maths", "rag"}
    assert [r["tau"] for r in by_folder["results"]] == [r["tau"] for r in by_file["results"]]
    held_out = json.loads(headstart("eval", run, "--json").out)
    assert set(held_out["results"][0]["by_category"]) == {"maths"}
    assert refused("eval", run, "--prompts", tmp_path / "no.jsonl") == f"{tmp_path / 'no.jsonl'}: no such file"
    (tmp_path / "empty").mkdir()
    assert refused("eval", run, "--prompts", tmp_path / "empty").startswith(
        f"{tmp_path / 'empty'}: no chat files in this folder"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["training.steps=9"], "training.steps: the head is trained; what can be another where it is judged: evaluation, "),
        (["data.holdout=0.5"], "data.holdout: the head is trained; "),
        (
            ["--drafter", "prompt_lookup", "--tree", "dynamic:2,300,9"],
            "evaluation.trees: prompt_lookup: a dynamic tree asks for 300 children of a node; its drafter knows 260 tokens",
        ),
        (["--drafter", "oracle"], "evaluation.drafters.0.kind: "),
        (["--drafter", "truncated:9"], "truncated: 9 layers; verifier "),
        (["--drafter", "truncated:many"], "evaluation.drafters.0.layers: must be a whole number"),
        (["--drafter", "prompt_lookup:3"], "evaluation.drafters.0.options: unknown key"),
        (["--drafter", "model:/no/such"], "verifier /no/such: no such folder"),
        (["--tree", "chain:9"], "a chain tree of depth 9 needs as many heads; this head has 3"),
        (["--tree", "chain"], "--tree chain: must be chain:DEPTH, dynamic:DEPTH,TOP_K,NODES or static:FILE.json"),
        (["--tree", "dynamic:3,3"], "--tree dynamic:3,3: must be "),
        (["--tree", "static:no.json"], "--tree static:no.json: No such file or directory"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(arguments: list[str], told: str, run: Path) -> None:
    before = sorted(run.rglob("*"))
    assert told in refused("eval", run, *arguments)
    assert sorted(run.rglob("*")) == before


def test_trees_that_only_the_head_cannot_fill_are_open_to_other_drafters(run: Path) -> None:
    ended = headstart("eval", run, "--drafter", "prompt_lookup", "--tree", "chain:9", "--json")
    assert ended.code == 0, ended.err
    assert [r["tree"]["depth"] for r in json.loads(ended.out)["results"]] == [9]


def test_drafters_of_a_recipe(write_recipe: Callable[..., Path]) -> None:  # noqa: F811
    listed = [
        "head",
        "prompt_lookup",
        "lookahead",
        {"kind": "truncated", "layers": 2},
        {"kind": "model", "model": "x"},
        "hierarchical",
    ]
    section = load_recipe(write_recipe("medusa", evaluation__drafters=listed)).evaluation
    assert [drafter.name for drafter in section.drafters] == [*DRAFTERS[:3], "truncated:2", "model:x", "hierarchical"]
    assert [drafter.name for drafter in load_recipe(write_recipe("medusa")).evaluation.drafters] == ["head"]
    written = load_recipe(write_recipe("medusa", evaluation__drafters=[{"kind": "hierarchical", "longest": 4, "matches": 1}]))
    assert [drafter.name for drafter in written.evaluation.drafters] == ["hierarchical (longest 4, matches 1)"]
    for wrong, told in (
        ([], "evaluation.drafters: "),
        ([{"kind": "prompt_lookup", "longest": 2, "shortest": 3}], "must be at most longest"),
    ):
        with pytest.raises(RecipeError, match=told):
            load_recipe(write_recipe("medusa", evaluation__drafters=wrong))


def test_training_needs_the_head_among_the_drafters(write_recipe: Callable[..., Path], tmp_path: Path) -> None:  # noqa: F811
    recipe = write_recipe("medusa", evaluation__drafters=["lookahead"])
    assert refused("train", recipe, "--run-folder", tmp_path / "run") == (
        "evaluation.drafters: training looks at what the head itself drafts; add head to the list"
    )
    assert not (tmp_path / "run").exists()


def test_the_command_line_as_overrides(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps({"kind": "static", "paths": [[0], [0, 1]]}))
    assert parse_tree(f"static:{file}") == {"kind": "static", "paths": [[0], [0, 1]]}
    assert overrides(["head"], ["chain:5", "dynamic:5,10,64"], [Path("a b.jsonl")]) == [
        'evaluation.drafters=["head"]',
        'evaluation.trees=[{"kind": "chain", "depth": 5}, {"kind": "dynamic", "depth": 5, "top_k": 10, "nodes": 64}]',
        'evaluation.prompt_files=["a b.jsonl"]',
    ]
    assert overrides([], [], []) == []
    file.write_text("nothing")
    with pytest.raises(UserError, match=r"not JSON; a list of paths of child ranks is needed"):
        parse_tree(f"static:{file}")


def test_a_searched_tree_is_evaluated(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "best.json"
    found = headstart("tree", run, "--nodes", 6, "--prompts", 4, "--output", file, "--json")
    assert found.code == 0, found.err
    told = json.loads(found.out)
    assert told["nodes"] == 6
    assert (told["kind"], len(told["paths"])) == ("static", 5)
    assert all(path[:-1] in told["paths"] or len(path) == 1 for path in told["paths"])
    assert json.loads(file.read_text())["paths"] == told["paths"]
    assert 1 < told["predicted_tau"] <= 4
    ended = headstart("eval", run, "--tree", f"static:{file}", "--json")
    assert json.loads(ended.out)["results"][0]["tree"]["paths"] == told["paths"]
    assert "predicted tau" in headstart("tree", run, "--nodes", 6, "--depth", 2, "--prompts", 4).out
    assert refused("tree", run, "--depth", 7) == "--depth 7: this head drafts 3 tokens at most"


def test_advice_for_two_batch_sizes(run: Path) -> None:
    ended = headstart("advise", run, "--batch", 1, "--batch", 2, "--nodes", 6, "--prompts", 4, "--measure", "--json")
    assert ended.code == 0, ended.err
    advice = json.loads(ended.out)["advice"]
    assert {one["batch"] for one in advice} == {1, 2}
    for one in advice:
        assert one["predicted"]["speedup"] > 0
        assert one["measured"]["speedup"] > 0
        assert 1 <= one["measured"]["tau"] <= 1 + one["tree"]["depth"]
        assert one["tree"]["nodes"] <= 6
    table = headstart("advise", run, "--nodes", 4, "--prompts", 4)
    assert table.code == 0
    assert "speed-up" in table.out


def test_the_round_benchmark(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec: Any = importlib.util.spec_from_file_location(
        "round_benchmark", Path(__file__).parent.parent / "benchmarks" / "round.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    costs = module.main([str(run), "--tree", "chain:3", "--tree", "dynamic:3,3,8", "--tokens", "12", "--repeats", "1"])
    assert [(name, one.nodes) for name, one in costs] == [("chain:3", 4), ("dynamic:3,3,8", 8)]
    assert all(min(one.draft, one.verify, one.other, one.bare) > 0 for _, one in costs)
    assert "verify / bare" in capsys.readouterr().out
