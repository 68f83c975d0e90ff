"""Acceptance metrics, named and defined as in the documentation, from the rounds of decoded prompts.

A round emits the drafts that were accepted and one token of the verifier's own. Tokens after a stop token or beyond the budget
are not emitted, so the last round may count less; the token that the prefill decides belongs to no round.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from .decode import Decoded, Round

CONTEXT_BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192)  # upper edges, tokens


def acceptance(rounds: Sequence[Round], depth: int) -> dict[str, Any]:
    """Counts and metrics over all rounds (micro average). depth: of the tree, the length of `survival`.

    tau = emitted / rounds = 1 + Σ survival; survival[i]: share of rounds with at least i + 1 accepted drafts; conditional:
    survival[i] / survival[i - 1]; draft_acceptance_rate = accepted / drafted. None where nothing was counted.
    """
    accepted = [max(r.emitted - 1, 0) for r in rounds]
    total, drafted = sum(accepted), sum(r.drafted for r in rounds)
    emitted = sum(r.emitted for r in rounds)
    reached = [sum(a >= i for a in accepted) for i in range(depth + 1)]
    return {
        "rounds": len(rounds),
        "emitted": emitted,
        "drafted": drafted,
        "accepted": total,
        "tau": ratio(emitted, len(rounds)),
        "survival": [ratio(now, len(rounds)) for now in reached[1:]],
        "conditional": [ratio(now, before) for before, now in pairwise(reached)],
        "draft_acceptance_rate": ratio(total, drafted),
        "accepted_histogram": [accepted.count(i) for i in range(depth + 1)],
    }


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def by_category(decoded: Sequence[Decoded], categories: Sequence[str | None]) -> dict[str, dict[str, Any]]:
    """tau, rounds and emitted of each category of prompts that has one."""
    names = sorted({name for name in categories if name is not None})
    return {
        name: brief(r for answer, own in zip(decoded, categories, strict=True) if own == name for r in answer.rounds)
        for name in names
    }


def by_context(decoded: Sequence[Decoded]) -> dict[str, dict[str, Any]]:
    """The same by tokens before the round: {"0-127": .., "128-255": ..}, empty ranges left out."""
    rounds = [r for answer in decoded for r in answer.rounds]
    found = {}
    low = 0
    for high in (*CONTEXT_BUCKETS, None):
        inside = [r for r in rounds if r.context >= low and (high is None or r.context < high)]
        if inside:
            found[f"{low}+" if high is None else f"{low}-{high - 1}"] = brief(inside)
        low = high or low
    return found


def brief(rounds: Iterable[Round]) -> dict[str, Any]:
    rounds = list(rounds)
    emitted = sum(r.emitted for r in rounds)
    return {"tau": ratio(emitted, len(rounds)), "rounds": len(rounds), "emitted": emitted}
