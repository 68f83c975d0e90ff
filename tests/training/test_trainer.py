"""The training loop on tiny models: it learns, resumes exactly, keeps the best head and counts optimizer steps."""

import dataclasses
import json
import math
import os
import random
import signal
import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from headstart.data.chat import Sample
from headstart.data.features import FeatureSource, MemoryFeatures
from headstart.errors import UserError
from headstart.heads.hub import load_head
from headstart.heads.losses import HeadLoss
from headstart.training import trainer
from headstart.training.strategies.plain import Plain
from headstart.training.trainer import Settings, due, fit, make_optimizers, rate, step
from headstart.training.window import Window

SETTINGS = Settings(
    optimizer="adamw", learning_rate=1e-3, warmup=0.1, schedule="cosine", weight_decay=0.01, betas=(0.9, 0.95), clip=0.5,
    accumulation=1, seed=0, log_every=3, save_every=7, evaluate_every=5,
)  # fmt: skip
PLAN = [[(3 * i + j) % 8 for j in range(3)] for i in range(20)]


class Killed(BaseException):
    """Stands for the signal."""


class Source(FeatureSource):
    """Real features; looks at the models at every step, and dies when told to."""

    def __init__(self, verifier, samples, layers):
        self.features = MemoryFeatures(verifier, samples, layers, 1000)
        self.verifier, self.head, self.loads, self.dies_at = verifier, None, [], None

    def load(self, indices):
        if len(self.loads) == self.dies_at:
            raise Killed
        self.loads.append(list(indices))
        if self.head is not None:
            assert self.head.training
            assert not any(module.training for module in self.verifier.model.modules())
        return self.features.load(indices)


@pytest.fixture
def verifier(tiny):
    return tiny("llama")


@pytest.fixture(params=["medusa", "eagle3"])
def new_head(request, verifier):
    build = request.getfixturevalue(f"tiny_{request.param}")
    return lambda **fields: build(verifier, **fields)


@pytest.fixture
def new_source(verifier):
    rng = random.Random(0)
    samples = []
    for _ in range(8):
        length = rng.randrange(8, 16)
        samples.append(Sample([rng.randrange(96) for _ in range(length)], [i >= 3 for i in range(length)]))
    return lambda head, rows=samples: Source(verifier, rows, head.needs)


def constant(head):
    return {"tau": 1.5}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(head):
    return {name: tensor.clone() for name, tensor in head.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_the_loss_goes_down(new_head, new_source, verifier, tmp_path):
    head = new_head()
    settings = dataclasses.replace(SETTINGS, learning_rate=2e-2, log_every=1, evaluate_every=None, save_every=None)
    progress = fit(head, verifier, new_source(head), [list(range(8))] * 40, settings, tmp_path, constant)
    losses = [line["loss"] for line in lines(tmp_path) if "loss" in line]
    assert len(losses) == 40
    assert losses[-1] < 0.5 * losses[0]
    assert (progress.step, progress.best_tau) == (40, 1.5)
    assert progress.seconds > 0


def test_the_lines_of_metrics(new_head, new_source, verifier, tmp_path):
    head = new_head()
    fit(head, verifier, new_source(head), PLAN, SETTINGS, tmp_path, constant)
    logged = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["step"] for line in logged] == [3, 6, 9, 12, 15, 18, 20]
    depths = head.config.heads if head.kind == "medusa" else head.config.depth
    for line in logged:
        assert len(line["loss_by_depth"]) == len(line["accuracy_by_depth"]) == depths
        weighted = sum(0.8**k * loss for k, loss in enumerate(line["loss_by_depth"]))
        assert line["loss"] == pytest.approx(weighted, rel=1e-5)
        assert line["supervised_tokens"] > 0
        assert line["tokens_per_second"] > 0
        assert line["grad_norm"] > 0
    held_out = [line for line in lines(tmp_path) if "held_out" in line]
    assert held_out == [{"step": at, "held_out": {"tau": 1.5}} for at in (5, 10, 15, 20)]


