"""Distillation through a large trainable output layer, for all depths of a head at once.

Neither the head's logits nor the teacher's probabilities are ever whole in memory, a teacher row is computed once for all the
depths that learn from it, and the output layer has one gradient in memory, not one a depth.

Shapes: K depths, N_k rows of depth k, M teacher rows, d hidden size, V columns of the head's vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import losses
from .losses import SoftLoss, add_product, product_dtype, soft_loss

Teacher = Callable[[slice], Tensor]  # some of the M teacher rows -> their probabilities [rows, V]


@dataclass(frozen=True)
class Lesson:
    """What is learned. rows: a depth each [N_k], the teacher row of every state, ascending, none twice; count: M."""

    teacher: Teacher
    count: int
    rows: Sequence[Tensor]
    loss: SoftLoss

    def run(
        self, hidden: Sequence[Tensor], weight: Tensor, scales: Tensor | None, products: torch.dtype, frozen: bool
    ) -> tuple[Tensor, Tensor, list[Tensor], Tensor | None]:
        """Sums [K], right first choices [K]; with `scales` [K], the gradients of Σ_k scale_k · sum_k to hidden and weight."""
        precise = torch.promote_types(weight.dtype, torch.float32)
        sums = torch.zeros(len(hidden), dtype=precise, device=weight.device)
        correct = torch.zeros(len(hidden), dtype=torch.long, device=weight.device)
        to_hidden = [torch.empty_like(state) for state in hidden] if scales is not None else []
        to_weight = torch.zeros_like(weight) if scales is not None and not frozen else None
        states, output = [state.to(products) for state in hidden], weight.to(products)
        starts = range(0, self.count, losses.CHUNK_ROWS)
        edges = torch.tensor([*starts, self.count], device=weight.device)
        cuts = torch.stack([torch.searchsorted(rows, edges) for rows in self.rows]).tolist()
        for chunk, start in enumerate(starts):
            p = self.teacher(slice(start, start + losses.CHUNK_ROWS))
            choice = p.argmax(-1)
            for k, state in enumerate(states):
                part = slice(cuts[k][chunk], cuts[k][chunk + 1])
                if part.start == part.stop:
                    continue
                rows = self.rows[k][part] - start
                log_q = torch.log_softmax(state[part] @ output.T, -1, dtype=precise)
                correct[k] += (log_q.argmax(-1) == choice[rows]).sum()
                value, grad = soft_loss(log_q, p if len(rows) == len(p) else p[rows], self.loss)
                sums[k] += value
                if scales is None:
                    continue
                grad = grad.mul_(scales[k]).to(products)
                to_hidden[k][part] = grad @ output
                if to_weight is not None:
                    add_product(to_weight, grad.T, state[part])
        return sums, correct, to_hidden, to_weight


class _Distillation(torch.autograd.Function):
    """Gradients are formed in the forward pass, while a chunk's logits exist, for the scales that the sums will most likely get
    in the total. Where they get others (another normalisation than this batch's own), they are formed anew."""

    @staticmethod
    def forward(ctx: Any, lesson: Lesson, scales: Tensor, weight: Tensor, *hidden: Tensor) -> tuple[Tensor, Tensor]:
        ctx.lesson, ctx.how = lesson, (product_dtype(weight), not ctx.needs_input_grad[2])
        with torch.autocast(weight.device.type, enabled=False):
            guess = scales if any(ctx.needs_input_grad) else None
            sums, correct, *ctx.gradients = lesson.run(hidden, weight, guess, *ctx.how)
        ctx.save_for_backward(scales, weight, *hidden)
        ctx.mark_non_differentiable(correct)
        return sums, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scales, weight, *hidden = ctx.saved_tensors
        assert ctx.gradients is not None, "the gradients were scaled in place: there is one backward pass"
        (to_hidden, to_weight), ctx.gradients = ctx.gradients, None
        learned = [k for k, state in enumerate(hidden) if len(state)]
        ratios = (grads[0] / scales)[learned]
        if learned and bool(((ratios - ratios[0]).abs() > 1e-6 * ratios[0].abs()).any()):
            del to_hidden, to_weight
            _, _, to_hidden, to_weight = ctx.lesson.run(hidden, weight, grads[0], *ctx.how)
        elif learned:
            for gradient in (*to_hidden, *([] if to_weight is None else [to_weight])):
                gradient.mul_(ratios[0])
        return None, None, to_weight, *to_hidden


def distil(lesson: Lesson, hidden: Sequence[Tensor], weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over rows of `soft_loss` for each depth [K], and how many rows have the teacher's first choice [K].

    hidden: a depth each [N_k, d]; weight: [V, d]; scales: [K], what the sums will be weighted with in the total, so that one
    pass is enough; the gradients are right for any. Zero rows give exactly 0.0.
    """
    sums, correct = _Distillation.apply(lesson, scales, weight, *hidden)
    return sums, correct
