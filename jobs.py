"""The verbs behind the command line: train a run folder, evaluate a run folder."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .build import (
    build_evaluator,
    build_judge,
    build_prompts,
    build_samplings,
    build_settings,
    build_texts,
    build_tree,
    build_verifier,
)
from .build_data import Conversations, build_conversations, build_samples, check_author, held_out
from .build_drafters import build_drafters
from .build_features import fill_features
from .build_heads import adapt, build_head, needed_layers
from .build_start import start_from
from .build_strategy import build_strategy, build_training_verifier, check_processes
from .data.chat import Sample
from .data.conversations import Conversation
from .data.features import FeatureSource, OriginalFeatures
from .data.packing import batch_plan
from .data.stored import StoredFeatures
from .errors import UserError
from .evaluation.analysis import analyse as analyse_run
from .evaluation.analysis_file import Analysis
from .evaluation.diagnosis import Diagnosis
from .evaluation.doctor import examine
from .evaluation.evaluate import Evaluator
from .evaluation.look import look
from .evaluation.lossless import Gate, own_proof, proof
from .evaluation.parity import write_texts
from .evaluation.quality import quality
from .evaluation.record import made_with
from .evaluation.run_folder import read_run
from .evaluation.top_k import top_k
from .heads.base import DraftHead, check_fits
from .heads.files import write_text
from .heads.hub import load_head
from .heads.medusa2 import AdaptedMedusa
from .heads.verifier import Verifier
from .progress import progress_bar, say
from .provenance import provenance
from .ranks import in_turn, is_first
from .runs import START, check_claim, claim, learns_adapter, open_run, read_provenance, run_recipe, write_provenance
from .training.compiling import compile_layers
from .training.recipe import Recipe
from .training.strategies.sharded import leading
from .training.trainer import fit
from .training.wandb_log import wandb_report


@dataclass
class Workshop:
    """What runs with the same verifier and data can share: built once, from the first recipe."""

    verifier: Verifier
    evaluator: Evaluator  # with the verifier in evaluation.dtype
    conversations: Conversations
    holdout: Sequence[Conversation]  # what heads are judged on
    samples: Sequence[Sample]
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
            if verifier.sharded:
                fill_features(features)
    if not is_first():
        samples, features = build_samples(recipe, verifier, conversations)
    fill_features(features)  # each with a verifier of its own, the processes share the work
    for line in conversations.skips.summary(conversations.skips.read):
        say(f"left out: {line}")
    tokens, learned = sum(len(s.ids) for s in samples), sum(sum(s.mask) for s in samples)
    say(f"training on {len(samples)} samples: {tokens} tokens, {learned} supervised")
    if found := check_author(recipe, samples, features):
        say(f"the verifier would choose {found.share:.1%} of {found.tokens} supervised tokens itself")
        if found.warning:
            say(f"warning: {found.warning}")
    judge = build_judge(recipe, verifier) if is_first() else verifier  # only the first process judges
    holdout = held_out(recipe) if recipe.evaluation.prompt_files else conversations.holdout
    evaluator = build_evaluator(recipe, judge, holdout)
    return Workshop(verifier, evaluator, conversations, holdout, samples, features, needed_layers(recipe, verifier))


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
    verifier, training = workshop.verifier, workshop.samples
    if (run_folder / START).is_dir():
        head = start_from(run_folder / START, recipe.head).to(verifier.device)
    else:
        head = build_head(recipe, verifier, training, workshop.features)
    check_trees(recipe, head)
    head = adapt(recipe, verifier, head)
    features, evaluator = workshop.features, workshop.evaluator
    if isinstance(head, AdaptedMedusa):  # held against the verifier as it was, judged with the adapter where it learns
        features = OriginalFeatures(features, head.adapter)
        evaluator = build_evaluator(recipe, verifier, workshop.holdout)
    tree = build_tree(recipe.evaluation.trees[0])  # the cheapest look that still decodes for real
    section = recipe.training
    head.recompute = section.gradient_checkpointing
    if section.compile:
        compile_layers(head)
    lengths = [len(s.ids) for s in training]
    plan = batch_plan(
        lengths, section.batch_tokens, section.seed, section.steps, section.epochs, recipe.data.packing, section.group_lengths
    )
    assert not head.needs or head.needs == workshop.layers, "the workshop was opened for other layers"
    if isinstance(workshop.features, StoredFeatures):
        assert head.needs or workshop.features.layout.everywhere, (
            "the store was made for a head that reads less of the last state"
        )
    if is_first():
        claim(run_folder, recipe)  # only now: bad input leaves no folder behind
        workshop.conversations.skips.write(run_folder / "skipped.jsonl")
        layers = workshop.layers if head.needs else ()
        write_provenance(run_folder, provenance(verifier, training) | {"head": made_with(head, layers)})
    options = recipe.tracking.wandb.model_dump() if recipe.tracking.wandb else None
    with wandb_report(options, run_folder, recipe.model_dump(mode="json")) as report:
        progress = fit(
            head,
            verifier,
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


def check_trees(recipe: Recipe, head: DraftHead) -> None:
    """A head that training goes on from may have other depths than the recipe's section says."""
    for tree in recipe.evaluation.trees:
        if head.depth is not None and tree.depth > head.depth:
            raise UserError(f"evaluation.trees: a {tree.kind} tree of depth {tree.depth} is deeper than the head, which has "
                            f"{head.depth}")  # fmt: skip


