"""`headstart train`: a head from a recipe, into a run folder."""

from pathlib import Path
from typing import Any

from .build import build_evaluator, build_plan, build_settings, build_tree
from .build_heads import build_head, check_trees, ready
from .build_start import start_from
from .build_strategy import build_strategy, check_processes
from .data.agreement import a_few
from .data.left_out import left_out
from .data.stored import StoredFeatures
from .errors import UserError
from .evaluation.look import look
from .evaluation.record import made_with
from .heads.base import DraftHead
from .heads.medusa2 import AdaptedMedusa
from .progress import say
from .provenance import provenance
from .ranks import is_first
from .runs import START, check_claim, claim, write_provenance
from .training.recipe import Recipe
from .training.trainer import fit
from .training.wandb_log import wandb_report
from .workshop import Workshop, open_workshop


def train(recipe: Recipe, run_folder: Path, workshop: Workshop | None = None) -> None:
    """Train the recipe's head into the run folder, or go on with what is there. Refuses a folder of another recipe.

    Stopped by SIGTERM, it saves and ends the process with 0: the same call goes on.
    """
    check_processes(recipe)
    if not any(drafter.kind == "head" for drafter in recipe.evaluation.drafters):
        raise UserError("evaluation.drafters: training looks at what the head itself drafts; add head to the list")
    strategy = build_strategy(recipe.training)
    if is_first():
        check_claim(run_folder, recipe)
    workshop = workshop or open_workshop(recipe)
    head, features = ready(recipe, workshop.verifier, new_head(recipe, run_folder, workshop), workshop.features)
    evaluator = workshop.evaluator
    if isinstance(head, AdaptedMedusa):  # judged with the adapter where it learns
        evaluator = build_evaluator(recipe, workshop.verifier, workshop.holdout)
    section, plan = recipe.training, build_plan(recipe, workshop.samples)
    if isinstance(head, AdaptedMedusa) and (len(plan) - 1) / len(plan) < head.together.heads_only:
        raise UserError(f"head.adapter.heads_only: {head.together.heads_only} of {len(plan)} steps leave none to the adapter")
    if is_first():
        begin(recipe, run_folder, head, workshop)  # only now: bad input leaves no folder behind
    tree = build_tree(recipe.evaluation.trees[0])  # the cheapest look that still decodes for real
    options = recipe.tracking.wandb.model_dump() if recipe.tracking.wandb else None
    with wandb_report(options, run_folder, recipe.model_dump(mode="json")) as report:
        progress = fit(
            head,
            workshop.verifier,
            features,
            plan,
            build_settings(recipe),
            run_folder,
            lambda h: told(look(evaluator, h, tree, section.evaluate_prompts, section.evaluate_seconds)),
            strategy,
            report,
            workshop.evaluator.verifier,
        )
    if progress.judged < len(plan):
        say(f"stopped at step {progress.step} of {len(plan)}, saved; the same command goes on")
        raise SystemExit(0)


def new_head(recipe: Recipe, run_folder: Path, workshop: Workshop) -> DraftHead:
    """The head as training starts with it, on the verifier's device."""
    verifier = workshop.verifier
    if (run_folder / START).is_dir():
        head = start_from(run_folder / START, recipe.head).to(verifier.device)
    else:
        head = build_head(recipe, verifier, workshop.samples, workshop.features)
    assert not head.needs or head.needs == workshop.layers, "the workshop was opened for other layers"
    if isinstance(workshop.features, StoredFeatures):
        assert head.needs or workshop.features.layout.everywhere, "the store is of a head that reads less of the last state"
    check_trees(recipe, head.depth, len(head.target_ids))
    if head.columns is not None:
        missing, there = left_out(head, workshop.features, a_few(workshop.samples))
        say(f"{missing} of {there} labels of a few samples are outside the head's vocabulary: they are not learned")
    return head


def begin(recipe: Recipe, run_folder: Path, head: DraftHead, workshop: Workshop) -> None:
    """Write what a run folder starts with."""
    claim(run_folder, recipe)
    workshop.conversations.skips.write(run_folder / "skipped.jsonl")
    made = made_with(head, workshop.layers if head.needs else ())
    write_provenance(run_folder, provenance(workshop.verifier, workshop.samples) | {"head": made})


def told(found: dict[str, Any]) -> dict[str, Any]:
    """A look, after a word where its time was too short for all prompts."""
    if found["prompts"] < found["of"]:
        say(f"held out: {found['prompts']} of {found['of']} prompts fit into training.evaluate_seconds; heads are compared on "
            "the prompts that both were judged on")  # fmt: skip
    return found
