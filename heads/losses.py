"""Cross-entropy through a large vocabulary without ever holding [rows, vocabulary] logits.

Shapes: N rows, d hidden size, V columns (the head's vocabulary, pruned or whole), M teacher rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

SoftLoss = Literal["ce", "kl", "tv", "lk"]
CHUNK_ROWS = 256  # rows of logits in memory at once: large enough for a full-speed matrix product


@dataclass(frozen=True)
class HeadLoss:
    """Loss terms of one batch, a term for each depth k, as sums so that several batches can share one normalisation.

    sums: [K] with gradients; counts: [K] supervised labels behind each sum; correct: [K] labels that the head's first
    choice hit; weights: [K], the decay of the total; parts: [K] each, what `sums` is a mixture of, if it is one, for the log;
    last_is_verifier: the last term is no depth but the verifier's own (Medusa-2).
    """

    sums: Tensor
    counts: Tensor
    correct: Tensor
    weights: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    last_is_verifier: bool = False

    def total(self, counts: Tensor | None = None) -> Tensor:
        """Σ_k weight_k · sum_k / count_k, exactly 0.0 where nothing is supervised.

        counts: [K], the supervised labels of the whole optimizer step where other batches or ranks belong to it.
        """
        counts = self.counts if counts is None else counts
        return (self.weights * self.sums / counts.clamp(min=1)).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are formed chunk by chunk in the forward pass, while the logits exist, and only scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor | None, soft: SoftLoss
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        products = product_dtype(hidden)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        hidden, weight = hidden.to(products), weight.to(products)
        loss = torch.zeros((), dtype=precise, device=hidden.device)
        correct = torch.zeros((), dtype=torch.long, device=hidden.device)
        for start in range(0, hidden.shape[0], CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            log_q = torch.log_softmax(hidden[part] @ weight.T, -1, dtype=precise)
            target = targets[part] if rows is None else targets[rows[part]]
            if target.dim() == 1:
                correct += (log_q.argmax(-1) == target).sum()
                picked = target[:, None]
                loss -= log_q.gather(1, picked).sum()
                grad = log_q.exp_()
                grad.scatter_add_(1, picked, torch.full_like(picked, -1.0, dtype=precise))
            else:
                correct += (log_q.argmax(-1) == target.argmax(-1)).sum()
                value, grad = soft_loss(log_q, target, soft)
                loss += value
            grad = grad.to(products)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad.T, hidden[part])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return (
            None if grad_hidden is None else grad_hidden * scale,
            None if grad_weight is None else grad_weight * scale,
            None,
            None,
            None,
        )


def product_dtype(x: Tensor) -> torch.dtype:
    """What matrix products of x are computed in: autocast's dtype under autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, without a copy of `total`'s size where the dtypes allow it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def soft_loss(log_q: Tensor, p: Tensor, loss: SoftLoss) -> tuple[Tensor, Tensor]:
    """Distance of q from p, both [N, V], summed over rows, and its gradient to the logits of q (made in log_q's memory).

    With α = Σ_v min(p, q), the probability that a draft from q is accepted: ce is -Σ p log q, kl is Σ p log(p / q), tv is 1 - α
    (the total variation), lk is -log α (Samarin 2026).
    """
    if loss in ("ce", "kl"):
        value = -torch.dot(p.flatten(), log_q.flatten())
        if loss == "kl":
            value = value + torch.xlogy(p, p).sum()
        return value, log_q.exp_().sub_(p)
    q = log_q.exp_()
    below = q < p  # where one more unit of q is one more of α
    accepted = torch.minimum(p, q).sum(-1, keepdim=True)
    rise = q * (below.to(q.dtype) - (q * below).sum(-1, keepdim=True))  # of α, by logit
    if loss == "tv":
        return (1 - accepted).sum(), -rise
    accepted = accepted.clamp(min=torch.finfo(q.dtype).tiny)
    return -accepted.log().sum(), -rise / accepted


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor | None = None, soft: SoftLoss = "ce"
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of logits `hidden @ weight.T` and how many rows have the right first choice.

    hidden: [N, d]; weight: [V, d]; targets: labels [N] (long, columns of weight) or probabilities [N, V]; with `rows` [N]
    the target of row i is targets[rows[i]]. Zero rows give exactly 0.0. Probabilities: the term is `soft_loss`.
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets, rows, soft)


class _ChunkedTerms(torch.autograd.Function):
    """As above for any sum over rows: the gradient is formed while a chunk's graph exists."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, terms: "Terms", weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(hidden)
        parts = torch.zeros_like(weights)
        correct = torch.zeros((), dtype=torch.long, device=hidden.device)
        for start in range(0, hidden.shape[0], CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            with torch.enable_grad():
                leaf = hidden[rows].detach().requires_grad_()
                found, hits = terms(leaf, rows)
                (gradient[rows],) = torch.autograd.grad(torch.dot(weights, found), leaf)
            parts += found.detach()
            correct += hits
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(parts, correct)
        return torch.dot(weights, parts), parts, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None


Terms = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def chunked_terms(hidden: Tensor, terms: Terms, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weighted mixture of loss terms through a frozen output layer, a few rows of logits at a time.

    hidden: [N, d]; terms(part of hidden, its slice) -> P sums over those rows [P], rows with the right first choice [];
    weights: [P]. Returns the mixture with its gradient to `hidden` alone, the P sums and the count. Zero rows give 0.0.
    """
    return _ChunkedTerms.apply(hidden, terms, weights)
