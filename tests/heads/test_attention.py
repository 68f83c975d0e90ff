"""Attention over shared keys and own keys against one dense softmax over all S · K keys, in float64."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import headstart
from headstart.heads import attention
from headstart.heads.attention import attend_with_own, sight

HEADS, GROUPS, SIZE = 4, 2, 6
BENCHMARK = Path(headstart.__file__).parent / "benchmarks" / "ttt_memory.py"


def dense(q: Tensor, k: Tensor, v: Tensor, documents: list[int]) -> Tensor:
    """Training-time attention by its definition, for all positions and steps at once.

    q: [K, H, S, D]; k, v: [K, G, S, D], of each step. Query (t, step) sees key (u, 0) for every u <= t of its document, and its
    own keys (t, 1) .. (t, step): a mask of (S · K) by (S · K). Returns [K, H, S, D].
    """
    steps, heads, length, size = q.shape
    mask = torch.zeros(steps, length, steps, length, dtype=torch.bool)
    for step in range(steps):
        for t in range(length):
            for u in range(t + 1):
                mask[step, t, 0, u] = documents[u] == documents[t]
            mask[step, t, 1 : step + 1, t] = True
    queries, keys, values = (x.transpose(0, 1).flatten(1, 2) for x in (q, k, v))  # [heads, K · S, D]
    keys, values = (x.repeat_interleave(heads // len(x), 0) for x in (keys, values))
    scores = (queries @ keys.mT / size**0.5).masked_fill(~mask.flatten(2).flatten(0, 1), float("-inf"))
    return (scores.softmax(-1) @ values).unflatten(1, (steps, length)).transpose(0, 1)


def inputs(lengths: list[list[int]], steps: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q [K, B, H, S, D] and k, v [K, B, G, S, D] for rows of documents of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    size = max(map(sum, lengths))
    return tuple(
        torch.randn(steps, len(lengths), n, size, SIZE, generator=generator, dtype=dtype).mul_(1.5).requires_grad_()
        for n in (HEADS, GROUPS, GROUPS)
    )


def starts_of(lengths: list[int]) -> list[int]:
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return [start for start, end in pairwise(bounds) for _ in range(start, end)]


def by_steps(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, first: Tensor) -> list[Tensor]:
    """The tested form at the rows [B, R] (-1 pads): [B, H, R, D] of each step."""
    at = rows.clamp(min=0)
    seen = sight(first.gather(1, at), at, rows >= 0, HEADS)
    take = at[:, None, :, None]
    found = []
    for step in range(len(q)):
        own = [[x[j].gather(2, take.expand(-1, x.shape[2], -1, SIZE)) for j in range(1, step + 1)] for x in (k, v)]
        found.append(attend_with_own(q[step].gather(2, take.expand(-1, HEADS, -1, SIZE)), k[0], v[0], seen, *own))
    return found


@pytest.mark.parametrize("scores", [1, 300, 2**20])
@pytest.mark.parametrize("lengths", [[[17]], [[9], [17]], [[4, 1, 8, 4], [17]]], ids=["one", "ragged", "packed"])
@pytest.mark.parametrize("steps", [1, 4])
def test_values_and_gradients_equal_one_dense_softmax(
    lengths: list[list[int]], scores: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORES", scores)
    q, k, v = inputs(lengths, steps, torch.float64)
    chosen = [sorted(torch.randperm(sum(its), generator=torch.Generator().manual_seed(b))[: sum(its) * 2 // 3].tolist())
              for b, its in enumerate(lengths)]  # fmt: skip
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(its) for its in chosen], batch_first=True, padding_value=-1)
    size = q.shape[3]
    first = torch.tensor([starts_of(its) + [0] * (size - sum(its)) for its in lengths])
    found = torch.stack(by_steps(q, k, v, rows, first))  # [K, B, H, R, D]
    expected = []
    for b, its in enumerate(lengths):
        n = sum(its)
        whole = dense(q[:, b, :, :n], k[:, b, :, :n], v[:, b, :, :n], starts_of(its))
        expected.append(whole[:, :, chosen[b]])
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    mine = torch.stack([(found[:, b, :, : len(its)] * weights[:, b, :, : len(its)]).sum() for b, its in enumerate(chosen)])
    its_own = torch.stack([(one * weights[:, b, :, : one.shape[2]]).sum() for b, one in enumerate(expected)])
    for b, one in enumerate(expected):
        assert (found[:, b, :, : one.shape[2]] - one).abs().max() < 1e-12
    assert torch.isfinite(found).all()
    for a, e in zip(torch.autograd.grad(mine.sum(), (q, k, v)), torch.autograd.grad(its_own.sum(), (q, k, v)), strict=True):
        assert e.abs().max() > 0.1
        assert (a - e).abs().max() < 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_lower_precisions_stay_near(dtype: torch.dtype, tolerance: float) -> None:
    """bfloat16 as under autocast: products in it, the softmax in float32; gradients come back in each input's own type."""
    q, k, v = inputs([[30]], 3, torch.float32)
    rows, first = torch.arange(30)[None], torch.zeros(1, 30, dtype=torch.long)
    exact = dense(*(x[:, 0].double() for x in (q, k, v)), [0] * 30)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = torch.stack(by_steps(q, k, v, rows, first))[:, 0]
    assert found.dtype == dtype
    assert (found - exact).abs().max() < tolerance * exact.abs().max()
    for mine, its in zip(*(torch.autograd.grad(x.float().square().sum(), (q, k, v)) for x in (found, exact)), strict=True):
        assert mine.dtype == torch.float32
        assert (mine - its).norm() < tolerance * its.norm()


