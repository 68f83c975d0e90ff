"""Strategies from recipes: what the number of processes and the files of others allow."""

import json
from pathlib import Path

import pytest

from headstart.build_strategy import build_strategy, check_processes, deepspeed_config, shards_verifier
from headstart.errors import UserError
from headstart.runs import differences
from headstart.training.recipe import Recipe, shipped_recipes
from headstart.training.sections.training import TrainingSection


def section(**fields: object) -> TrainingSection:
    return TrainingSection.model_validate({"steps": 1, "learning_rate": 1e-3} | fields)


def recipe(device: str = "auto", **training: object) -> Recipe:
    return Recipe.model_validate(
        {"verifier": {"model": "a/b", "device": device}, "data": {"train": ["c.jsonl"]}, "head": {"kind": "medusa"},
         "training": {"steps": 1, "learning_rate": 1e-3} | training}
    )  # fmt: skip


def processes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(count)}.items():
        monkeypatch.setenv(name, value)


def test_case_59_without_local_rank_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A WORLD_SIZE that a scheduler left behind counts for nothing."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    check_processes(recipe())
    for strategy in ("single", "ddp", "fsdp"):
        assert type(build_strategy(section(strategy=strategy, fsdp={"head": True}))).__name__ == "Plain"
        assert not shards_verifier(section(strategy=strategy))


@pytest.mark.parametrize(
    ("fields", "built", "shards"),
    [
        ({"strategy": "ddp"}, "Plain", False),
        ({"strategy": "fsdp"}, "Plain", True),
        ({"strategy": "fsdp", "fsdp": {"head": True}}, "ShardedHead", True),
        ({"strategy": "deepspeed"}, "Zero", False),
        ({"strategy": "deepspeed", "deepspeed": {"config": "zero3"}}, "Zero", True),
    ],
)
def test_strategies(fields: dict, built: str, shards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    processes(monkeypatch, 2)
    check_processes(recipe(**fields))
    assert type(build_strategy(section(**fields))).__name__ == built
    assert shards_verifier(section(**fields)) is shards


def test_one_device_for_many_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    processes(monkeypatch, 2)
    with pytest.raises(UserError, match=r"verifier.device: cuda:1 is one device for 2 processes; use cuda or auto"):
        check_processes(recipe(device="cuda:1", strategy="ddp"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shipped_configurations_have_their_stage(stage: int) -> None:
    config = deepspeed_config(section(deepspeed={"config": f"zero{stage}"}))
    assert config["zero_optimization"]["stage"] == stage
    assert f"deepspeed/zero{stage}" not in shipped_recipes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "my.json: No such file or directory; zero1, zero2 and zero3 are shipped"),
        ("{", "is no JSON object with zero_optimization.stage"),
        ("[]", "is no JSON object with zero_optimization.stage"),
        ("{}", "is no JSON object with zero_optimization.stage"),
        (json.dumps({"zero_optimization": {"stage": 0}}), "zero_optimization.stage is 0, not 1, 2 or 3"),
        (json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}), "sets bf16, which the recipe decides"),
    ],
)
def test_bad_configurations_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        deepspeed_config(section(deepspeed={"config": str(path)}))
    assert str(caught.value).startswith("training.deepspeed.config: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("fields", [{"strategy": "deepspeed"}, {"strategy": "fsdp", "fsdp": {"head": True}}])
def test_muon_needs_whole_matrices(fields: dict) -> None:
    with pytest.raises(ValueError, match="muon needs whole matrices"):
        section(optimizer="muon", **fields)
    assert section(optimizer="muon", strategy="fsdp").optimizer == "muon"


def test_a_run_may_go_on_under_another_strategy_but_not_another_rate() -> None:
    one = recipe().model_dump()
    other = recipe(strategy="fsdp", fsdp={"head": True}, accumulation=4, compile=True, save_every=3).model_dump()
    assert differences(one, other) == []
    assert differences(one, recipe(learning_rate=2e-3).model_dump()) == ["training.learning_rate: 0.001 there, 0.002 here"]
    assert differences(one, recipe(batch_tokens=5).model_dump()) == ["training.batch_tokens: 8192 there, 5 here"]
