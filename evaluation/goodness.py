"""Is sampled text what the verifier would sample? A chi-square test over every token, each against its own distribution.

A token drawn from its conditional distribution p lies at F + v * p on the unit interval, F the probability of all likelier
tokens and v uniform: over any text these places are independent and uniform exactly when every token was drawn from its p
(the randomised probability integral transform). They are counted in equal bins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import chisquare
from torch import Tensor

from ..heads.verifier import Verifier
from .sampling import Sampling, probabilities

BINS = 20
ROWS = 64  # distributions over the whole vocabulary in memory at once
PLANTED = 0.05  # share of tokens that the planted bias replaces by the verifier's likeliest one


@dataclass
class Places:
    """Counts by bin, of the text and of the same text with the planted bias."""

    true: Tensor
    planted: Tensor

    @classmethod
    def none(cls) -> "Places":
        return cls(torch.zeros(BINS, dtype=torch.long), torch.zeros(BINS, dtype=torch.long))

    def __add__(self, other: "Places") -> "Places":
        return Places(self.true + other.true, self.planted + other.planted)

    @property
    def tokens(self) -> int:
        return int(self.true.sum())


def p_value(counts: Tensor) -> float:
    """Of Pearson's chi-square test that all bins are equally likely."""
    return float(chisquare(counts.numpy()).pvalue)


@torch.no_grad()
def places(
    verifier: Verifier, texts: Sequence[tuple[Sequence[int], Sequence[int]]], sampling: Sampling, skip: int,
    generator: torch.Generator,
) -> Places:  # fmt: skip
    """Where the tokens of answers lie in the distributions that `sampling` makes, by one plain forward pass over
    (prompt, answer).

    skip: how many of an answer's first tokens are left out (the prefill's own is no draft's).
    """
    texts = [(prompt, answer) for prompt, answer in texts if len(answer) > skip]
    if not texts:
        return Places.none()
    ids = torch.zeros(len(texts), max(len(p) + len(a) for p, a in texts), dtype=torch.long)
    wanted = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(texts):
        ids[row, : len(prompt) + len(answer)] = torch.as_tensor([*prompt, *answer])
        wanted[row, len(prompt) + skip : len(prompt) + len(answer)] = True
    ids, wanted = ids.to(verifier.device), wanted.to(verifier.device)
    states = verifier.features(ids[:, :-1]).last[wanted[:, 1:]]
    found = Places.none()
    for hidden, token, (row, position) in zip(
        states.split(ROWS), ids[wanted].split(ROWS), (at.T for at in wanted.nonzero().split(ROWS)), strict=True
    ):
        before = None
        if sampling.repetition_penalty != 1:
            before = tokens_before(ids[row], position, verifier.facts.vocab_size)
        p = probabilities(verifier.logits(hidden), sampling, before)
        share, uniform = torch.rand(2, len(token), generator=generator, dtype=torch.float64).to(p)
        biased = torch.where(share < PLANTED, p.argmax(-1), token)
        found += Places(bins(p, token, uniform), bins(p, biased, uniform))
    return found


def tokens_before(ids: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Which tokens stand before `position` [n] in its row of `ids` [n, T]: bool [n, V]. No position is 0."""
    before = torch.arange(ids.shape[1], device=ids.device) < position[:, None]
    present = torch.zeros(len(ids), vocab_size, dtype=torch.bool, device=ids.device)
    return present.scatter(1, ids.where(before, ids[:, :1]), True)


def bins(p: Tensor, token: Tensor, uniform: Tensor) -> Tensor:
    """p: [n, V]; token, uniform: [n] -> counts [BINS]. Tokens are ordered by probability, ties by id."""
    own = p.gather(1, token[:, None])
    index = torch.arange(p.shape[1], device=p.device)
    before = (p > own) | ((p == own) & (index < token[:, None]))
    place = (p * before).sum(1) + uniform * own[:, 0]
    return torch.bincount((place * BINS).long().clamp(0, BINS - 1), minlength=BINS).cpu()
