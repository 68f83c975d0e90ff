"""Checkpoints: all or nothing, the newest only, and everything a run needs to go on."""

import json

import pytest
import torch
from torch.optim import AdamW

from headstart.errors import UserError
from headstart.training import checkpoint
from headstart.training.checkpoint import Checkpoints, Progress
from headstart.training.strategies.plain import Plain


def make(head, steps=0):
    """The head with two optimizers that have done some steps."""
    strategy = Plain()
    strategy.start(head, lambda: optimizers_of(head))
    optimizers = strategy.optimizers
    for i in range(steps):
        for parameter in head.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * (i + 1))
        for optimizer in optimizers:
            optimizer.step()
    return strategy


def optimizers_of(head):
    first, *rest = head.parameters()
    return [AdamW([first], lr=1e-2), AdamW(rest, lr=2e-2)]


def load(folder, head):
    """Where the run stands, and the strategy that went on with its checkpoint."""
    strategy = Plain()
    return Checkpoints(folder).load(head, strategy, lambda: optimizers_of(head)), strategy


def flat(state):
    """Every tensor and number of a nested state, by its place."""
    if isinstance(state, dict):
        return {(key, *rest): value for key, part in state.items() for rest, value in flat(part).items()}
    if isinstance(state, list | tuple):
        return flat(dict(enumerate(state)))
    return {(): state.tolist() if isinstance(state, torch.Tensor) else state}


@pytest.fixture(params=["medusa", "eagle3"])
def new_head(request, tiny):
    verifier = tiny("llama")
    build = request.getfixturevalue(f"tiny_{request.param}")
    return lambda **fields: build(verifier, **fields)


def test_what_is_loaded_is_what_was_saved(new_head, tmp_path):
    head = new_head()
    strategy = make(head, steps=3)
    Checkpoints(tmp_path / "checkpoints").save(strategy, Progress(3, 1.75, 12.5))

    other = new_head(seed=99)
    progress, own = load(tmp_path / "checkpoints", other)
    assert progress == Progress(3, 1.75, 12.5)
    assert all(other.state_dict()[name].equal(tensor) for name, tensor in head.state_dict().items())
    assert [flat(o.state_dict()) for o in own.optimizers] == [flat(o.state_dict()) for o in strategy.optimizers]


def test_case_13_the_draft_vocabulary_comes_from_the_checkpoint(new_head, tmp_path):
    """A head built from other data has other columns; on resume the rows keep their meaning."""
    first, second = torch.arange(0, 40, 2), torch.arange(1, 40, 2)
    head = new_head(target_ids=first)
    Checkpoints(tmp_path).save(make(head), Progress(2))
    other = new_head(target_ids=second)
    load(tmp_path, other)
    assert other.target_ids.equal(first)


def test_no_checkpoint_is_a_start(new_head, tmp_path):
    head = new_head()
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    assert load(tmp_path / "gone", head)[0] == Progress(0, 0.0, 0.0)
    assert all(head.state_dict()[name].equal(tensor) for name, tensor in before.items())
    assert not (tmp_path / "gone").exists()


def test_only_the_newest_is_kept_by_number(new_head, tmp_path):
    head = new_head()
    checkpoints = Checkpoints(tmp_path)
    for step in (9, 10, 100):
        checkpoints.save(make(head), Progress(step))
        assert checkpoints.steps() == [step]
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step}"]
    assert load(tmp_path, head)[0].step == 100


def test_the_same_step_may_be_saved_again(new_head, tmp_path):
    head = new_head()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make(head), Progress(5, 1.0))
    checkpoints.save(make(head), Progress(5, 2.0))
    assert load(tmp_path, head)[0].best_tau == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5"]


@pytest.mark.parametrize("what", ["save_file", "torch.save"])
def test_a_failed_save_leaves_the_old_checkpoint(what, new_head, tmp_path, monkeypatch):
    head = new_head()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make(head), Progress(5, 1.5))

    def full(*arguments, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr(*((checkpoint, "save_file") if what == "save_file" else (torch, "save")), full)
    with pytest.raises(UserError, match="no space left"):
        checkpoints.save(make(head), Progress(10, 2.0))
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5"]
    assert load(tmp_path, head)[0] == Progress(5, 1.5)


def test_what_a_killed_save_leaves_is_not_a_checkpoint(new_head, tmp_path):
    head = new_head()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make(head), Progress(5, 1.5))
    (tmp_path / ".step-10-x7f2").mkdir()
    (tmp_path / ".step-10-x7f2" / "head.safetensors").write_bytes(b"half")
    assert load(tmp_path, head)[0].step == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5"]  # nor does it fill the disk


def test_a_checkpoint_killed_while_it_was_being_replaced_comes_back(new_head, tmp_path):
    """The old folder was moved aside, the new one not yet in its place."""
    head = new_head()
    Checkpoints(tmp_path).save(make(head), Progress(5, 1.5))
    (tmp_path / "step-5").rename(tmp_path / ".step-5-x7f2-old")
    (tmp_path / ".step-5-x7f2").mkdir()
    assert load(tmp_path, head)[0] == Progress(5, 1.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5"]


def test_each_parameter_counts_its_own_steps(new_head, tmp_path):
    """A checkpoint may hold one count for all; steps taken from it add up once."""
    head = new_head()
    strategy = make(head, steps=2)
    count = torch.tensor(2.0)
    strategy.moments = lambda: {name: state | {"step": count} for name, state in Plain.moments(strategy).items()}
    Checkpoints(tmp_path).save(strategy, Progress(2))
    _, own = load(tmp_path, head)
    for parameter in head.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in own.optimizers:
        optimizer.step()
    assert {state["step"].item() for optimizer in own.optimizers for state in optimizer.state.values()} == {3.0}


def test_progress_is_readable(new_head, tmp_path):
    head = new_head()
    Checkpoints(tmp_path).save(make(head), Progress(4, 1.25, 3.0, 4))
    found = json.loads((tmp_path / "step-4" / "progress.json").read_text())
    assert found == {"step": 4, "best_tau": 1.25, "seconds": 3.0, "judged": 4, "best_by_prompt": []}
