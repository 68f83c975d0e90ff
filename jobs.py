"""The verbs behind the command line: train a run folder, evaluate a run folder."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .build import build_evaluator, build_judge, build_samplings, build_settings, build_tree, build_verifier
from .build_data import Conversations, build_conversations, build_samples
from .build_heads import build_head, needed_layers
from .build_strategy import build_strategy, build_training_verifier, check_processes
from .data.chat import Sample
from .data.features import FeatureSource
from .data.packing import batch_plan
from .errors import UserError
from .evaluation.evaluate import Evaluator
from .evaluation.lossless import Gate, own_proof, proof
from .heads.base import DraftHead, check_fits
from .heads.files import write_text
from .heads.hub import load_head
from .heads.verifier import Verifier
from .progress import progress_bar, say
from .provenance import provenance
from .ranks import in_turn, is_first
from .runs import START, check_claim, claim
from .training.compiling import compile_layers
from .training.recipe import Recipe, load_recipe
from .training.sections.head import HeadSection
from .training.strategies.sharded import leading
from .training.trainer import fit
from .training.wandb_log import wandb_report

LEARNING = (
    "depth",
    "decay",
    "targets",
    "loss",
    "cross_entropy",
    "top_tokens",
    "noise",
    "noise_by_length",
)  # what a recipe may change of such a head


@dataclass
class Workshop:
    """What runs with the same verifier and data can share: built once, from the first recipe."""

    verifier: Verifier
    evaluator: Evaluator  # with the verifier in evaluation.dtype
    conversations: Conversations
    samples: list[Sample]
    features: FeatureSource
    layers: tuple[int, ...]  # that the features hold


def open_workshop(recipe: Recipe) -> Workshop:
    """Load the verifier, read the conversations, have them answered."""
    with in_turn():
        conversations = build_conversations(recipe)  # files first: they are the likelier mistake and cost nothing
    verifier = build_training_verifier(recipe)
    with leading(verifier) as leads:  # what the first process has the verifier answer, the others find stored
        if leads:
            samples, features = build_samples(recipe, verifier, conversations)
    if not is_first():
        samples, features = build_samples(recipe, verifier, conversations)
    for line in conversations.skips.summary(conversations.skips.read):
        say(f"left out: {line}")
    tokens, learned = sum(len(s.ids) for s in samples), sum(sum(s.mask) for s in samples)
    say(f"training on {len(samples)} samples: {tokens} tokens, {learned} supervised")
    judge = build_judge(recipe, verifier) if is_first() else verifier  # only the first process judges
    evaluator = build_evaluator(recipe, judge, conversations.holdout)
    return Workshop(verifier, evaluator, conversations, samples, features, needed_layers(recipe, verifier))


def train(recipe: Recipe, run_folder: Path, workshop: Workshop | None = None) -> None:
    """Train the recipe's head into the run folder, or go on with what is there. Refuses a folder of another recipe.

    Stopped by SIGTERM, it saves and ends the process with 0: the same call goes on.
    """
    check_processes(recipe)
    strategy = build_strategy(recipe.training)
    if is_first():
        check_claim(run_folder, recipe)
    workshop = workshop or open_workshop(recipe)
    verifier, training = workshop.verifier, workshop.samples
    if (run_folder / START).is_dir():
        head = start_from(run_folder / START, recipe.head).to(verifier.device)
    else:
        head = build_head(recipe, verifier, training, workshop.features)
    tree = build_tree(recipe.evaluation.trees[0])  # the cheapest look that still decodes for real
    section = recipe.training
    head.recompute = section.gradient_checkpointing
    if section.compile:
        compile_layers(head)
    plan = batch_plan([len(s.ids) for s in training], section.batch_tokens, section.seed, section.steps, section.epochs)
    assert not head.needs or head.needs == workshop.layers, "the workshop was opened for other layers"
    if is_first():
        claim(run_folder, recipe)  # only now: bad input leaves no folder behind
        workshop.conversations.skips.write(run_folder / "skipped.jsonl")
        write_text(run_folder / "provenance.json", json.dumps(provenance(verifier, training), indent=1) + "\n")
    options = recipe.tracking.wandb.model_dump() if recipe.tracking.wandb else None
    with wandb_report(options, run_folder, recipe.model_dump(mode="json")) as report:
        progress = fit(
            head,
            verifier,
            workshop.features,
            plan,
            build_settings(recipe),
            run_folder,
            lambda h: brief(workshop.evaluator.acceptance(h, tree, section.evaluate_prompts)),
            strategy,
            report,
            workshop.evaluator.verifier,
        )
    if progress.judged < len(plan):
        say(f"stopped at step {progress.step} of {len(plan)}, saved; the same command goes on")
        raise SystemExit(0)


def start_from(folder: Path, section: HeadSection) -> DraftHead:
    """An imported head to go on from. The recipe says how it learns; what it is made of, its vocabulary too, stays (C13)."""
    head = load_head(folder)
    said = section.model_dump(exclude_none=True)
    size = said.pop("vocabulary", said.pop("draft_vocabulary", head.config.vocab_size))
    if size != len(head.target_ids):
        raise UserError(f"head: the recipe asks for {size} tokens, the head in {folder} drafts {len(head.target_ids)}; the "
                        "vocabulary of an imported head stays")  # fmt: skip
    learning = {name: said.pop(name) for name in LEARNING if name in said}
    for name, value in said.items():
        if value != getattr(head.config, name):
            raise UserError(f"head.{name}: {value} in the recipe, {getattr(head.config, name)} in {folder}; it cannot change")
    head.config = head.config.model_copy(update=learning)
    return head


def brief(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: metrics[name] for name in ("tau", "survival", "rounds", "emitted")}


def evaluate(run_folder: Path, overrides: Sequence[str] = (), workshop: Workshop | None = None) -> dict[str, Any]:
    """Judge the run's head on the held-out prompts and write evaluation.json. Overrides may change evaluation fields."""
    recipe = load_recipe(run_folder / "recipe.yaml", overrides)
    head = load_head(run_folder / "head")
    if workshop is None:
        holdout = build_conversations(recipe).holdout
        evaluator = build_evaluator(recipe, build_judge(recipe), holdout)
    else:
        evaluator = workshop.evaluator
    verifier = evaluator.verifier
    check_fits(head.config, verifier.facts, verifier.name)
    start = time.perf_counter()
    trees = [build_tree(tree) for tree in recipe.evaluation.trees]
    results = evaluator.evaluate(head.to(verifier.device), trees, build_samplings(recipe))
    evaluation = {
        "verifier": verifier.name,
        "head": describe(head),
        "prompts": len(evaluator.prompts),
        "max_new_tokens": evaluator.max_new_tokens,
        "dtype": str(verifier.dtype).removeprefix("torch."),
        "device": str(verifier.device),
        "seconds": round(time.perf_counter() - start, 1),
        "results": results,
    }
    write_text(run_folder / "evaluation.json", json.dumps(evaluation, indent=1) + "\n")
    return evaluation