@pytest.mark.parametrize("killed_by", ["source", "evaluation", "evaluation before any checkpoint", "twice"])
def test_a_resumed_run_ends_with_the_same_weights(killed_by, new_head, new_source, verifier, tmp_path):
    straight = new_head()
    fit(straight, verifier, new_source(straight), PLAN, SETTINGS, tmp_path / "straight", constant)

    def dies_at(number):
        calls = []

        def evaluate(head):
            calls.append(head)
            if len(calls) == number:
                raise Killed
            return {"tau": 1.5}

        return evaluate

    # (steps before the source dies, evaluation that dies), one a start; checkpoints are at 7, 14 and 20
    starts = {
        "source": [(11, None)],
        "evaluation": [(None, 2)],
        "evaluation before any checkpoint": [(None, 1)],
        "twice": [(8, None), (4, None), (None, 2)],
    }[killed_by]
    folder = tmp_path / "resumed"
    for loads, evaluations in starts:
        head = new_head()
        source = new_source(head)
        source.dies_at = loads
        with pytest.raises(Killed):
            fit(head, verifier, source, PLAN, SETTINGS, folder, dies_at(evaluations))
    # the checkpoint overwrites whatever the head starts from, if there is one
    head = new_head() if killed_by.endswith("any checkpoint") else new_head(seed=99)
    progress = fit(head, verifier, new_source(head), PLAN, SETTINGS, folder, constant)
    assert progress.step == 20
    assert same(weights(head), weights(straight))
    told = [[(line["step"], "held_out" in line) for line in lines(tmp_path / name)] for name in ("straight", "resumed")]
    assert told[0] == told[1]
    assert len(set(told[1])) == len(told[1])


def test_a_resumed_run_reads_each_remaining_batch_once(new_head, new_source, verifier, tmp_path):
    head = new_head()
    source = new_source(head)
    source.dies_at = 11
    with pytest.raises(Killed):
        fit(head, verifier, source, PLAN, SETTINGS, tmp_path, constant)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-7"]
    head = new_head()
    source = new_source(head)
    fit(head, verifier, source, PLAN, SETTINGS, tmp_path, constant)
    assert source.loads == PLAN[7:]


def test_a_finished_run_does_nothing_more(new_head, new_source, verifier, tmp_path):
    head = new_head()
    first = fit(head, verifier, new_source(head), PLAN, SETTINGS, tmp_path, constant)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again, source = new_head(), new_source(head)

    def evaluate(head):
        raise AssertionError("nothing is new")

    assert fit(again, verifier, source, PLAN, SETTINGS, tmp_path, evaluate) == first
    assert source.loads == []
    assert same(weights(again), weights(head))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(
    ("taus", "best"), [([2.5, 2.0, 1.5, 1.0], 0), ([1.2, 1.8, 1.6, 1.7], 1), ([1.1, 1.2, 1.3, 1.4], 3), ([2, 2, 2, 2], 0)]
)
def test_case_55_the_head_of_the_best_held_out_tau_is_kept(taus, best, new_head, new_source, verifier, tmp_path):
    """Training loss falls all the while; only real decoding counts."""
    judged = []

    def evaluate(head):
        judged.append(weights(head))
        return {"tau": taus[len(judged) - 1]}

    head = new_head()
    progress = fit(head, verifier, new_source(head), PLAN, SETTINGS, tmp_path, evaluate)
    assert progress.best_tau == max(taus)
    assert same(load_head(tmp_path / "head").state_dict(), judged[best])
    assert not same(judged[0], judged[3])


def test_case_55_a_resumed_run_remembers_the_best_tau(new_head, new_source, verifier, tmp_path):
    """The best head was found before the kill; what comes later is worse and must not replace it."""
    judged = []

    def evaluate(head):
        judged.append(weights(head))
        return {"tau": 3.0 - len(judged)}

    head = new_head()
    source = new_source(head)
    source.dies_at = 8
    with pytest.raises(Killed):
        fit(head, verifier, source, PLAN, SETTINGS, tmp_path, evaluate)
    head = new_head()
    assert fit(head, verifier, new_source(head), PLAN, SETTINGS, tmp_path, evaluate).best_tau == 2.0
    assert len(judged) == 4
    assert same(load_head(tmp_path / "head").state_dict(), judged[0])


def test_a_run_whose_held_out_answers_had_no_round_goes_on(new_head, new_source, verifier, tmp_path):
    """A verifier that ends every answer at once gives no tau; one head is then as good as another, and there is one."""
    head = new_head()
    progress = fit(head, verifier, new_source(head), PLAN, SETTINGS, tmp_path, lambda head: {"tau": None})
    assert progress.step == 20
    assert load_head(tmp_path / "head").config == head.config


