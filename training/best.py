"""Which of two held-out looks saw the better head."""

from collections.abc import Sequence

Counts = Sequence[Sequence[int]]  # [emitted, rounds] of each judged prompt, in an order that all looks share


def better(tau: float, by_prompt: Counts, best_tau: float, best_by_prompt: Counts) -> bool:
    """By tau over the prompts that both looks judged, where it is known which: a time budget may have stopped either."""
    common = min(len(by_prompt), len(best_by_prompt))
    if common:
        tau, best_tau = tau_of(by_prompt[:common]), tau_of(best_by_prompt[:common])
    return tau > best_tau


def tau_of(counts: Counts) -> float:
    """0 where every answer ended before its first round."""
    rounds = sum(its for _, its in counts)
    return sum(emitted for emitted, _ in counts) / rounds if rounds else 0.0
