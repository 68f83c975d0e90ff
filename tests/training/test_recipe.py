"""Recipes: the schema, the exact words of every fault, overrides, and the shipped files."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from headstart.build import build_samplings
from headstart.errors import UserError
from headstart.evaluation.sampling import Sampling
from headstart.training.recipe import Recipe, find_recipe, load_recipe, recipe_yaml, schema_json, shipped_recipes
from headstart.training.recipe_faults import RecipeError
from headstart.training.sections.head import Eagle3Section, MedusaSection
from headstart.training.sections.tree import ChainSection, DynamicSection

GOOD = """\
verifier: {model: builtin:smollm2-135m}
data: {train: [chats.jsonl]}
head:
  kind: medusa
training:
  steps: 100
  learning_rate: 1e-3
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write my.yaml in the current folder, so that messages start with `my.yaml`."""
    monkeypatch.chdir(tmp_path)

    def write_text(text: str) -> str:
        Path("my.yaml").write_text(text, encoding="utf-8")
        return "my.yaml"

    return write_text


def faults(path: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    return str(caught.value).splitlines()


def test_defaults(write: Any) -> None:
    recipe = load_recipe(write(GOOD))
    assert recipe.model_dump(mode="json") == {
        "verifier": {"model": "builtin:smollm2-135m", "dtype": "bfloat16", "device": "auto", "adapter": None, "bits": None},
        "data": {
            "train": ["chats.jsonl"],
            "holdout": 0.05,
            "rows": None,
            "max_length": 2048,
            "bad_rows": "error",
            "answers": "keep",
            "answer_tokens": 256,
            "answer_batch": 64,
            "packing": False,
            "features": "online",
        },
        "head": {
            "kind": "medusa",
            "heads": 4,
            "blocks": 1,
            "lm_head": "own",
            "decay": 0.8,
            "targets": "hard",
            "loss": "ce",
            "vocabulary": None,
            "start": None,
            "adapter": None,
        },
        "training": {
            "steps": 100,
            "epochs": None,
            "batch_tokens": 8192,
            "strategy": "single",
            "fsdp": {"head": False},
            "deepspeed": {"config": "zero2"},
            "gradient_checkpointing": False,
            "compile": False,
            "accumulation": 1,
            "group_lengths": True,
            "optimizer": "adamw",
            "learning_rate": 0.001,
            "schedule": "cosine",
            "warmup": 0.1,
            "weight_decay": 0.0,
            "betas": [0.9, 0.95],
            "clip": 0.5,
            "seed": 0,
            "log_every": 10,
            "save_every": None,
            "evaluate_every": None,
            "evaluate_prompts": None,
            "evaluate_seconds": None,
        },
        "evaluation": {
            "trees": [{"kind": "chain", "depth": 4}],
            "drafters": [{"kind": "head"}],
            "prompt_files": [],
            "dtype": None,
            "temperatures": [0.0],
            "rule": "candidates",
            "top_k": None,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": 0,
            "max_new_tokens": 128,
            "batch": 1,
            "prompts": None,
            "timing_prompts": 0,
            "timing_repeats": 3,
        },
        "tracking": {"wandb": None},
    }


def test_eagle3_defaults(write: Any) -> None:
    recipe = load_recipe(write(GOOD), ["head={kind: eagle3}"])
    assert recipe.head == Eagle3Section(layers=None, draft_vocabulary=None, depth=7, decay=0.8)


def test_the_schema_knows_the_short_forms() -> None:
    data = schema_json()["$defs"]["DataSection"]["properties"]
    assert {"type": "string"} in data["train"]["items"]["anyOf"]
    assert {"$ref": "#/$defs/SourceSection"} in data["train"]["items"]["anyOf"]
    assert {"enum": ["keep", "regenerate", "complete"], "type": "string"} in data["answers"]["anyOf"]


MIXTURE = """\
- chats.jsonl
- {file: more.csv, weight: 0.5, columns: {prompt: q, response: a}}
- {dataset: openai/gsm8k, subset: main, split: test, revision: abc, streaming: true, weight: 2.0}
"""


def test_a_mixture_and_answers_read_back_equal(write: Any, tmp_path: Path) -> None:
    sources = MIXTURE.replace("- chats.jsonl", "- {file: chats.jsonl, weight: 1.0}")
    answers = "{mode: complete, temperature: 0.7, seed: 3, server: 'http://localhost:8000/v1', concurrency: 4}"
    recipe = load_recipe(write(GOOD), [f"data.train={yaml.safe_load(sources)}", f"data.answers={answers}", "data.rows=100"])
    assert [(s.file or s.dataset, s.weight) for s in recipe.data.train] == [
        ("chats.jsonl", 1.0),
        ("more.csv", 0.5),
        ("openai/gsm8k", 2.0),
    ]
    assert (recipe.data.answers.mode, recipe.data.answers.seed, recipe.data.answers.retries) == ("complete", 3, 6)
    (tmp_path / "again.yaml").write_text(recipe_yaml(recipe))
    assert load_recipe(tmp_path / "again.yaml") == recipe
    short = load_recipe("my.yaml", ["data.answers=regenerate"])
    assert short == load_recipe("my.yaml", ["data.answers={mode: regenerate}"])
    assert short.model_dump()["data"]["answers"] == "regenerate"
    assert hash(recipe) == hash(load_recipe(tmp_path / "again.yaml"))


def test_recipe_is_frozen_all_the_way_down(write: Any) -> None:
    recipe = load_recipe(write(GOOD))
    with pytest.raises(ValidationError):
        recipe.training.seed = 1  # type: ignore[misc]
    assert isinstance(recipe.data.train, tuple)
    assert hash(recipe) == hash(load_recipe("my.yaml"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # text that replaces `  steps: 100`, the sixth line; and what is said of it
        ("  stepz: 100\n  epochs: 1", "my.yaml:6: training.stepz: unknown key; did you mean 'steps'?"),
        ("  steps: 1.5", "my.yaml:6: training.steps: must be a whole number, got 1.5"),
        ("  steps: '100'", "my.yaml:6: training.steps: must be a whole number, got '100'"),
        ("  steps: true", "my.yaml:6: training.steps: must be a whole number, got true"),
        ("  steps: 0100", "my.yaml:6: training.steps: must be a whole number, got '0100'"),
        ("  steps: 0", "my.yaml:6: training.steps: must be at least 1, got 0"),
        (
            "  steps: !!int x",
            "my.yaml:6: training.steps: cannot read the tag 'tag:yaml.org,2002:int': write a plain value",
        ),
        ("  steps: 9\n  steps: 8", "my.yaml:7: training.steps: given twice, first on line 6"),
        ("  epochs: 0.0", "my.yaml:6: training.epochs: must be more than 0.0, got 0.0"),
        ("  seed: 1", "my.yaml:5: training.epochs: give exactly one of steps and epochs"),
        ("  steps: 1\n  epochs: 1", "my.yaml:7: training.epochs: give exactly one of steps and epochs, not both"),
        ("  steps: 1\n  clip: yes", "my.yaml:7: training.clip: must be a number, got 'yes'"),
        ("  steps: 1\n  clip: .inf", "my.yaml:7: training.clip: must be a finite number, got inf"),
        ("  steps: 1\n  clip: null", "my.yaml:7: training.clip: must be a number, got null"),
        ("  steps: 1\n  warmup: 1", "my.yaml:7: training.warmup: must be less than 1.0, got 1"),
        ("  steps: 1\n  betas: [0.9]", "my.yaml:7: training.betas.1: missing"),
        ("  steps: 1\n  betas: [0.9, 1]", "my.yaml:7: training.betas.1: must be less than 1.0, got 1"),
        ("  steps: 1\n  betas:\n    - 2\n    - 0.9", "my.yaml:8: training.betas.0: must be less than 1.0, got 2"),
        ("  steps: 1\n  betas: 0.9", "my.yaml:7: training.betas: must be a list, got 0.9"),
        (
            "  steps: 1\n  schedule: cosin",
            "my.yaml:7: training.schedule: must be one of cosine, constant, got 'cosin'; did you mean 'cosine'?",
        ),
        ("  steps: 1\n  heads: 3", "my.yaml:7: training.heads: unknown key; did you mean 'head.heads'?"),
    ],
)
def test_one_fault(write: Any, line: str, message: str) -> None:
    found = faults(write(GOOD.replace("  steps: 100", line)))
    assert message in found
    assert all(one == message or "cannot read the tag" in message for one in found)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("head:", "head: must be a section of keys, got null"),
        ("head: medusa", "head: must be a section of keys, got 'medusa'"),
        ("head: {heads: 3}", "head.kind: missing; one of medusa, eagle1, eagle3, mtp"),
        ("head: {kind: medsua}", "head.kind: must be one of medusa, eagle1, eagle3, mtp, got 'medsua'; did you mean 'medusa'?"),
        ("head: {kind: medusa, heads: 17}", "head.heads: must be at most 16, got 17"),
        ("head: {kind: medusa, medusa: 1}", "head.medusa: unknown key; the keys here are kind, heads, blocks, "),
        ("head: {kind: medusa, depth: 5}", "head.depth: unknown key; it belongs to kind eagle1, eagle3, mtp"),
        ("head: {kind: eagle3, targets: soft}", "head.targets: unknown key; it belongs to kind medusa"),
        ("head: {kind: eagle3, layers: []}", "head.layers: must have at least 1 item, got []"),
        ("head: {kind: eagle3, layers: [2, -3]}", "head.layers.1: must be at least 0, got -3"),
        ("head: {kind: eagle3, layers: [-3]}", "head.layers.0: must be at least 0, got -3"),
        ("verifier: {}", "verifier.model: missing; hub id, folder, .gguf file or builtin:smollm2-135m"),
        ("verifier: {model: ''}", "verifier.model: must not be empty"),
        (
            "verifier: {model: builtin:smollm2}",
            "verifier.model: there is no builtin:smollm2; did you mean 'builtin:smollm2-135m'?",
        ),
        ("verifier: {model: a/b, device: gpu}", "verifier.device: must be auto, cpu, mps, cuda or cuda:N, got 'gpu'"),
        ("data: {train: chats.jsonl}", "data.train: must be a list, got 'chats.jsonl'"),
        ("data: {train: []}", "data.train: must have at least 1 item, got []"),
        ("data: {train: [builtin:promts]}", "data.train.0: there is no builtin:promts; did you mean 'builtin:prompts'?"),
        ("data: {train: [7]}", "data.train.0: must be a chat file or a section with a file or a dataset, got 7"),
        ("data: {train: [{weight: 2}]}", "data.train.0: must have either a file or a dataset"),
        ("data: {train: [{file: a.jsonl, subset: main}]}", "data.train.0: subset belongs to a dataset, this is a file"),
        ("data: {train: [{file: a.jsonl, wieght: 2}]}", "data.train.0.wieght: unknown key; did you mean 'weight'?"),
        ("data: {train: [{dataset: a/b, weight: 0}]}", "data.train.0.weight: must be more than 0.0, got 0"),
        (
            "data: {train: [{dataset: a/b, columns: {input: q}}]}",
            "data.train.0.columns: must name the column of messages, prompt or instruction",
        ),
        (
            "data: {train: [{dataset: a/b, columns: {promt: q}}]}",
            "data.train.0.columns.promt: unknown key; did you mean 'prompt'?",
        ),
        ("data: {train: [{dataset: a/b, streaming: true}]}", "data: a streaming dataset needs data.rows: how many rows to use"),
        (
            "data: {train: [{dataset: a/b, weight: 2}, c.jsonl]}",
            "data: train.1 needs a weight: a mixture weighs all of its sources or none",
        ),
        (
            "data: {train: [a.jsonl], answers: kept}",
            "data.answers.mode: must be one of keep, regenerate, complete, got 'kept'; did you mean 'keep'?",
        ),
        (
            "data: {train: [a.jsonl], answers: {mode: keep, seed: 1}}",
            "data.answers: seed is of no use where the files' answers are kept",
        ),
        (
            "data: {train: [a.jsonl], answers: {concurrency: 4}}",
            "data.answers: concurrency belongs to a server, and none is named",
        ),
        (
            "data: {train: [a.jsonl], answers: {server: 'host:80'}}",
            "data.answers.server: must be the http address of an OpenAI-compatible server, got 'host:80'",
        ),
        ("data: {train: [a.jsonl], holdout: 1}", "data.holdout: must be a share between 0 and 1, or split, got 1"),
        (
            "data: {train: [a.jsonl], holdout: spilt}",
            "data.holdout: must be a share between 0 and 1, or split, got 'spilt'",
        ),
        ("evaluation: {trees: []}", "evaluation.trees: must have at least 1 item, got []"),
        ("evaluation: {trees: [chain]}", "evaluation.trees.0: must be a section of keys, got 'chain'"),
        ("evaluation: {trees: [{kind: chain}]}", "evaluation.trees.0.depth: missing; tokens drafted a round"),
        (
            "evaluation: {trees: [{kind: static, paths: [[0], [1, 0]]}]}",
            "evaluation.trees.0.paths: path [1, 0] needs its parent [1]",
        ),
        (
            "evaluation: {trees: [{kind: static, paths: [[0], [0]]}]}",
            "evaluation.trees.0.paths: path [0] is listed twice",
        ),
        (
            "evaluation: {trees: [{kind: static, paths: [[]]}]}",
            "evaluation.trees.0.paths: [] is the root, which is always there: remove it",
        ),
        (
            "evaluation: {trees: [{kind: static, paths: [[-1]]}]}",
            "evaluation.trees.0.paths.0.0: must be at least 0, got -1",
        ),
        ("evaluation: {timing_repeats: 2}", "evaluation.timing_repeats: must be at least 3, got 2"),
        ("evaluation: &a {trees: *a}", "evaluation.trees: an alias of the very thing it stands in"),
        ("wandb: {}", "wandb: unknown key; did you mean 'tracking.wandb'?"),
        ("tracking: {wandb: {}}", "tracking.wandb.project: missing; the project's name"),
    ],
)
def test_one_fault_of_a_section(write: Any, section: str, message: str) -> None:
    name = section.partition(":")[0]
    others = {key: value for key, value in yaml.safe_load(GOOD).items() if key != name}
    others["training"]["learning_rate"] = 0.001
    found = faults(write(f"{section}\n{yaml.safe_dump(others)}"))
    assert found[0].startswith(f"my.yaml:1: {message}")
    assert len(found) == 1 or "alias" in message


def test_all_faults_at_once_in_the_order_of_the_file(write: Any) -> None:
    path = write("""\