def test_case_36_the_head_trains_again_after_evaluation_and_the_verifier_never(new_head, new_source, verifier, tmp_path):
    head = new_head()
    source = new_source(head)
    source.head = head
    before = {name: p.clone() for name, p in verifier.model.named_parameters()}
    modes = []

    def evaluate(head):
        modes.append(any(module.training for module in head.modules()))
        head.eval()
        return {"tau": 1.5}

    fit(head, verifier, source, PLAN, SETTINGS, tmp_path, evaluate)
    assert modes == [False] * 4
    assert head.training
    assert all(p.grad is None and p.equal(before[name]) for name, p in verifier.model.named_parameters())
    assert not any(module.training for module in verifier.model.modules())


@pytest.mark.parametrize(
    ("every", "told"),
    [
        ({"log_every": 4, "save_every": 6, "evaluate_every": 5}, ([4, 8, 12, 13], [6, 12, 13], [5, 10, 13])),
        ({"log_every": 50, "save_every": None, "evaluate_every": None}, ([13], [13], [13])),
        ({"log_every": 13, "save_every": 13, "evaluate_every": 13}, ([13], [13], [13])),
    ],
)
def test_case_36_every_counts_optimizer_steps(every, told, new_head, new_source, verifier, tmp_path, monkeypatch):
    """And the last step is always logged, saved and judged, once."""
    saved, judged = [], []

    class Checkpoints(trainer.Checkpoints):
        def save(self, strategy, progress):
            saved.append(progress.step)
            super().save(strategy, progress)

    monkeypatch.setattr(trainer, "Checkpoints", Checkpoints)
    head = new_head()
    source = new_source(head)
    fit(
        head, verifier, source, PLAN[:13], dataclasses.replace(SETTINGS, **every), tmp_path,
        lambda head: judged.append(len(source.loads)) or {"tau": 1.5},
    )  # fmt: skip
    logged = [line["step"] for line in lines(tmp_path) if "loss" in line]
    assert (logged, saved, judged) == told
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-13"]


