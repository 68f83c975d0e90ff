"""The ten real steps of `headstart train --dry-run`."""

import json
from pathlib import Path

import pytest
from command import headstart
from tiny_run import write_chats, write_recipe, write_verifier


def test_ten_real_steps_give_the_time_and_leave_nothing(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "recipe.yaml", write_verifier(tmp_path / "verifier"), write_chats(tmp_path / "chats.jsonl")
    )
    ended = headstart("train", recipe, "training.steps=50", "training.batch_tokens=200", "--dry-run", "--ranks", 2, "--json")
    assert ended.code == 0, ended
    found = json.loads(ended.out)
    assert (found["steps"], found["tokens"], found["not_probed"]) == (50, 10_000, None)
    assert found["tokens_per_second"] > 0
    assert found["hours"] == pytest.approx(10_000 / found["tokens_per_second"] / 3600, abs=1e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "recipe.yaml", "verifier"]
