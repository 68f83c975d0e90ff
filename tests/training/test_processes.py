"""Training on several processes: the same numbers as on one, resume after any end, and no end without a word."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_run import STEPS, Processes, lines, weights, write_chats, write_recipe, write_verifier

TOLERANCE = 1e-5
STRATEGIES = {
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "fsdp with its head, accumulating": (2, {"strategy": "fsdp", "fsdp": {"head": True}, "accumulation": 2}),
    "zero1, accumulating": (2, {"strategy": "deepspeed", "deepspeed": {"config": "zero1"}, "accumulation": 2}),
    "zero2": (2, {"strategy": "deepspeed", "deepspeed": {"config": "zero2"}}),
    "zero3": (2, {"strategy": "deepspeed", "deepspeed": {"config": "zero3"}}),
    "accumulating": (0, {"accumulation": 3}),
}
SLOW = ("fsdp", "zero1, accumulating")  # the others tell as much
SAVED = {"save_every": 4}

Start = Callable[..., Processes]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a verifier and chats."""
    folder = tmp_path_factory.mktemp("processes")
    write_verifier(folder / "verifier")
    write_chats(folder / "chats.jsonl")
    with pytest.MonkeyPatch.context() as patch:  # before the first process is forked
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        yield folder


@pytest.fixture(scope="module")
def start(place: Path) -> Start:
    """`start(name, processes, training section, **environment)`: train into place/name."""

    def begin(name: str, processes: int, training: dict, **environment: str) -> Processes:
        recipe = write_recipe(place / f"{name}.yaml", place / "verifier", place / "chats.jsonl", **training)
        return Processes(processes, ["train", recipe, "--run-folder", place / name], place / name, **environment)

    return begin


@pytest.fixture(scope="module")
def single(start: Start, place: Path) -> Path:
    """The run folder of one process that was never stopped."""
    run = start("single", 0, SAVED)
    assert run.wait() == [0], run.told()
    return place / "single"


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def close(one: Path, other: Path) -> None:
    """The same losses, held-out results and weights within the tolerance."""
    mine, its = lines(one), lines(other)
    assert list(mine) == list(its) == list(range(1, STEPS + 1))
    assert max(abs(mine[step] - its[step]) for step in mine) < TOLERANCE
    for step, look in lines(one, "held_out").items():
        its_look = lines(other, "held_out")[step]
        near = {name: pytest.approx(look[name], abs=TOLERANCE) for name in ("alpha", "kl")}  # of weights within the tolerance
        assert its_look == look | near
    assert lines(one, "supervised_tokens") == lines(other, "supervised_tokens")
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=TOLERANCE, rtol=0)


def equal(one: Path, other: Path) -> None:
    """Bit for bit."""
    assert lines(one) == lines(other)
    assert lines(one, "held_out") == lines(other, "held_out")
    left, right = weights(one), weights(other)
    assert all(left[name].equal(right[name]) for name in left)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in STRATEGIES])
def test_case_14_every_strategy_has_the_numbers_of_one_process(name: str, single: Path, start: Start, place: Path) -> None:
    processes, training = STRATEGIES[name]
    run = start(name, processes, training)
    assert run.wait() == [0] * max(1, processes), run.told()
    close(single, place / name)
    first, *others = run.told()
    assert f"{STEPS}/{STEPS}" in first
    assert not any("samples" in told or "training" in told for told in others)  # the first process alone speaks
    start_weights = weights(single)["fc.weight"]
    assert start_weights.abs().max() > 0.01
    assert max(lines(single).values()) - min(lines(single).values()) > 100 * TOLERANCE  # else all would be close