def test_case_37_weights_and_moments_are_float32_and_norms_move(tiny, tiny_eagle3, new_source, tmp_path):
    """A verifier in bfloat16; the head's norms start at one, where a bfloat16 weight would stay for ever."""
    verifier = tiny("llama")
    verifier.model.to(torch.bfloat16)
    head = tiny_eagle3(verifier)
    norms = [module for module in head.modules() if isinstance(module, nn.RMSNorm)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.fill_(1.0)
    source = new_source(head)
    source.features = MemoryFeatures(verifier, source.features.samples, head.needs, 1000)
    fit(head, verifier, source, PLAN, SETTINGS, tmp_path, constant)
    assert {p.dtype for p in head.parameters()} == {torch.float32}
    state = torch.load(tmp_path / "checkpoints" / "step-20" / "optimizers.pt", weights_only=True)
    assert {moments[name].dtype for moments in state.values() for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    assert len(norms) == 4
    assert all(bool((norm.weight != 1).all()) for norm in norms)
    assert {tensor.dtype for tensor in load_head(tmp_path / "head").state_dict().values()} == {torch.float32, torch.int64}


class One(nn.Module):
    """A single weight, the stand-in for a norm's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


def descend(model, loss, settings, number=1, optimizers=None):
    """A step of the plain strategy; its gradient's norm."""
    strategy = Plain()
    strategy.head, strategy.optimizers = model, optimizers or make_optimizers(model, settings)
    strategy.backward(loss, last=True)
    return strategy.step(settings.clip, number)


def loss_of(sums, counts=(1,)):
    counts = torch.tensor(counts)
    return HeadLoss(sums, counts, torch.zeros_like(counts), torch.ones(len(counts)))


def test_case_37_a_hundred_small_steps_add_up():
    model = One()
    settings = dataclasses.replace(SETTINGS, learning_rate=6e-4, warmup=0.0, schedule="constant", betas=(0.9, 0.999))
    optimizers = make_optimizers(model, settings)
    for number in range(100):
        assert descend(model, 0.01 * model.weight, settings, number, optimizers) == pytest.approx(0.01)
    assert model.weight.item() == pytest.approx(0.9394, abs=1e-3)


def test_frozen_weights_are_left_out_of_the_optimizer():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    (optimizer,) = make_optimizers(model, SETTINGS)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model[0].parameters()]
    assert (optimizer.defaults["betas"], optimizer.defaults["weight_decay"]) == ((0.9, 0.95), 0.01)


def test_the_norm_is_told_before_clipping_and_clipped_for_the_step():
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert descend(model, 8 * model.weight, SETTINGS, optimizers=[optimizer]) == pytest.approx(8)
    assert model.weight.item() == pytest.approx(0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_the_run(value, new_head, new_source, verifier, tmp_path):
    """With the number of the step, before it reaches the weights."""
    head = new_head()
    source = new_source(head)
    load = source.load

    def poisoned(indices):
        batch, features = load(indices)
        if len(source.loads) == 4:
            features.last[:] = value
            features.layers[:] = value
        return batch, features

    source.load = poisoned
    with pytest.raises(
        UserError, match=r"^step 4: the gradient is (nan|inf); lower training.learning_rate or look at the data$"
    ):
        fit(head, verifier, source, PLAN, SETTINGS, tmp_path, constant)
    assert all(bool(p.isfinite().all()) for p in head.parameters())


def test_case_02_a_batch_without_a_label_changes_nothing(new_head, new_source, verifier, tmp_path):
    """Exactly zero loss and the same weights, even as the first batch of a run, even with weight decay."""
    head = new_head()
    silent = Sample([4, 5, 6, 7, 8, 9], [False] * 6)
    good = Sample([4, 5, 6, 7, 8, 9, 10], [False, True, True, True, True, True, True])
    settings = dataclasses.replace(SETTINGS, log_every=1, evaluate_every=1, save_every=None, weight_decay=0.5)
    judged = [weights(head)]
    fit(
        head, verifier, new_source(head, [silent, good]), [[0], [1], [0], [0, 1]], settings, tmp_path,
        lambda head: judged.append(weights(head)) or {"tau": 1.0},
    )  # fmt: skip
    assert [same(a, b) for a, b in pairwise(judged)] == [True, False, True, False]
    logged = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["loss"] == 0.0 for line in logged] == [True, False, True, False]
    assert [line["grad_norm"] == 0.0 for line in logged] == [True, False, True, False]
    assert [line["supervised_tokens"] == 0 for line in logged] == [True, False, True, False]


def test_case_14_the_logged_loss_is_a_mean_over_tokens():
    """Four tokens of loss 1 and one of loss 4: 1.6, not 2.5 (mean of means) and not 1.0 (padding counted)."""
    window = Window(0.0)
    window.add([loss_of(torch.tensor([4.0]), (4,))], 0.5, 10)
    window.add([loss_of(torch.tensor([4.0]), (1,))], 2.0, 6)
    assert window.mean_loss() == pytest.approx(1.6)
    line = window.flush()
    assert (line["loss"], line["loss_by_depth"], line["supervised_tokens"]) == (pytest.approx(1.6), [pytest.approx(1.6)], 5)
    assert line["grad_norm"] == 2.0  # the largest of the window
    window.add([loss_of(torch.tensor([3.0]), (2,))], 0.1, 6)
    assert window.flush()["loss"] == pytest.approx(1.5)  # the next window starts empty


def test_the_seconds_of_a_resumed_run_go_on():
    assert 100 <= Window(100.0).seconds() < 101


@pytest.mark.parametrize(
    ("steps", "warmup", "schedule", "expected"),
    [
        (10, 0.0, "constant", [1.0] * 10),
        (10, 0.3, "constant", [1 / 4, 2 / 4, 3 / 4] + [1.0] * 7),
        (4, 0.0, "cosine", [1.0, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]),
        (6, 1 / 3, "cosine", [1 / 3, 2 / 3, 1.0, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]),
        (1, 0.1, "cosine", [1 / 1.1]),
    ],
)
def test_the_schedule(steps, warmup, schedule, expected):
    assert [rate(done, steps, warmup, schedule) for done in range(steps)] == pytest.approx(expected)


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5, 0.99])
def test_the_schedule_rises_once_and_falls_once(warmup):
    rates = [rate(done, 100, warmup, "cosine") for done in range(100)]
    top = rates.index(max(rates))
    assert all(0 < value <= 1 for value in rates)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_muon_takes_the_matrices_between_hidden_states(new_head):
    head = new_head()
    settings = dataclasses.replace(SETTINGS, optimizer="muon", weight_decay=0.5)
    inner, rest = make_optimizers(head, settings, torch.bfloat16)
    names = {id(p): name for name, p in head.named_parameters()}
    held = [{names[id(p)] for p in optimizer.param_groups[0]["params"]} for optimizer in (inner, rest)]
    assert held[0] | held[1] == set(names.values())
    assert not held[0] & held[1]
    assert held[0] == {name for name, p in head.named_parameters() if p.dim() == 2 and "lm_head" not in name}
    assert inner.dtype == torch.bfloat16
    assert [o.param_groups[0]["weight_decay"] for o in (inner, rest)] == [0.5, 0.5]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_step_has_the_rate_of_the_schedule_and_the_log_says_it(
    optimizer, new_head, new_source, verifier, tmp_path, monkeypatch
):
    used = []

    def spy(strategy, *arguments):
        used.append({group["lr"] for o in strategy.optimizers for group in o.param_groups})
        return step(strategy, *arguments)

    monkeypatch.setattr(trainer, "step", spy)
    head = new_head()
    settings = dataclasses.replace(SETTINGS, optimizer=optimizer, log_every=1)
    fit(head, verifier, new_source(head), PLAN, settings, tmp_path, constant)
    expected = [1e-3 * rate(done, 20, 0.1, "cosine") for done in range(20)]
    assert [value for (value,) in used] == pytest.approx(expected)
    assert [line["learning_rate"] for line in lines(tmp_path) if "loss" in line] == pytest.approx(expected)