verifier:
  modl: a/b

head: {kind: eagle3, depth: 0}
training:
  stepz: 100
  learning_rate: fast
lerning_rate: 1
""")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, ["evaluation.batch=0", "training.seed=x"])
    assert str(caught.value).splitlines() == [
        "my.yaml:1: verifier.model: missing; hub id, folder, .gguf file or builtin:smollm2-135m",
        "my.yaml:1: data: missing; a section that lists the training files",
        "my.yaml:2: verifier.modl: unknown key; did you mean 'model'?",
        "my.yaml:4: head.depth: must be at least 1, got 0",
        "my.yaml:5: training.epochs: give exactly one of steps and epochs",
        "my.yaml:6: training.stepz: unknown key; did you mean 'steps'?",
        "my.yaml:7: training.learning_rate: must be a number, got 'fast'",
        "my.yaml:8: lerning_rate: unknown key; the keys here are verifier, data, head, training, evaluation, tracking",
        "override: training.seed: must be a whole number, got 'x'",
        "override: evaluation.batch: must be at least 1, got 0",
    ]
    assert [fault.line for fault in caught.value.faults] == [1, 1, 2, 4, 5, 6, 7, 8, None, None]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "my.yaml: the recipe is empty: start from one that `headstart recipe ls` lists"),
        (b"# nothing\n", "my.yaml: the recipe is empty: start from one that `headstart recipe ls` lists"),
        (b"- verifier\n", "my.yaml:1: a recipe is a mapping of sections, such as `verifier:`"),
        (b"head:\n\tkind: medusa\n", "my.yaml:2: not YAML: found character '\\t' that cannot start any token"),
        (b"head: {kind: medusa\n", "my.yaml:2: not YAML: expected ',' or '}', but got '<stream end>'"),
        (b"head: 1\n---\nhead: 2\n", "my.yaml:2: not YAML: but found another document"),
        (b"head: 1\nx: \x01\n", "my.yaml:2: not YAML: special characters are not allowed"),
        (b"head: *gone\n", "my.yaml:1: not YAML: found undefined alias 'gone'"),
        (b"head: \xff\xfe\n", "my.yaml: cannot read the recipe: not UTF-8 text"),
    ],
)
def test_not_a_recipe_at_all(write: Any, content: bytes, message: str) -> None:
    Path(write("")).write_bytes(content)
    assert faults("my.yaml") == [message]


def test_no_such_file(write: Any) -> None:
    assert faults("gone.yaml") == ["gone.yaml: cannot read the recipe: No such file or directory"]
    assert faults(".") == [".: cannot read the recipe: Is a directory"]


@pytest.mark.parametrize(
    ("written", "value"),
    [("2e-4", 0.0002), ("2.0e-4", 0.0002), ("1E+1", 10.0), (".5", 0.5), ("1", 1.0), ("+1.", 1.0)],
)
def test_numbers_as_people_write_them(write: Any, written: str, value: float) -> None:
    recipe = load_recipe(write(GOOD.replace("1e-3", written)))
    assert recipe.training.learning_rate == value
    assert isinstance(recipe.training.learning_rate, float)


def test_overrides(write: Any) -> None:
    recipe = load_recipe(
        write(GOOD),
        [
            "training.steps=",  # YAML's null
            "training.epochs=2",
            "training.learning_rate=5e-4",
            "training.betas=[0.8, 0.9]",
            "data.train.0=other=1.jsonl",
            "head.heads=3",
            "evaluation.prompts=8",  # the file has no such section
            "evaluation.trees=[{kind: chain, depth: 2}, {kind: dynamic, depth: 3, top_k: 8, nodes: 32}]",
            "evaluation.trees.0.depth=3",
        ],
    )
    assert (recipe.training.steps, recipe.training.epochs, recipe.training.learning_rate) == (None, 2.0, 0.0005)
    assert recipe.training.betas == (0.8, 0.9)
    assert [source.file for source in recipe.data.train] == ["other=1.jsonl"]
    assert recipe.head == MedusaSection(heads=3)
    assert recipe.evaluation.prompts == 8
    assert recipe.evaluation.trees == (ChainSection(depth=3), DynamicSection(depth=3, top_k=8, nodes=32))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stepz=1", "override: training.stepz: unknown key; did you mean 'steps'?"),
        ("training.steps=many", "override: training.steps: must be a whole number, got 'many'"),
        ("training.steps=[", "override: training.steps: '[' is not a YAML value"),
        ("training.steps", "override: 'training.steps' is not of the form key=value, such as training.steps=100"),
        ("training..steps=1", "override: 'training..steps=1' is not of the form key=value, such as training.steps=100"),
        ("=1", "override: '=1' is not of the form key=value, such as training.steps=100"),
        ("training.steps.most=1", "override: training.steps.most: there is no training.steps.most to set"),
        ("data.train.1=a.jsonl", "override: data.train.1: there is no data.train.1 to set"),
        ("trainin.steps=1", "override: trainin: unknown key; did you mean 'training'?"),
        ("training.0=1", "override: training.0: unknown key; the keys here are steps, epochs, "),
        ("head={kind: eagle3, depth: 0}", "override: head.depth: must be at least 1, got 0"),
        ("head={kind: eagle3, kind: medusa}", "override: head.kind: given twice"),
    ],
)
def test_faulty_overrides(write: Any, override: str, message: str) -> None:
    found = faults(write(GOOD), override)
    assert len(found) == 1
    assert found[0].startswith(message)


DYNAMIC = "evaluation.trees=[{kind: chain, depth: 2}, {kind: dynamic, depth: 2, top_k: 2, nodes: 4}]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [DYNAMIC, "evaluation.rule=without_replacement"],
            "evaluation.rule: without_replacement needs trees whose shape is fixed in advance (chain, static); for a dynamic "
            "one use candidates",
        ),
        (
            ["evaluation.rule=typical", "evaluation.repetition_penalty=1.2"],
            "evaluation.repetition_penalty: rule typical cannot take a repetition penalty; use candidates or "
            "without_replacement",
        ),
        (["evaluation.rule=leviathan"], "evaluation.rule: "),
        (["evaluation.temperatures=[-0.5]"], "evaluation.temperatures.0: must be at least 0.0, got -0.5"),
        (["evaluation.temperatures=[]"], "evaluation.temperatures: "),
        (["evaluation.top_p=0"], "evaluation.top_p: must be more than 0.0, got 0"),
        (["evaluation.top_k=0"], "evaluation.top_k: must be at least 1, got 0"),
        (["evaluation.min_p=1.5"], "evaluation.min_p: must be at most 1.0, got 1.5"),
        (["evaluation.repetition_penalty=0"], "evaluation.repetition_penalty: must be at least 0.01, got 0"),
    ],
)
def test_faulty_sampling(write: Any, overrides: list[str], message: str) -> None:
    (found,) = faults(write(GOOD), *overrides)
    assert found.startswith(f"override: {message}")


def test_sampling_is_built_from_the_recipe(write: Any) -> None:
    changes = ["temperatures=[0, 0.7]", "rule=without_replacement", "top_k=40", "top_p=0.9", "min_p=0.05", "seed=5"]
    recipe = load_recipe(write(GOOD), [f"evaluation.{change}" for change in changes])
    assert build_samplings(recipe) == [
        Sampling(t, "without_replacement", top_k=40, top_p=0.9, min_p=0.05, seed=5) for t in (0.0, 0.7)
    ]


def test_another_kind_by_override_tells_which_keys_are_left_over(write: Any) -> None:
    path = write(GOOD.replace("kind: medusa", "kind: medusa\n  heads: 3"))
    assert faults(path, "head.kind=eagle3") == ["my.yaml:5: head.heads: unknown key; it belongs to kind medusa"]


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_load_and_say_their_command(name: str) -> None:
    path = shipped_recipes()[name]
    recipe = load_recipe(path)
    assert recipe.head.kind == path.stem
    assert f"headstart train {name} " in path.read_text(encoding="utf-8")


def test_shipped_names() -> None:
    small = [name for name in shipped_recipes() if name.startswith("smollm2")]
    assert small == [f"smollm2-135m/{kind}" for kind in ("eagle1", "eagle3", "medusa", "mtp")]
    assert {"llama-3.1-8b/eagle3", "qwen3-30b-a3b/medusa"} < set(shipped_recipes())  # tests/test_planning.py has them all


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_round_trip(write: Any, name: str) -> None:
    recipe = load_recipe(shipped_recipes()[name])
    assert load_recipe(write(recipe_yaml(recipe))) == recipe


@pytest.mark.parametrize(
    "model",
    ["no", "1e5", "0100", "1:30", "~", "2024-01-01", "C:\\models\\a: b", "模型/ü", " a", "x" * 300, "a\nb", "#a"],
)
def test_round_trip_of_text_that_looks_like_something_else(write: Any, model: str) -> None:
    data = yaml.safe_load(GOOD) | {"verifier": {"model": model}}
    data["training"]["learning_rate"] = 1e-05
    recipe = Recipe.model_validate(data)
    text = recipe_yaml(recipe)
    assert load_recipe(write(text)) == recipe
    assert yaml.safe_load(text)["verifier"]["model"] == model  # other readers of YAML agree


def test_resolved_recipe_is_readable() -> None:
    text = recipe_yaml(load_recipe(shipped_recipes()["smollm2-135m/eagle3"], ["head.layers=[2, 15, 27]"]))
    assert text.startswith(
        "verifier:\n  model: builtin:smollm2-135m\n  dtype: auto\n  device: auto\n  adapter: null\n  bits: null\ndata:\n"
    )
    assert "\n  layers: [2, 15, 27]\n" in text
    assert "\n  trees:\n  - kind: chain\n    depth: 4\n  - kind: dynamic\n    depth: 5\n" in text


def test_find_recipe(write: Any) -> None:
    assert find_recipe("smollm2-135m/medusa") == shipped_recipes()["smollm2-135m/medusa"]
    assert find_recipe(write(GOOD)) == Path("my.yaml")
    with pytest.raises(UserError, match=r"^smolm2/medusa: no such file .* did you mean 'smollm2-135m/medusa'\?$"):
        find_recipe("smolm2/medusa")
    with pytest.raises(UserError, match=r"^zzz: no such file .*; `headstart recipe ls` lists the shipped ones$"):
        find_recipe("zzz")


def test_eagle1_and_mtp_defaults(write: Any) -> None:
    eagle1 = load_recipe(write(GOOD), ["head={kind: eagle1}"]).head
    assert eagle1.model_dump() == {
        "kind": "eagle1", "vocabulary": None, "depth": 1, "decay": 1.0, "cross_entropy": 0.1, "top_tokens": 0, "noise": 0.1,
        "noise_by_length": False, "start": None,
    }  # fmt: skip
    mtp = load_recipe(write(GOOD), ["head={kind: mtp}"]).head
    assert mtp.model_dump() == {
        "kind": "mtp", "form": "recursive", "vocabulary": None, "depth": 3, "decay": None, "weight": 1.0,
        "start": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("{kind: medusa, loss: tv}", "head.loss: tv compares distributions: it needs targets: soft"),
        ("{kind: eagle3, loss: js}", "head.loss: must be one of ce, kl, tv, lk, got 'js'"),
        ("{kind: mtp, form: serial}", "head.form: must be one of parallel, sequential, recursive, got 'serial'"),
        ("{kind: mtp, form: sequential}", "evaluation: a chain tree of depth 4 needs as many modules; this head has 3"),
        ("{kind: mtp, form: parallel, depth: 2}", "evaluation: a chain tree of depth 4 needs as many modules; this head has 2"),
        ("{kind: mtp, vocabulary: 2, depth: 5, form: parallel}", "evaluation: a dynamic tree with 3 children"),
        ("{kind: eagle1, vocabulary: 8, top_tokens: 10}", "head.top_tokens: must be at most vocabulary (8), got 10"),
    ],
)
def test_faults_of_heads(write: Any, head: str, message: str) -> None:
    trees = "evaluation.trees=[{kind: chain, depth: 4}, {kind: dynamic, depth: 5, top_k: 3, nodes: 9}]"
    found = faults(write(GOOD), f"head={head}", trees)
    assert len(found) == 1
    assert message in found[0]


def test_a_recursive_head_drafts_deeper_than_it_was_trained(write: Any) -> None:
    for head in ("{kind: mtp, depth: 2}", "{kind: eagle1}"):
        recipe = load_recipe(write(GOOD), [f"head={head}", "evaluation.trees=[{kind: chain, depth: 9}]"])
        assert recipe.evaluation.trees[0].depth == 9


def test_every_field_of_the_schema_is_described() -> None:
    definitions = schema_json()["$defs"]
    assert {"VerifierSection", "MedusaSection", "Eagle3Section", "TrainingSection", "StaticSection"} <= set(definitions)
    for name, definition in definitions.items():
        assert definition["additionalProperties"] is False
        for field, facts in definition["properties"].items():
            assert field == "kind" or facts["description"], f"{name}.{field}"


def test_schema_imports_neither_torch_nor_much_time() -> None:
    code = (
        "import time, sys; import headstart.training.recipe; "
        "print(time.process_time(), sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(6)]
    assert {run.stdout.split(maxsplit=1)[1].strip() for run in runs} == {"[]"}
    assert min(float(run.stdout.split()[0]) for run in runs) < 0.5
