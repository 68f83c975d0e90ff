"""Where the time of a step goes: shares against a clock of our own, and what a logged line holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data.chat import Sample
from headstart.data.features import MemoryFeatures, OnlineFeatures
from headstart.heads.verifier import Verifier
from headstart.training import profile as module
from headstart.training.profile import PAUSED, Profile, product_flops
from headstart.training.trainer import Settings, fit

SETTINGS = Settings(
    optimizer="adamw", learning_rate=1e-3, warmup=0.1, schedule="cosine", weight_decay=0.0, betas=(0.9, 0.95), clip=0.5,
    accumulation=2, seed=0, log_every=2, save_every=None, evaluate_every=2,
)  # fmt: skip
EPS = 1e-4  # shares are rounded


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`clock(seconds)` lets them pass."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_shares_mfu_and_time_left(
    tiny: Callable[..., Verifier], tiny_eagle3: Callable[..., Any], clock: Callable[[float], None]
) -> None:
    """Two windows; what is paused counts nowhere, and the verifier's work only where it ran."""
    verifier = tiny("llama")
    head = tiny_eagle3(verifier)
    profile = Profile(head, verifier, torch.float32)
    profile.peak = 1e7
    profile.lap("other")
    for _ in range(2):
        for part, seconds in (("data", 0.5), ("verifier", 2.0), ("other", 0.0), ("forward", 3.0), ("backward", 2.5),
                              ("optimizer", 1.0), ("other", 1.0)):  # fmt: skip
            clock(seconds)
            profile.lap(part)
    clock(1000.0)
    profile.lap(PAUSED)
    line = profile.flush(tokens=60, labels=80, steps=2, remaining=7)
    assert line["time_shares"] == {
        "data": 0.05, "verifier": 0.2, "forward": 0.3, "backward": 0.25, "optimizer": 0.1, "other": 0.1
    }  # fmt: skip
    assert line["eta_seconds"] == 70.0
    # four llama layers of the fixtures (d = 32, two key/value heads of 8, MLP 64), last norm, lm_head; no look-up
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    active = 4 * layer + 32 + 96 * 32
    flops = 2 * active * 60 + 6 * sum(p.numel() for p in head.parameters()) * 80
    assert line["mfu"] == pytest.approx(flops / 20 / 1e7, abs=EPS)
    assert line["peak_memory_gb"] > 0.01
    assert profile.note == f"{line['mfu']:.0%} MFU  {line['peak_memory_gb']:.1f} GB"

    clock(4.0)
    profile.lap("forward")
    line = profile.flush(tokens=30, labels=10, steps=1, remaining=0)
    assert line["time_shares"]["forward"] == 1.0
    assert line["mfu"] == pytest.approx(6 * sum(p.numel() for p in head.parameters()) * 10 / 4 / 1e7, abs=EPS)
    assert line["eta_seconds"] == 0.0


@pytest.mark.parametrize("online", [True, False])
def test_every_logged_line_says_where_the_time_went(
    online: bool, tiny: Callable[..., Verifier], tiny_medusa: Callable[..., Any], tmp_path: Path
) -> None:
    verifier = tiny("llama")
    head = tiny_medusa(verifier)
    samples = [Sample([(7 * i + j) % 90 + 1 for j in range(12)], [j >= 3 for j in range(12)]) for i in range(4)]
    source = OnlineFeatures(verifier, samples, ()) if online else MemoryFeatures(verifier, samples, (), 100)
    fit(head, verifier, source, [[0, 1, 2], [3, 0, 1]] * 3, SETTINGS, tmp_path, lambda head: {"tau": 1.5})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "loss" in line]
    assert [line["step"] for line in logged] == [2, 4, 6]
    for line in logged:
        shares = line["time_shares"]
        assert sum(shares.values()) == pytest.approx(1, abs=6 * EPS)
        assert (shares["verifier"] > 0) == online
        assert all(shares[part] > 0 for part in ("data", "forward", "backward", "optimizer"))
        assert 0 < line["supervised_tokens_per_second"] < line["tokens_per_second"]
        assert line["mfu"] > 0
    assert [line["eta_seconds"] > 0 for line in logged] == [True, True, False]


def test_the_peak_is_what_a_product_takes(clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of four products of 512 x 512: 2 * 512^3 FLOP in a quarter of a second."""
    passed = iter([0.5, 0.25, 1.0, 2.0])
    product = torch.Tensor.__matmul__

    def slow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        clock(next(passed))
        return product(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", slow)
    assert product_flops(torch.device("cpu"), torch.float32) == 2 * 512**3 / 0.25