def lossless(run_folder: Path | None, tokens: int, seed: int = 0) -> Iterator[Gate]:
    """Prove the verification rules, and with a run folder that its own verifier and head are decoded without loss."""
    judges: list[Evaluator] = []
    if run_folder is not None:  # bad input shows before the sums are done
        recipe = load_recipe(run_folder / "recipe.yaml")
        head = load_head(run_folder / "head")
        holdout = build_conversations(recipe).holdout
        verifier = build_verifier(recipe)
        check_fits(head.config, verifier.facts, verifier.name)
        trees = [build_tree(tree) for tree in recipe.evaluation.trees]
        judges = [build_evaluator(recipe, build_judge(in_float32(recipe), verifier), holdout)]
        if str(verifier.dtype) != "torch.float32":
            judges.append(build_evaluator(recipe, verifier, holdout))
    yield from proof(seed)
    if judges:
        with progress_bar("sampling text", tokens, unit="tokens") as bar:
            yield from own_proof(judges, head, trees, tokens, seed, bar)


def in_float32(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"dtype": "float32"})})


def describe(head: DraftHead) -> dict[str, Any]:
    parameters = sum(p.numel() for p in head.parameters())
    return {"kind": head.kind, "parameters": parameters} | head.config.model_dump(mode="json", exclude={"kind"})
