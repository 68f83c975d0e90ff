"""Weights & Biases: offline without a key, one run over resumes, never the end of a run."""

import json
import sys
import types
from pathlib import Path

import pytest
from tiny_run import STEPS, Processes, lines, write_chats, write_recipe, write_verifier

from headstart.training.tracking import Metrics
from headstart.training.wandb_log import AXIS, flat, wandb_report


class Broken(types.ModuleType):
    """A wandb whose every part may raise."""

    def __init__(self, fails: str) -> None:
        super().__init__("wandb")
        self.fails, self.calls, self.Settings = fails, [], dict

    def do(self, name: str, *arguments: object, **options: object) -> "Broken":
        self.calls.append((name, arguments, options))
        if name == self.fails:
            raise RuntimeError(f"{name} is down\nand more")
        return self

    def init(self, **options: object) -> "Broken":
        return self.do("init", **options)

    def define_metric(self, *arguments: object, **options: object) -> None:
        self.do("define_metric", *arguments, **options)

    def log(self, values: dict) -> None:
        self.do("log", values)

    def finish(self, **options: object) -> None:
        self.do("finish", **options)

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def track(folder: Path, steps: range, resumed: int = 0) -> None:
    with wandb_report({"project": "tests"}, folder, {"seed": 1}) as report:
        metrics = Metrics(folder / "metrics.jsonl", resumed, report)
        for step in steps:
            metrics.log(step, loss=1.0 / step, loss_by_depth=[1.0, 2.0], held_out={"tau": 1.5, "none": None})


@pytest.mark.parametrize("fails", ["init", "define_metric", "log", "finish"])
def test_case_43_whatever_raises_in_wandb_the_run_goes_on(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    wandb = Broken(fails)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    track(tmp_path, range(1, 6))
    assert list(lines(tmp_path)) == [1, 2, 3, 4, 5]
    assert wandb.names().count(fails) == 1  # and is not asked again
    assert capsys.readouterr().err.count(f"wandb: {fails} is down; the run goes on without it") == 1


def test_case_42_a_resumed_run_is_the_same_run_on_its_own_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps replayed after a kill are told again; wandb's own step, which must only rise, is not used."""
    wandb = Broken("nothing")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "online")
    track(tmp_path, range(1, 6))
    track(tmp_path, range(4, 9), resumed=3)
    inits = [options for name, _, options in wandb.calls if name == "init"]
    assert [(options["resume"], options["mode"]) for options in inits] == [("allow", "online")] * 2
    assert inits[0]["id"] == inits[1]["id"] == json.loads((tmp_path / "wandb.json").read_text())["id"]
    logged = [arguments[0] for name, arguments, _ in wandb.calls if name == "log"]
    assert [values[AXIS] for values in logged] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert logged[0] == {AXIS: 1, "loss": 1.0, "loss_by_depth/0": 1.0, "loss_by_depth/1": 2.0, "held_out/tau": 1.5}
    assert ("define_metric", ("*",), {"step_metric": AXIS}) in wandb.calls
    assert list(lines(tmp_path)) == list(range(1, 9))


def test_finish_says_how_the_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Broken("nothing")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    track(tmp_path, range(1, 2))
    with pytest.raises(KeyError), wandb_report({"project": "tests"}, tmp_path, {}):
        raise KeyError
    assert [options["exit_code"] for name, _, options in wandb.calls if name == "finish"] == [0, 1]


@pytest.mark.parametrize(
    ("environment", "mode"),
    [({}, "offline"), ({"WANDB_API_KEY": "x" * 40}, "offline"), ({"WANDB_MODE": "disabled"}, "disabled")],
)
def test_case_43_without_key_or_network_it_is_offline(
    environment: dict[str, str], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Broken("nothing")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody answers there
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    track(tmp_path, range(1, 2))
    (options,) = [options for name, _, options in wandb.calls if name == "init"]
    assert (options["mode"], options["resume"]) == (mode, None)


def test_numbers_alone_are_told() -> None:
    values = {"a": 1, "b": [1.5, {"c": 2}], "text": "no", "none": None, "by_prompt": [[11, 4], [11, 6]]}
    assert flat(values) == {"a": 1, "b/0": 1.5, "b/1/c": 2}


def test_case_43_a_real_run_offline_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real wandb: one run, of the first rank, its id kept over a resume, all points in metrics.jsonl."""
    for name in ("WANDB_API_KEY", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    recipe = write_recipe(
        tmp_path / "recipe.yaml", write_verifier(tmp_path / "verifier"), write_chats(tmp_path / "chats.jsonl"), strategy="ddp"
    )
    recipe.write_text(recipe.read_text() + "tracking: {wandb: {project: tests}}\n")
    place = tmp_path / "run"
    own = {"NETRC": str(tmp_path / "none"), "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_CACHE_DIR": str(tmp_path)}
    run = Processes(2, ["train", recipe, "--run-folder", place], tmp_path / "out", **own)
    assert run.wait() == [0, 0], run.told()
    assert list(lines(place)) == list(range(1, STEPS + 1))
    assert len(list((place / "wandb").glob("offline-run-*"))) == 1
    assert json.loads((place / "wandb.json").read_text())["id"] in next((place / "wandb").glob("offline-run-*")).name
    assert "wandb: no key or no network; offline" in run.told()[0]
    assert "wandb" not in run.told()[1]
