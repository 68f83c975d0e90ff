"""Distillation of several depths at once against row-by-row float64 arithmetic, and how much of it is in memory."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headstart.heads import losses
from headstart.heads.distillation import Lesson, distil

TEACHER_ROWS, COLUMNS, SIZE = 23, 17, 5
ROWS = [list(range(23)), [0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 19, 22], [], [21, 22]]  # of the teacher, a depth each
SCALES = torch.tensor([0.5, 0.3, 0.2, 0.1], dtype=torch.float64)


class Teacher:
    """Probabilities of a fixed table; remembers what it was asked."""

    def __init__(self) -> None:
        logits = torch.randn(TEACHER_ROWS, COLUMNS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.table = (2 * logits).softmax(-1)
        self.asked: list[int] = []

    def __call__(self, rows: slice) -> Tensor:
        found = self.table[rows]
        self.asked.append(len(found))
        return found


def states(rows: Sequence[Sequence[int]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(len(own), SIZE, generator=generator, dtype=torch.float64) for own in rows]


def output_layer() -> Tensor:
    return torch.randn(COLUMNS, SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def distance(p: Tensor, q: Tensor, loss: str) -> Tensor:
    accepted = torch.minimum(p, q).sum()
    return {
        "ce": -(p * q.log()).sum(), "kl": (p * (p / q).log()).sum(), "tv": 1 - accepted, "lk": -accepted.log()
    }[loss]  # fmt: skip


def naive(table: Tensor, hidden: list[Tensor], weight: Tensor, loss: str) -> tuple[list[Tensor], list[int]]:
    sums, hits = [], []
    for own, depth in zip(ROWS, hidden, strict=True):
        q = [torch.softmax(weight @ state, 0) for state in depth]
        terms = [distance(table[row], its, loss) for row, its in zip(own, q, strict=True)]
        sums.append(torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64))
        hits.append(sum(int(its.argmax() == table[row].argmax()) for row, its in zip(own, q, strict=True)))
    return sums, hits


def learnable() -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in (output_layer(), *states(ROWS))]


@pytest.mark.parametrize("upstream", ["as announced", "twice that", "other"])
@pytest.mark.parametrize("loss", ["ce", "kl", "tv", "lk"])
@pytest.mark.parametrize("chunk", [1, 7, 23, 24])
def test_case_35_sums_hits_and_gradients_equal_the_naive_loop(
    chunk: int, loss: str, upstream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Depths of differing rows, one of them empty. The teacher makes each chunk of rows once where the scales are kept."""
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk)
    factors = {"as announced": SCALES, "twice that": 2 * SCALES, "other": torch.tensor([0.1, 0.7, 0.4, 0.9]).double()}[upstream]
    teacher = Teacher()
    weight, *hidden = learnable()
    lesson = Lesson(teacher, TEACHER_ROWS, [torch.tensor(rows, dtype=torch.long) for rows in ROWS], loss)
    sums, correct = distil(lesson, hidden, weight, SCALES)
    mine = torch.autograd.grad((factors * sums).sum(), (weight, *hidden))

    weight, *hidden = learnable()
    naive_sums, hits = naive(teacher.table, hidden, weight, loss)
    naively = torch.autograd.grad(sum(f * s for f, s in zip(factors, naive_sums, strict=True)), (weight, *hidden),
                                  allow_unused=True)  # fmt: skip
    assert sums.tolist() == pytest.approx([value.item() for value in naive_sums], abs=1e-12)
    assert sums[2].item() == 0.0
    assert correct.tolist() == hits
    for ours, theirs in zip(mine, naively, strict=True):
        if theirs is None:  # the depth without rows
            assert ours.shape == (0, SIZE)
        else:
            assert (ours - theirs).abs().max() < 1e-12
    once = [min(chunk, TEACHER_ROWS - start) for start in range(0, TEACHER_ROWS, chunk)]
    assert teacher.asked == once * (2 if upstream == "other" else 1)


def test_without_rows_sums_and_gradients_are_exactly_zero() -> None:
    weight, hidden = output_layer().requires_grad_(), torch.empty(0, SIZE, dtype=torch.float64, requires_grad=True)
    lesson = Lesson(Teacher(), 0, [torch.empty(0, dtype=torch.long)] * 2, "ce")
    sums, correct = distil(lesson, [hidden, hidden], weight, SCALES[:2])
    sums.sum().backward()
    assert (sums.tolist(), correct.tolist()) == ([0.0, 0.0], [0, 0])
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_without_gradients_there_are_only_values() -> None:
    weight, *hidden = (tensor.detach() for tensor in learnable())
    teacher = Teacher()
    lesson = Lesson(teacher, TEACHER_ROWS, [torch.tensor(rows, dtype=torch.long) for rows in ROWS], "ce")
    sums, _ = distil(lesson, hidden, weight, SCALES)
    assert not sums.requires_grad
    expected = naive(teacher.table, hidden, weight, "ce")[0]
    assert sums.tolist() == pytest.approx([value.item() for value in expected])


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_frozen_output_layer_gets_no_gradient_and_the_states_still_do(factor: float) -> None:
    teacher = Teacher()
    lesson = Lesson(teacher, TEACHER_ROWS, [torch.tensor(rows, dtype=torch.long) for rows in ROWS], "ce")
    found = []
    for form in ("ours", "naive"):
        weight, *hidden = learnable()
        weight.requires_grad_(False)
        sums = distil(lesson, hidden, weight, SCALES)[0] if form == "ours" else naive(teacher.table, hidden, weight, "ce")[0]
        sum(factor * scale * value for scale, value in zip(SCALES, sums, strict=True)).backward()
        assert weight.grad is None
        found.append([state.grad for state, rows in zip(hidden, ROWS, strict=True) if rows])
    assert all((ours - theirs).abs().max() < 1e-12 for ours, theirs in zip(*found, strict=True))


def test_the_gradients_are_there_once() -> None:
    weight, *hidden = learnable()
    lesson = Lesson(Teacher(), TEACHER_ROWS, [torch.tensor(rows, dtype=torch.long) for rows in ROWS], "ce")
    total = distil(lesson, hidden, weight, SCALES)[0].sum()
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="one backward pass"):
        total.backward()
