"""The verbs behind `headstart tree` and `headstart advise`: which tree a run's head should fill."""

from collections.abc import Sequence
from pathlib import Path

from .build import build_evaluator, build_prompts
from .build_data import build_conversations, held_out
from .errors import UserError
from .evaluation.advise import Advice, advise, measure_latency, measured
from .evaluation.evaluate import Evaluator
from .evaluation.tree_search import Found, RankCounts, best_tree, count_ranks
from .heads.base import DraftHead
from .heads.verifier import Verifier
from .progress import say
from .runs import open_run
from .training.recipe import Recipe

DEPTH = 5  # levels, where neither the head nor the caller sets a limit
RANKS = 16  # choices a level that are counted


def search_tree(run_folder: Path, nodes: int, depth: int | None, prompts: int) -> tuple[Found, RankCounts]:
    """The best static tree of `nodes` nodes, by ranks counted on prompts of the training files, which no result is about."""
    recipe, head, verifier = open_run(run_folder)
    ranks = calibrate(recipe, head, verifier, levels(head, depth), prompts)
    found = best_tree(ranks.shares, nodes)
    if not found.paths:
        raise UserError(f"{run_folder}: none of the head's first {RANKS} choices is ever right; train it longer")
    return found, ranks


def advise_run(
    run_folder: Path, batches: Sequence[int], nodes: int, depth: int | None, prompts: int, measure: bool
) -> dict[int, list[Advice]]:
    """By batch size, the trees that are predicted to be fastest, the fastest first; measured on held-out prompts if asked."""
    recipe, head, verifier = open_run(run_folder)
    depth = levels(head, depth)
    evaluator = build_evaluator(recipe, verifier, held_out(recipe))
    ranks = calibrate(recipe, head, verifier, depth, prompts)
    found = {}
    for batch in batches:
        say(f"measuring latencies at batch {batch}")
        latency = measure_latency(evaluator, head, batch, nodes, depth)
        found[batch] = advise(latency, ranks, batch, nodes)
        if measure:
            say(f"decoding with {len(found[batch])} trees at batch {batch}")
            found[batch] = measured(evaluator, head, found[batch], batch)
    return found


def levels(head: DraftHead, depth: int | None) -> int:
    if head.depth is not None and depth is not None and depth > head.depth:
        raise UserError(f"--depth {depth}: this head drafts {head.depth} tokens at most")
    return depth or head.depth or DEPTH


def calibrate(recipe: Recipe, head: DraftHead, verifier: Verifier, depth: int, count: int) -> RankCounts:
    budget, limit = recipe.evaluation.max_new_tokens, verifier.facts.max_position_embeddings
    prompts = [p for p in build_prompts(verifier, build_conversations(recipe).train, count) if len(p.ids) + budget <= limit]
    if not prompts:
        raise UserError(f"data.train: no prompt leaves room for {budget} new tokens within the verifier's limit of {limit}")
    say(f"counting which of the head's choices are right on {len(prompts)} prompts of the training files")
    evaluator = Evaluator(verifier, prompts, budget, recipe.evaluation.batch)
    return count_ranks(evaluator, head, depth, RANKS)
