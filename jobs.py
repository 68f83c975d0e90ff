"""The verbs behind the command line: train a run folder, evaluate a run folder."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .build import build_evaluator, build_judge, build_prompts, build_samplings, build_settings, build_tree, build_verifier
from .build_data import Conversations, build_conversations, build_samples
from .build_heads import build_head, needed_layers
from .data.chat import Sample
from .data.features import FeatureSource
from .data.packing import batch_plan
from .errors import UserError
from .evaluation.analysis import analyse as analyse_run
from .evaluation.analysis_file import Analysis
from .evaluation.diagnosis import Diagnosis
from .evaluation.doctor import examine
from .evaluation.evaluate import Evaluator
from .evaluation.look import look
from .evaluation.lossless import Gate, own_proof, proof
from .evaluation.parity import write_texts
from .evaluation.record import made_with
from .evaluation.run_folder import read_run
from .evaluation.top_k import top_k
from .heads.base import DraftHead, check_fits
from .heads.files import write_text
from .heads.hub import load_head
from .heads.verifier import Verifier
from .progress import progress_bar, say
from .provenance import provenance
from .runs import START, check_claim, claim, open_run, read_provenance, write_provenance
from .training.recipe import Recipe, load_recipe
from .training.sections.head import HeadSection
from .training.trainer import fit

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
    conversations = build_conversations(recipe)  # files first: they are the likelier mistake and cost nothing
    verifier = build_verifier(recipe)
    samples, features = build_samples(recipe, verifier, conversations)
    for line in conversations.skips.summary(conversations.skips.read):
        say(f"left out: {line}")
    tokens, learned = sum(len(s.ids) for s in samples), sum(sum(s.mask) for s in samples)
    say(f"training on {len(samples)} samples: {tokens} tokens, {learned} supervised")
    evaluator = build_evaluator(recipe, build_judge(recipe, verifier), conversations.holdout)
    return Workshop(verifier, evaluator, conversations, samples, features, needed_layers(recipe, verifier))


def train(recipe: Recipe, run_folder: Path, workshop: Workshop | None = None) -> None:
    """Train the recipe's head into the run folder, or go on with what is there. Refuses a folder of another recipe."""
    check_claim(run_folder, recipe)
    workshop = workshop or open_workshop(recipe)
    verifier, training = workshop.verifier, workshop.samples
    if (run_folder / START).is_dir():
        head = start_from(run_folder / START, recipe.head).to(verifier.device)
    else:
        head = build_head(recipe, verifier, training, workshop.features)
    tree = build_tree(recipe.evaluation.trees[0])  # the cheapest look that still decodes for real
    section = recipe.training
    plan = batch_plan([len(s.ids) for s in training], section.batch_tokens, section.seed, section.steps, section.epochs)
    assert not head.needs or head.needs == workshop.layers, "the workshop was opened for other layers"
    claim(run_folder, recipe)  # only now: bad input leaves no folder behind
    workshop.conversations.skips.write(run_folder / "skipped.jsonl")
    layers = workshop.layers if head.needs else ()
    write_provenance(run_folder, provenance(verifier, training) | {"head": made_with(head, layers)})
    fit(
        head,
        verifier,
        workshop.features,
        plan,
        build_settings(recipe),
        run_folder,
        lambda h: told(look(workshop.evaluator, h, tree, section.evaluate_prompts, section.evaluate_seconds)),
    )


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


def told(found: dict[str, Any]) -> dict[str, Any]:
    """A look, after a word where its time was too short for all prompts."""
    if found["prompts"] < found["of"]:
        say(f"held out: {found['prompts']} of {found['of']} prompts fit into training.evaluate_seconds; heads are compared on "
            "the prompts that both were judged on")  # fmt: skip
    return found


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
