"""How a token is chosen: the verifier's processed distribution, the head's draws without replacement, and the dice.

Probabilities are float64 (float32 where a device has no more): residuals of the rules are differences of nearly equal numbers.

Shapes: B rows, V verifier ids, Q columns of a head's vocabulary, k children of a node.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..errors import UserError
from ..heads.batch import sent

Rule = Literal["candidates", "without_replacement", "typical"]
Dice = Callable[[Tensor], Tensor]  # weights [..., n], of any total -> a drawn index [...]


@dataclass(frozen=True)
class Sampling:
    """What the verifier samples from, and the rule by which drafts are verified. At temperature 0 every rule is greedy.

    top_k: the likeliest tokens kept (those as likely as the last one stay too); top_p: the smallest set of likeliest tokens of
    at least this probability; min_p: tokens of at least this share of the likeliest one's probability; repetition_penalty:
    logits of tokens already in prompt or answer are divided by it (multiplied where negative). In this order, the penalty and
    the temperature first.
    """

    temperature: float = 0.0
    rule: Rule = "candidates"
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.typical and self.repetition_penalty != 1:
            raise UserError("rule typical: it cannot take a repetition_penalty; use candidates or without_replacement")

    @property
    def applied(self) -> Rule | Literal["greedy"]:
        return "greedy" if self.temperature == 0 else self.rule

    @property
    def typical(self) -> bool:
        return self.applied == "typical"

    @property
    def draws_children(self) -> bool:
        return self.applied == "without_replacement"

    def for_certain_drafts(self) -> "Sampling":
        """The same for drafts that no distribution gave: a child that is drawn from a certainty is a candidate."""
        return replace(self, rule="candidates") if self.draws_children else self

    @property
    def lossless(self) -> bool:
        return not self.typical


GREEDY = Sampling()


def dice(seed: int) -> Dice:
    """Draws by one generator, on the CPU so that a seed means the same on every device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(weights: Tensor) -> Tensor:
        steps = weights.cumsum(-1)
        total = steps[..., -1:]
        uniform = sent(torch.rand(total.shape, generator=generator, dtype=torch.float64), weights.device).to(weights.dtype)
        mark = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(steps, mark, right=True)[..., 0]  # the first step beyond the mark: never one of weight 0

    return draw


def precise(x: Tensor) -> Tensor:
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def penalised(logits: Tensor, sampling: Sampling, present: Tensor) -> Tensor:
    """Logits [..., V] after the repetition penalty for the tokens of `present`, bool [..., V]."""
    x, penalty = precise(logits), sampling.repetition_penalty
    return torch.where(present, torch.where(x > 0, x / penalty, x * penalty), x)


def probabilities(logits: Tensor, sampling: Sampling, present: Tensor | None = None) -> Tensor:
    """The verifier's processed distribution. logits: [..., V]; present: bool [..., V], tokens that the penalty is for."""
    x = precise(logits) if present is None else penalised(logits, sampling, present)
    if sampling.temperature == 0:
        return torch.zeros_like(x).scatter(-1, x.argmax(-1, keepdim=True), 1.0)
    x = (x - x.amax(-1, keepdim=True)) / sampling.temperature  # finite however small the temperature
    if sampling.top_k is not None and sampling.top_k < x.shape[-1]:
        x = x.masked_fill(x < x.topk(sampling.top_k).values[..., -1:], float("-inf"))
    p = x.softmax(-1)
    if sampling.top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p  # the likelier ones suffice already
        p = p.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), 0.0)
    if sampling.min_p > 0:
        p = p.masked_fill(p < sampling.min_p * p.amax(-1, keepdim=True), 0.0)
    return p / p.sum(-1, keepdim=True)


def draft_probabilities(log_q: Tensor, temperature: float) -> Tensor:
    """What a head's children are drawn from: log_q [..., Q] at the temperature. Raises UserError where it is no number."""
    log_q = precise(log_q)
    unknown = (log_q == float("-inf")).all(-1, keepdim=True)  # nothing is drafted here: any token is as good
    log_q = log_q.masked_fill(unknown, 0.0)
    q = ((log_q - log_q.amax(-1, keepdim=True)) / temperature).softmax(-1)
    if bool(q.isnan().any()):
        raise UserError("the head's draft probabilities are not numbers (NaN): children cannot be drawn from them; the rule "
                        "candidates does not need them")  # fmt: skip
    return q


def remaining(q: Tensor, taken: Tensor) -> Tensor:
    """q [..., Q] with the taken columns (bool [..., Q]) gone, renormalised; once q is exhausted, uniform over the others."""
    rest = q.masked_fill(taken, 0.0)
    total = rest.sum(-1, keepdim=True)
    others = (~taken).to(q)
    return torch.where(total > 0, rest / total.clamp(min=torch.finfo(q.dtype).tiny), others / others.sum(-1, keepdim=True))


def draw_children(log_q: Tensor, count: int, temperature: float, draw: Dice) -> Tensor:
    """`count` columns drawn from q without replacement, in draw order: log_q [..., Q] -> [..., count]."""
    q = draft_probabilities(log_q, temperature)
    taken = torch.zeros_like(q, dtype=torch.bool)
    columns = []
    for _ in range(count):
        columns.append(draw(remaining(q, taken))[..., None])
        taken = taken.scatter(-1, columns[-1], True)
    return torch.cat(columns, -1)
