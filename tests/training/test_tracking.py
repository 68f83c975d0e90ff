"""metrics.jsonl: whole lines, in order, each step once whatever killed the run."""

import json

import pytest

from headstart.training.tracking import Metrics


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_one_object_a_line(tmp_path):
    metrics = Metrics(tmp_path / "run" / "metrics.jsonl")
    metrics.log(10, loss=2.5, loss_by_depth=[1.0, 1.5])
    metrics.log(20, held_out={"tau": 1.5, "text": "naïve\n"})
    assert lines(metrics.path) == [
        {"step": 10, "loss": 2.5, "loss_by_depth": [1.0, 1.5]},
        {"step": 20, "held_out": {"tau": 1.5, "text": "naïve\n"}},
    ]


def test_nothing_is_written_before_the_first_line(tmp_path):
    Metrics(tmp_path / "metrics.jsonl", 5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("resumed", "kept"), [(0, []), (9, []), (10, [10]), (15, [10]), (20, [10, 20, 20]), (99, [10, 20, 20, 30])]
)
def test_case_42_a_resumed_run_logs_each_step_once(resumed, kept, tmp_path):
    """What a killed run logged after its last checkpoint will be logged again."""
    path = tmp_path / "metrics.jsonl"
    for step in (10, 20, 20, 30):
        Metrics(path, 99).log(step)
    metrics = Metrics(path, resumed)
    assert [line["step"] for line in lines(path)] == kept
    metrics.log(40)
    assert [line["step"] for line in lines(path)] == [*kept, 40]


@pytest.mark.parametrize("torn", ["{", '{"step": 20, "loss": 1', '{"step": 20}'])
def test_a_torn_last_line_is_dropped(torn, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n' + torn, encoding="utf-8")
    Metrics(path, 99).log(30)
    assert [line["step"] for line in lines(path)] == [10, 30]


def test_a_fresh_start_in_an_old_folder_begins_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    Metrics(path).log(10)
    Metrics(path).log(1)
    assert lines(path) == [{"step": 1}]
