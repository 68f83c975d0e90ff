"""What a run's files say about its head: alpha against KL while it was trained, how many drafts pay, tau by kind of text."""

from collections.abc import Sequence

from scipy.stats import spearmanr

from .analysis_file import Analysis, Curve, Depth, Lengths, Measured, Part, Stage, Stages
from .evaluation_file import Result
from .run_folder import Run

ALPHAS = (0.5, 0.7, 0.85)
LONGEST = 16  # drafts
COST = 0.1  # of a draft in verifier passes, where no times were taken


def analyse(run: Run, top_k: Sequence[Depth], cost: float | None) -> Analysis:
    """cost: of drafting one token in verifier passes; None takes the measured one."""
    best = run.best
    return Analysis(
        stages=stages(run),
        lengths=lengths(run, cost),
        top_k=list(top_k),
        by_category={name: Part(**part.model_dump()) for name, part in best.by_category.items()},
        by_context={name: Part(**part.model_dump()) for name, part in best.by_context.items()},
    )


def stages(run: Run) -> Stages:
    looks = [
        Stage(step=line.step, alpha=look.alpha, kl=look.kl, tau=look.tau)
        for line in run.metrics
        if (look := line.held_out) is not None and look.alpha is not None and look.kl is not None
    ]
    if len(looks) < 3 or len({look.alpha for look in looks}) == 1 or len({look.kl for look in looks}) == 1:
        return Stages(looks=looks, spearman=None, p=None)
    found = spearmanr([look.kl for look in looks], [look.alpha for look in looks])
    return Stages(looks=looks, spearman=float(found.statistic), p=float(found.pvalue))


def lengths(run: Run, cost: float | None) -> Lengths:
    chains = [result for result in run.evaluation.results if result.tree.kind == "chain" and result.lossless]
    measured = next((c for result in chains if result.drafter == "head" and (c := measured_cost(result)) is not None), None)
    used = measured if cost is None and measured is not None else COST if cost is None else cost
    return Lengths(
        cost=used,
        cost_is_measured=cost is None and measured is not None,
        curves=[curve(alpha, used) for alpha in ALPHAS],
        measured=[measured_chain(result, result.tau) for result in chains if result.tau is not None],
    )


def measured_chain(result: Result, tau: float) -> Measured:
    tree, tokens = str(result.tree), cumulated(result)
    return Measured(drafter=result.drafter, tree=tree, temperature=result.temperature, tau=tau, tokens=tokens)


def measured_cost(result: Result) -> float | None:
    """Seconds of drafting a token of a chain / of verifying a round: both are per round, so rounds cancel out."""
    draft, verify = result.seconds.get("draft"), result.seconds.get("verify")
    if result.timing is None or not draft or not verify:
        return None
    return draft / result.tree.depth / verify


def cumulated(result: Result) -> list[float]:
    """Tokens a pass of chains of 0, 1, .. drafts, as far as this one goes."""
    found = [1.0]
    for share in result.survival:
        found.append(found[-1] + (share or 0.0))
    return found


def curve(alpha: float, cost: float) -> Curve:
    tokens = [expected_tokens(alpha, n) for n in range(LONGEST + 1)]
    speedup = [count / (1 + cost * n) for n, count in enumerate(tokens)]
    return Curve(alpha=alpha, tokens=tokens, speedup=speedup, best=speedup.index(max(speedup)))


def expected_tokens(alpha: float, drafts: int) -> float:
    """Of a verifier pass over a chain whose every draft is accepted with probability alpha, on its own (Leviathan 2023)."""
    return float(drafts + 1) if alpha == 1 else (1 - alpha ** (drafts + 1)) / (1 - alpha)