@pytest.mark.slow  # ranks have the same code for every head; here the trained part of the verifier is among the weights
def test_medusa_2_has_the_numbers_of_one_process(start: Start, place: Path) -> None:
    """Dropout is left out: every rank draws its own."""
    adapter = {"rank": 4, "dropout": 0.0, "heads_only": 0.3, "own": "ce", "rate": 1.0}
    head = {"kind": "medusa", "heads": 3, "lm_head": "shared", "adapter": adapter}
    for name, processes, training in (("medusa-2", 0, {}), ("medusa-2 on two", 2, {"strategy": "ddp", "accumulation": 2})):
        run = start(name, processes, training | {"head": head})
        assert run.wait() == [0] * max(1, processes), run.told()
    close(place / "medusa-2", place / "medusa-2 on two")
    moved = {name: tensor for name, tensor in weights(place / "medusa-2").items() if "lora_B" in name}
    assert len(moved) == 7 * 4
    assert min(tensor.abs().max() for tensor in moved.values()) > 100 * TOLERANCE


def test_checkpoints_are_plain_whatever_the_strategy(single: Path, place: Path) -> None:
    """Case 44: whole tensors under the head's own names, and moments of the trained ones alone."""
    plain = torch.load(single / "checkpoints" / f"step-{STEPS}" / "optimizers.pt", weights_only=True)
    assert plain.keys() == weights(single).keys() - {"target_ids", "input_scale"}
    for name in STRATEGIES:
        if (place / name).exists():
            moments = torch.load(place / name / "checkpoints" / f"step-{STEPS}" / "optimizers.pt", weights_only=True)
            assert moments.keys() == plain.keys()
            for parameter, state in plain.items():
                assert moments[parameter]["step"] == state["step"] == STEPS
                for key in ("exp_avg", "exp_avg_sq"):
                    assert moments[parameter][key].dtype == torch.float32
                    torch.testing.assert_close(moments[parameter][key], state[key], atol=TOLERANCE, rtol=1e-3)


def test_a_killed_run_goes_on_bit_for_bit_and_so_does_one_killed_while_saving(single: Path, start: Start, place: Path) -> None:
    name, training = "killed", SAVED
    folder = place / name / "checkpoints"
    assert start(name, 0, training, PATCHES="dies_at_second_save").wait() == [-signal.SIGKILL]
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-4"]
    assert list(folder.glob(".step-8-*"))  # whole, but not yet in its place
    run = start(name, 0, training, PATCHES="slow_steps")
    until(lambda: (folder / "step-12").exists())
    time.sleep(0.4)
    run.kill(signal.SIGKILL)
    assert run.wait() == [-signal.SIGKILL]
    run = start(name, 0, training)
    assert run.wait() == [0], run.told()
    equal(single, place / name)
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{STEPS}"]


@pytest.mark.parametrize("chain", [
    [(2, {"strategy": "fsdp", "fsdp": {"head": True}}), (2, {"strategy": "deepspeed", "deepspeed": {"config": "zero3"}})],
    pytest.param(
        [(2, {"strategy": "deepspeed", "deepspeed": {"config": "zero1"}}), (3, {"strategy": "ddp"})], marks=pytest.mark.slow),
])  # fmt: skip
def test_sigterm_saves_and_another_strategy_goes_on(chain: list, single: Path, start: Start, place: Path) -> None:
    """Of three legs the last is one process; each but it is asked to stop after some steps."""
    name = f"relay-{chain[1][0]}"
    for processes, training in chain:
        seen = set((place / name / "checkpoints").glob("step-*"))
        run = start(name, processes, training | SAVED, PATCHES="slow_steps")
        until(lambda seen=seen: bool(set((place / name / "checkpoints").glob("step-*")) - seen))
        time.sleep(0.5)
        begun = time.monotonic()
        run.kill(signal.SIGTERM)
        assert run.wait(30) == [0] * processes, run.told()
        assert time.monotonic() - begun < 30
        assert "the same command goes on" in run.told()[0]
    saved = [int(path.name.removeprefix("step-")) for path in (place / name / "checkpoints").iterdir()]
    assert len(saved) == 1
    assert saved[0] < STEPS
    run = start(name, 0, SAVED)
    assert run.wait() == [0], run.told()
    close(single, place / name)