def told(found: dict[str, Any]) -> dict[str, Any]:
    """A look, after a word where its time was too short for all prompts."""
    if found["prompts"] < found["of"]:
        say(f"held out: {found['prompts']} of {found['of']} prompts fit into training.evaluate_seconds; heads are compared on "
            "the prompts that both were judged on")  # fmt: skip
    return found


def evaluate(run_folder: Path, overrides: Sequence[str] = (), workshop: Workshop | None = None) -> dict[str, Any]:
    """Judge the run's head on the held-out prompts and write evaluation.json. Overrides may change evaluation fields."""
    recipe = run_recipe(run_folder, overrides)
    head = load_head(run_folder / "head")
    if workshop is None or learns_adapter(recipe):  # a workshop's verifier is the one of before training
        holdout = held_out(recipe)
        evaluator = build_evaluator(recipe, build_judge(recipe), holdout)
    else:
        holdout, evaluator = workshop.holdout, workshop.evaluator
    verifier = evaluator.verifier
    check_fits(head.config, verifier.facts, verifier.name)
    start = time.perf_counter()
    trees = [build_tree(tree) for tree in recipe.evaluation.trees]
    drafters = build_drafters(recipe, head.to(verifier.device), verifier)
    results = [
        {"drafter": name} | result
        for name, drafter in drafters
        for result in evaluator.evaluate(drafter, trees, build_samplings(recipe))
    ]
    evaluation = {
        "verifier": verifier.name,
        **({} if verifier.adapter is None else {"adapter": verifier.adapter.name}),
        "head": describe(head),
        "prompts": len(evaluator.prompts),
        "max_new_tokens": evaluator.max_new_tokens,
        "dtype": str(verifier.dtype).removeprefix("torch."),
        "device": str(verifier.device),
        "seconds": round(time.perf_counter() - start, 1),
        **({"verifier_quality": quality(verifier, build_texts(recipe, evaluator, holdout))} if learns_adapter(recipe) else {}),
        "results": results,
    }
    write_text(run_folder / "evaluation.json", json.dumps(evaluation, indent=1) + "\n")
    return evaluation


def lossless(run_folder: Path | None, tokens: int, seed: int = 0) -> Iterator[Gate]:
    """Prove the verification rules, and with a run folder that its own verifier and head are decoded without loss."""
    judges: list[Evaluator] = []
    if run_folder is not None:  # bad input shows before the sums are done
        recipe = run_recipe(run_folder)
        head = load_head(run_folder / "head")
        holdout = held_out(recipe)
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


def doctor(run_folder: Path, prompts: int, tokens: int) -> Diagnosis:
    """Compare training and decoding of the run's head on the verifier's answers to held-out prompts."""
    recipe, head, verifier = open_run(run_folder)
    asked = build_prompts(verifier, build_conversations(recipe).holdout, prompts)
    ids, names = [prompt.ids for prompt in asked], [prompt.id for prompt in asked]
    diagnosis = examine(head, verifier, ids, names, tokens, read_provenance(run_folder))
    return replace(diagnosis, accuracy=diagnosis.accuracy | {"logged": logged_accuracy(run_folder)})


def analyse(run_folder: Path, prompts: int, tokens: int, cost: float | None) -> Analysis:
    """Write analysis.json: what the run's files say, and top-k accuracy on the verifier's answers to held-out prompts."""
    run = read_run(run_folder)
    recipe, head, verifier = open_run(run_folder)
    asked = [prompt.ids for prompt in build_prompts(verifier, build_conversations(recipe).holdout, prompts)]
    deepest = max(tree.depth for tree in recipe.evaluation.trees)
    depths = deepest if head.depth is None else head.depth
    analysis = analyse_run(run, top_k(head, verifier, write_texts(head, verifier, asked, tokens), depths), cost)
    write_text(run_folder / "analysis.json", analysis.model_dump_json(indent=1) + "\n")
    return analysis


def logged_accuracy(run_folder: Path) -> list[float]:
    """By depth, as training logged it last; empty where it did not."""
    path = run_folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [line["accuracy_by_depth"] for line in map(json.loads, lines) if "accuracy_by_depth" in line]
    return list(found[-1]) if found else []


def in_float32(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"dtype": "float32"})})


def describe(head: DraftHead) -> dict[str, Any]:
    parameters = sum(p.numel() for p in head.parameters())
    return {"kind": head.kind, "parameters": parameters} | head.config.model_dump(mode="json", exclude={"kind"})
