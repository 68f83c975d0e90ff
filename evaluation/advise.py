"""Which tree makes decoding fastest on this device: measured latencies, measured ranks, and the speed-up they predict.

S = tau / ((v(N) + draft + other) / v(1)): v(N) a verifier pass over N nodes, draft the drafter's levels, other the loop's own
cost.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch

from ..heads.drafter import Drafter
from ..heads.verifier import Features, Verifier
from .decode import Clock
from .evaluate import Evaluator
from .tree import StaticTree, chain
from .tree_search import RankCounts, best_tree, chain_tau

SIZES = (1, 2, 4, 8, 16, 32, 64)  # nodes at which a verifier pass is measured, up to what is asked
WIDTHS = (1, 4, 16)  # nodes of a level at which the drafter is measured
REPEATS = 5
SHOWN = 3  # trees told a batch size


@dataclass(frozen=True)
class Latency:
    """Seconds, at one batch size. verify: by nodes; observe: the drafter's first level; expand: by nodes of a further level;
    other: the loop's own cost of a round."""

    verify: dict[int, float]
    observe: float
    expand: dict[int, float]
    other: float

    def verifying(self, nodes: int) -> float:
        return interpolated(self.verify, nodes)

    def drafting(self, tree: StaticTree) -> float:
        widths = [len(level.expand) for level in tree.levels if level.expand]
        return self.observe + sum(interpolated(self.expand, width) for width in widths)

    def speedup(self, tree: StaticTree, tau: float) -> float:
        one = self.verifying(1)
        return tau / ((self.verifying(tree.nodes) + self.drafting(tree) + self.other) / one)


def interpolated(measured: dict[int, float], at: int) -> float:
    return float(numpy.interp(at, list(measured), list(measured.values())))


@dataclass(frozen=True)
class Advice:
    """A tree for a batch size. tau and speedup are predicted; measured: {"tau", "speedup"} of real decoding, or None."""

    batch: int
    tree: StaticTree
    tau: float
    speedup: float
    measured: dict[str, float | None] | None = None

    def describe(self) -> dict[str, Any]:
        predicted = {"tau": self.tau, "speedup": self.speedup}
        return {"batch": self.batch, "tree": self.tree.describe(), "predicted": predicted, "measured": self.measured}


def advise(latency: Latency, ranks: RankCounts, batch: int, nodes: int) -> list[Advice]:
    """The chains and searched trees of every depth and of the measured sizes, the fastest first, at most SHOWN of them."""
    shares, rated = ranks.shares, list[Advice]()
    for depth in range(1, len(shares) + 1):
        found = [(chain(depth), chain_tau(shares, depth))] if depth < nodes else []
        for size in (size for size in latency.verify if size > 1):
            best = best_tree(shares[:depth], size)
            found.append((best.tree, best.tau))
        rated += [Advice(batch, tree, tau, latency.speedup(tree, tau)) for tree, tau in found if tree.depth == depth]
    unique = {tuple(advice.tree.paths): advice for advice in reversed(rated)}
    return sorted(unique.values(), key=lambda advice: -advice.speedup)[:SHOWN]


def measure_latency(evaluator: Evaluator, drafter: Drafter, batch: int, nodes: int, depth: int) -> Latency:
    """On this device, behind prompts of the middle length with half of an answer."""
    verifier = evaluator.verifier
    lengths = sorted(len(prompt.ids) for prompt in evaluator.prompts)
    context = lengths[len(lengths) // 2] + evaluator.max_new_tokens // 2
    sizes = sorted({size for size in SIZES if size < nodes} | {nodes})
    verify = {size: seconds(verifier, verifier_pass(verifier, batch, context, size)) for size in sizes}
    observe, expand = drafting_passes(verifier, drafter, batch, context)
    decoded, spent = evaluator.decode(drafter, chain(min(depth, 2)), evaluator.prompts[:1] * batch, batch)
    other = spent["other"] / max(1, *(len(answer.rounds) for answer in decoded))
    first = seconds(verifier, observe)
    by_width = {}
    for width in WIDTHS if depth > 1 else ():
        by_width[width] = max(seconds(verifier, partial(expand, width)) - first, 0.0)
    return Latency(verify, first, by_width, other)


def seconds(verifier: Verifier, run: Callable[[], None]) -> float:
    """Of one call: the median, after a warm-up."""
    run()
    taken = []
    for _ in range(REPEATS):
        clock = Clock(verifier.device)
        run()
        clock.charge("verify")
        taken.append(clock.seconds["verify"])
    return statistics.median(taken)


def verifier_pass(verifier: Verifier, batch: int, context: int, nodes: int) -> Callable[[], None]:
    """A pass over `nodes` nodes behind `context` tokens, logits included; nothing is committed."""
    cache = verifier.new_cache(batch, context + nodes)
    verifier.prefill([[1] * context] * batch, cache)
    ids = torch.ones(batch, nodes, dtype=torch.long, device=verifier.device)
    seen = torch.ones(1, nodes, nodes, dtype=torch.bool, device=verifier.device).tril()
    depth = torch.arange(nodes, device=verifier.device)[None]

    def run() -> None:
        with torch.no_grad():
            verifier.logits(verifier.decode(ids, seen, depth, cache).last).argmax(-1)

    return run


def drafting_passes(
    verifier: Verifier, drafter: Drafter, batch: int, context: int
) -> tuple[Callable[[], None], Callable[[int], None]]:
    """The drafter's first level after one new token, and that level with a further one of some nodes behind it."""
    ids = torch.ones(batch, context, dtype=torch.long, device=verifier.device)
    features = verifier.features(ids, drafter.needs)
    one = Features(features.last[:, -1:], features.layers[:, -1:])
    session = drafter.begin(verifier, batch, context + 4 * REPEATS * (1 + len(WIDTHS)) + max(WIDTHS))
    session.start([[1] * context] * batch)
    session.observe(features, ids, [context] * batch)

    def observe() -> None:
        session.observe(one, ids[:, :1], [1] * batch)

    def expand(width: int) -> None:
        session.observe(one, ids[:, :1], [1] * batch)
        session.expand(ids[:, :1].expand(-1, width), torch.full((batch, width), -1, device=ids.device))

    return observe, expand


def measured(evaluator: Evaluator, drafter: Drafter, advice: Sequence[Advice], batch: int) -> list[Advice]:
    """The same with what real decoding of the evaluator's prompts gives, `batch` at a time; plain decoding takes turns."""
    prompts = [evaluator.prompts[i % len(evaluator.prompts)] for i in range(max(batch, len(evaluator.prompts)))]
    contenders: list[tuple[Drafter | None, StaticTree]] = [(None, chain(0)), *((drafter, one.tree) for one in advice)]
    times: list[list[float]] = [[] for _ in contenders]
    taus: list[float | None] = [None] * len(contenders)
    for _ in range(max(3, evaluator.timing_repeats)):
        for i, (who, tree) in enumerate(contenders):
            decoded, spent = evaluator.decode(who, tree, prompts, batch)
            rounds = [r.emitted for answer in decoded for r in answer.rounds]
            times[i].append(sum(spent.values()))
            taus[i] = sum(rounds) / len(rounds) if rounds else None
    plain, *others = (statistics.median(each) for each in times)
    return [
        Advice(one.batch, one.tree, one.tau, one.speedup, {"tau": tau, "speedup": plain / own})
        for one, tau, own in zip(advice, taus[1:], others, strict=True)
    ]
