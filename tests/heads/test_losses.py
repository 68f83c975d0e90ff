"""Chunked cross-entropy and its bookkeeping against row-by-row float64 arithmetic."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import losses
from headstart.heads.losses import HeadLoss, linear_cross_entropy

COLUMNS, SIZE = 17, 5
ROW_COUNTS = [0, 1, 255, 256, 257, 600]  # around the edges of the chunks of 256


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor | None) -> tuple[Tensor, int]:
    """-Σ_v p(v) log q(v), one row at a time; a label is a p with a single one."""
    total, hits = torch.zeros((), dtype=torch.float64), 0
    for i in range(hidden.shape[0]):
        target = targets[i if rows is None else int(rows[i])]
        logits = (hidden[i] * weight).sum(-1)
        top = logits.detach().max()
        log_q = logits - top - torch.log(torch.exp(logits - top).sum())
        if target.dim() == 0:
            total = total - log_q[int(target)]
            hits += int(log_q.argmax() == target)
        else:
            total = total - (target * log_q).sum()
            hits += int(log_q.argmax() == target.argmax())
    return total, hits


def problem(count: int, soft: bool, with_rows: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(count)
    number = {"generator": generator, "dtype": torch.float64}
    pool = max(count // 2, 1) if with_rows else count
    return {
        "hidden": torch.randn(count, SIZE, **number),
        "weight": torch.randn(COLUMNS, SIZE, **number),
        "targets": (
            torch.randn(pool, COLUMNS, **number).mul(2).softmax(-1) if soft
            else torch.randint(COLUMNS, (pool,), generator=generator)
        ),
        "rows": torch.randint(pool, (count,), generator=generator) if with_rows else None,
    }  # fmt: skip


def value_and_gradients(function: Any, given: dict[str, Any], scale: float = 1.0) -> tuple[float, int, Tensor, Tensor]:
    hidden, weight = given["hidden"].clone().requires_grad_(), given["weight"].clone().requires_grad_()
    loss, hits = function(hidden, weight, given["targets"], given["rows"])
    if loss.requires_grad:
        (loss * scale).backward()
    zero = torch.zeros(())
    return (
        loss.item(),
        int(hits),
        zero.expand_as(hidden) if hidden.grad is None else hidden.grad,
        zero.expand_as(weight) if weight.grad is None else weight.grad,
    )


@pytest.mark.parametrize("with_rows", [False, True], ids=["direct", "rows"])
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("count", ROW_COUNTS)
def test_value_hits_and_gradients_equal_the_naive_loop(count: int, soft: bool, with_rows: bool) -> None:
    given = problem(count, soft, with_rows)
    mine = value_and_gradients(linear_cross_entropy, given, scale=0.37)
    naively = value_and_gradients(naive, given, scale=0.37)
    assert mine[0] == pytest.approx(naively[0], rel=1e-12, abs=1e-9)
    assert mine[1] == naively[1]
    for ours, theirs in zip(mine[2:], naively[2:], strict=True):
        assert (ours - theirs).abs().max().item() < 1e-6 if ours.numel() else ours.shape == theirs.shape


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("chunk", [1, 7, 40, 41])
def test_case_35_every_chunk_size_gives_the_same_loss_and_gradients(
    chunk: int, soft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = problem(40, soft, True)
    whole = value_and_gradients(naive, given)
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk)
    chunked = value_and_gradients(linear_cross_entropy, given)
    assert chunked[0] == pytest.approx(whole[0], abs=1e-9)
    for ours, theirs in zip(chunked[2:], whole[2:], strict=True):
        assert (ours - theirs).abs().max().item() < 1e-6


def distance(p: Tensor, q: Tensor, loss: str) -> Tensor:
    """Of two distributions, column by column."""
    pairs = list(zip(p, q, strict=True))
    if loss == "kl":
        return sum(a * torch.log(a / b) for a, b in pairs if a > 0)
    if loss == "ce":
        return -sum(a * torch.log(b) for a, b in pairs)
    variation = sum(torch.abs(a - b) for a, b in pairs) / 2
    return variation if loss == "tv" else -torch.log(1 - variation)


@pytest.mark.parametrize("with_rows", [False, True], ids=["direct", "rows"])
@pytest.mark.parametrize("chunk", [7, 256])
@pytest.mark.parametrize("soft", ["ce", "kl", "tv", "lk"])
def test_every_soft_loss_and_its_gradients_equal_the_definition(
    soft: str, chunk: int, with_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk)
    given = problem(40, True, with_rows)
    given["targets"][0, 3] = 0.0  # an impossible token
    given["targets"][0] /= given["targets"][0].sum()

    def naively(hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor | None) -> tuple[Tensor, int]:
        chosen = targets if rows is None else targets[rows]
        q = torch.softmax(hidden @ weight.T, -1)
        value = sum(distance(p, row, soft) for p, row in zip(chosen, q, strict=True))
        return value, int((q.argmax(-1) == chosen.argmax(-1)).sum())

    def mine(*arguments: Any) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(*arguments, soft)

    ours, theirs = (value_and_gradients(function, given, scale=0.37) for function in (mine, naively))
    assert ours[0] == pytest.approx(theirs[0], abs=1e-9)
    assert ours[1] == theirs[1]
    assert ours[3].abs().max() > 1e-3
    for one, other in zip(ours[2:], theirs[2:], strict=True):
        assert (one - other).abs().max() < 1e-9


def test_the_soft_losses_of_an_example() -> None:
    """p = (.5, .5, 0), q = (.25, .25, .5): α = .5, TV = .5, LK = KL = ln 2, CE = ln 4."""
    hidden = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log()
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    found = [linear_cross_entropy(hidden, torch.eye(3).double(), p, None, soft)[0].item() for soft in ("tv", "lk", "kl", "ce")]
    assert found == pytest.approx([0.5, math.log(2), math.log(2), math.log(4)])


@pytest.mark.parametrize("soft", ["tv", "lk"])
def test_a_draft_that_is_never_accepted_stays_finite(soft: str) -> None:
    hidden = torch.tensor([[0.0, -300.0]], requires_grad=True)
    loss, _ = linear_cross_entropy(hidden, torch.eye(2), torch.tensor([[0.0, 1.0]]), None, soft)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
def test_zero_rows_give_exactly_zero_and_zero_gradients(soft: bool) -> None:
    given = problem(0, soft, False)
    loss, hits, grad_hidden, grad_weight = value_and_gradients(linear_cross_entropy, given)
    assert (loss, hits) == (0.0, 0)
    assert grad_hidden.shape == (0, SIZE)
    assert torch.equal(grad_weight, torch.zeros(COLUMNS, SIZE, dtype=torch.float64))


def test_a_frozen_weight_gets_no_gradient_and_the_hidden_states_still_do() -> None:
    given = problem(9, False, False)
    hidden, weight = given["hidden"].clone().requires_grad_(), given["weight"]
    loss, _ = linear_cross_entropy(hidden, weight, given["targets"])
    loss.backward()
    assert weight.grad is None
    assert (hidden.grad - value_and_gradients(naive, given)[2]).abs().max() < 1e-6


def test_a_frozen_hidden_state_gets_no_gradient_and_the_weight_still_does() -> None:
    given = problem(9, True, False)
    hidden, weight = given["hidden"], given["weight"].clone().requires_grad_()
    loss, _ = linear_cross_entropy(hidden, weight, given["targets"])
    loss.backward()
    assert hidden.grad is None
    assert (weight.grad - value_and_gradients(naive, given)[3]).abs().max() < 1e-6


def test_the_targets_are_left_as_they_were() -> None:
    given = problem(300, True, False)
    before = given["targets"].clone()
    value_and_gradients(linear_cross_entropy, given)
    assert torch.equal(given["targets"], before)


def test_huge_logits_stay_finite() -> None:
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss, _ = linear_cross_entropy(hidden, weight, torch.tensor([1, 0]))
    loss.backward()
    assert loss.item() == pytest.approx(1200.0)
    assert hidden.grad.flatten().tolist() == pytest.approx([2.0, -2.0])
    assert torch.isfinite(weight.grad).all()


def head_loss(sums: list[float], counts: list[int], decay: float = 0.8) -> HeadLoss:
    weights = torch.tensor([decay**k for k in range(len(sums))])
    return HeadLoss(torch.tensor(sums, requires_grad=True), torch.tensor(counts), torch.tensor(counts), weights)


def test_case_58_the_total_decays_means_and_not_sums() -> None:
    """Head 0: mean 2 of 3 labels; head 1: mean 2 of 2; head 2: mean 5 of 1: 2 + 0.8 * 2 + 0.64 * 5."""
    assert head_loss([6.0, 4.0, 5.0], [3, 2, 1]).total().item() == pytest.approx(2 + 0.8 * 2 + 0.64 * 5)
    assert head_loss([6.0, 4.0, 5.0], [3, 2, 1], decay=1.0).total().item() == pytest.approx(9.0)


def test_a_depth_without_labels_adds_nothing_and_an_empty_loss_is_exactly_zero() -> None:
    assert head_loss([6.0, 0.0], [3, 0]).total().item() == 2.0
    empty = head_loss([0.0, 0.0], [0, 0])
    empty.total().backward()
    assert empty.total().item() == 0.0
    assert torch.isfinite(empty.sums.grad).all()


def test_case_14_micro_batches_under_joint_counts_equal_one_big_batch() -> None:
    """Four tokens of loss 1 and one of loss 4: 8 / 5 = 1.6, not the mean of means 2.5."""
    parts = [head_loss([4.0], [4]), head_loss([4.0], [1])]
    joint = parts[0].counts + parts[1].counts
    assert sum(part.total(joint).item() for part in parts) == pytest.approx(1.6)
    assert sum(part.total().item() for part in parts) / 2 == pytest.approx(2.5)


@pytest.mark.parametrize("cut", [0, 1, 13, 19, 20])
def test_case_14_gradients_of_micro_batches_under_joint_counts_equal_one_big_batch(cut: int) -> None:
    given = problem(20, True, False)

    def gradient(parts: list[slice]) -> tuple[float, Tensor]:
        weight = given["weight"].clone().requires_grad_()
        counts = torch.tensor([20])
        value = 0.0
        for part in parts:
            loss, hits = linear_cross_entropy(given["hidden"][part], weight, given["targets"][part])
            size = torch.tensor([given["hidden"][part].shape[0]])
            total = HeadLoss(loss[None], size, hits[None], torch.ones(1)).total(counts)
            total.backward()
            value += total.item()
        return value, weight.grad

    big, small = gradient([slice(0, 20)]), gradient([slice(0, cut), slice(cut, 20)])
    assert math.isclose(big[0], small[0], rel_tol=1e-9)
    assert (big[1] - small[1]).abs().max() < 1e-6