def test_scores_beyond_the_range_of_exp_are_no_trouble() -> None:
    q, k, v = inputs([[12]], 3, torch.float64)
    rows, first = torch.arange(12)[None], torch.zeros(1, 12, dtype=torch.long)
    found = torch.stack(by_steps(q * 1e4, k, v, rows, first))[:, 0]
    assert (found - dense(q[:, 0] * 1e4, k[:, 0], v[:, 0], [0] * 12)).abs().max() < 1e-9
    assert torch.isfinite(torch.autograd.grad(found.sum(), q)[0]).all()


def test_no_rows_give_zero_gradients() -> None:
    q, k, v = inputs([[5]], 1, torch.float64)
    seen = sight(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0).bool(), HEADS)
    found = attend_with_own(q[0, :, :, :0], k[0], v[0], seen, [], [])
    assert found.shape == (1, HEADS, 0, SIZE)
    assert all(not gradient.any() for gradient in torch.autograd.grad(found.sum(), (k, v)))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        for x in out if isinstance(out, tuple | list) else [out]:
            self.elements = max(self.elements, x.numel() if isinstance(x, Tensor) else 0)
        return out


def test_scores_are_never_all_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 tokens, four heads: 1.4 million scores a step; 40 thousand are made at a time, forwards and backwards."""
    monkeypatch.setattr(attention, "SCORES", 40_000)
    q, k, v = inputs([[600]], 3, torch.float32)
    with Largest() as seen:
        found = by_steps(q, k, v, torch.arange(600)[None], torch.zeros(1, 600, dtype=torch.long))
        torch.stack(found).sum().backward()
    assert max(q.numel(), 40_000) <= seen.elements < 1.1 * max(q.numel(), 40_000)


def test_rows_read_no_more_slots_than_they_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causality and documents bound the work. Documents of 4, 6 and 2 tokens, four rows of two heads at a time."""
    monkeypatch.setattr(attention, "SCORES", 12 * 2 * 4)
    first = torch.tensor([[0] * 4 + [4] * 6 + [10] * 2])
    pieces = sight(first, torch.arange(12)[None], torch.ones(1, 12).bool(), heads=2).pieces
    assert pieces == ((slice(0, 4), slice(0, 4)), (slice(4, 8), slice(4, 8)), (slice(8, 12), slice(4, 12)))


@pytest.mark.slow
@pytest.mark.skipif(not BENCHMARK.exists(), reason="runs in a checkout")
def test_the_benchmark_runs_and_its_forms_agree() -> None:
    sizes = ["--tokens", "64", "--steps", "3", "--heads", "2", "--groups", "1", "--size", "8"]
    done = subprocess.run([sys.executable, BENCHMARK, *sizes], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:5]] == ["form", "mask", "scores", "pieces"]