def test_a_rank_that_raises_ends_all_and_has_the_last_word(single: Path, start: Start) -> None:
    begun = time.monotonic()
    run = start("failing", 2, {"strategy": "ddp"}, PATCHES="second_rank_fails")
    until(lambda: not all(process.is_alive() for process in run.all))
    begun = time.monotonic()
    codes = run.wait(30)
    assert time.monotonic() - begun < 30
    assert codes[1] == 2
    assert codes[0] == 1
    first, second = run.told()
    assert second.splitlines()[-1] == "error: the second rank has had enough"
    assert "Traceback" not in first + second


def test_strategies_that_do_not_fit_the_processes_are_refused(start: Start) -> None:
    run = start("alone", 2, {})
    assert sorted(run.wait()) == [1, 2]
    assert sum("error: " in told for told in run.told()) == 1
    assert any("training.strategy: single is one process, torchrun started 2; set ddp" in told for told in run.told())
    run = start("no torchrun", 0, {"strategy": "deepspeed"})
    assert run.wait() == [2]
    assert "training.strategy: deepspeed runs under torchrun" in run.told()[0]


def test_a_slow_first_rank_is_waited_for(single: Path, start: Start, place: Path) -> None:
    """While it judges the others wait where no timeout of a collective runs, and lend it their shards."""
    run = start("patient", 2, {"strategy": "fsdp", "evaluate_every": STEPS}, PATCHES="slow_judge")
    assert run.wait() == [0, 0], run.told()
    assert lines(place / "patient", "held_out")[STEPS] == lines(single, "held_out")[STEPS]


def torchrun(recipe: Path, folder: Path, *options: str) -> list[str]:
    """The command line that people type, on two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    return [*launcher, "-m", "headstart", "train", str(recipe), "--run-folder", str(folder)]


def with_package() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2].parent)}


@pytest.mark.parametrize("name", ["fsdp", "zero3"])
def test_case_14_torchrun_itself_has_the_numbers_of_one_process(name: str, single: Path, place: Path) -> None:
    folder = place / f"torchrun-{name}"
    recipe = write_recipe(folder.with_suffix(".yaml"), place / "verifier", place / "chats.jsonl", **STRATEGIES[name][1])
    done = subprocess.run(torchrun(recipe, folder), env=with_package(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    close(single, folder)


def test_torchrun_restarts_a_run_whose_rank_was_killed(start: Start, place: Path) -> None:
    """The real thing: two ranks, one of them killed; torchrun starts both again, and the run ends as if nothing had been."""
    steps = 400  # so many that the kill comes in the middle
    training = {"strategy": "ddp", "steps": steps, "evaluate_every": steps, "save_every": 1}
    straight = start("straight", 2, training)
    assert straight.wait() == [0, 0]
    folder = place / "restarted"
    recipe = write_recipe(place / "restarted.yaml", place / "verifier", place / "chats.jsonl", **training)
    with (place / "restarted.txt").open("w") as told:
        agent = subprocess.Popen(torchrun(recipe, folder, "--max-restarts", "1"), env=with_package(), stderr=told)
    try:
        until(lambda: any((folder / "checkpoints").glob("step-*")))
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert agent.wait(200) == 0, (place / "restarted.txt").read_text()
    finally:
        agent.kill()
    assert "exitcode: -9" in (place / "restarted.txt").read_text()
    assert lines(place / "straight") == lines(folder)
    left, right = weights(place / "straight", steps), weights(folder, steps)
    assert all(left[name].equal(right[name]) for name in left)


def test_torchrun_shows_the_message_of_the_rank_that_failed(place: Path) -> None:
    recipe = write_recipe(place / "torchrun.yaml", place / "verifier", place / "chats.jsonl", strategy="single")
    line = torchrun(recipe, place / "torchrun")
    done = subprocess.run(line, env=with_package(), capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stderr.count("error: training.strategy: single is one process") == 1
    assert "UserError: training.strategy: single is one process, torchrun started 2" in done.stderr.strip().splitlines()[-3]