@pytest.mark.parametrize(("every", "steps"), [(None, []), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4])])
def test_due(every, steps):
    assert [number for number in range(1, 7) if due(number, every)] == steps


def test_time_spent_judging_is_not_training_time(new_head, new_source, verifier, tmp_path):
    def slow(head):
        time.sleep(0.5)
        return {"tau": 1.5}

    head = new_head()
    settings = dataclasses.replace(SETTINGS, log_every=1, evaluate_every=1, save_every=None)
    progress = fit(head, verifier, new_source(head), PLAN[:3], settings, tmp_path, slow)
    logged = [line for line in lines(tmp_path) if "loss" in line]
    assert logged[-1]["seconds"] < 0.9
    assert progress.seconds < 0.9
    assert min(line["tokens_per_second"] for line in logged) > logged[-1]["supervised_tokens"] / 0.5


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_case_14_micro_batches_have_the_gradient_of_the_whole_batch(parts, new_head, new_source, verifier, tmp_path):
    """Also where there are more micro-batches than samples, some of them without a label."""
    found = []
    for accumulation in (1, parts):
        head = new_head()
        settings = dataclasses.replace(SETTINGS, accumulation=accumulation, log_every=1, save_every=None, evaluate_every=None)
        folder = tmp_path / str(accumulation)
        fit(head, verifier, new_source(head), PLAN[:5], settings, folder, constant)
        found.append(
            (weights(head), [(line["loss"], line["supervised_tokens"], line["grad_norm"]) for line in lines(folder)[:5]])
        )
    (whole, told), (parted, again) = found
    for name, tensor in whole.items():
        torch.testing.assert_close(parted[name], tensor, atol=1e-5, rtol=0)
    assert again == [pytest.approx(line, rel=1e-5) for line in told]


def test_the_micro_batches_of_all_processes_are_the_batch(monkeypatch):
    indices = list(range(7))
    dealt = []
    for mine in range(3):
        monkeypatch.setattr(trainer, "rank", lambda mine=mine: mine)
        monkeypatch.setattr(trainer, "world", lambda: 3)
        dealt += trainer.shares(indices, 3)
    assert sorted(i for part in dealt for i in part) == indices
    assert len(dealt) == 9
    assert max(map(len, dealt)) == 1


@pytest.mark.parametrize("another", [False, True])
def test_sigterm_during_a_held_out_evaluation_leaves_it_for_the_next_start(
    another, new_head, new_source, verifier, tiny, tmp_path
):
    """Saved at once, without the evaluation; the next start begins with it, and ends like a run that was never stopped."""
    straight = new_head()
    fit(straight, verifier, new_source(straight), PLAN, SETTINGS, tmp_path / "straight", constant)

    judging = tiny("llama") if another else None

    def asked_to_stop(head):
        os.kill(os.getpid(), signal.SIGTERM)
        (judging or verifier).features(torch.tensor([[1, 2, 3]]))
        raise AssertionError("nothing is decoded after the signal")

    head, folder = new_head(), tmp_path / "stopped"
    stopped = fit(head, verifier, new_source(head), PLAN, SETTINGS, folder, asked_to_stop, judging=judging)
    assert (stopped.step, stopped.judged) == (5, 0)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-5"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    head = new_head()
    assert fit(head, verifier, new_source(head), PLAN, SETTINGS, folder, constant).judged == 20
    assert same(weights(head), weights(straight))
    told = [[(line["step"], "held_out" in line, line.get("loss")) for line in lines(tmp_path / name) if "held_out" in line]
            for name in ("straight", "stopped")]  # fmt: skip
    assert told[0] == told[1]
