"""`headstart eval`, `lossless`, `doctor` and `analyse`: what is found out about a run's head."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .build import build_evaluator, build_judge, build_prompts, build_samplings, build_texts, build_tree, build_verifier
from .build_data import held_out
from .build_drafters import build_drafters
from .errors import UserError
from .evaluation.analysis import analyse as analyse_run
from .evaluation.analysis_file import Analysis
from .evaluation.diagnosis import Diagnosis
from .evaluation.doctor import examine
from .evaluation.evaluate import Evaluator, Prompt
from .evaluation.lossless import Drafters, Gate, own_proof, proof
from .evaluation.parity import write_texts
from .evaluation.quality import quality
from .evaluation.record import dtype_name
from .evaluation.run_folder import logged_accuracy, read_provenance, read_run
from .evaluation.top_k import top_k
from .heads.base import DraftHead, check_fits
from .heads.files import write_text
from .heads.hub import load_head
from .heads.verifier import Verifier
from .progress import progress_bar
from .runs import learns_adapter, open_run, run_recipe
from .training.recipe import Recipe
from .workshop import Workshop


def evaluate(run_folder: Path, overrides: Sequence[str] = (), workshop: Workshop | None = None) -> dict[str, Any]:
    """Judge the run's head on the held-out prompts and write evaluation.json. Overrides as `run_recipe` takes them."""
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
        "dtype": dtype_name(verifier),
        "device": str(verifier.device),
        "seconds": round(time.perf_counter() - start, 1),
        **({"verifier_quality": quality(verifier, build_texts(recipe, evaluator, holdout))} if learns_adapter(recipe) else {}),
        "results": results,
    }
    write_text(run_folder / "evaluation.json", json.dumps(evaluation, indent=1) + "\n")
    return evaluation


def lossless(run_folder: Path | None, tokens: int, seed: int = 0, overrides: Sequence[str] = ()) -> Iterator[Gate]:
    """Prove the verification rules, and with a run folder that its own verifier is decoded without loss, by every drafter and
    tree of the recipe, at its temperatures above 0 (1 where it has none)."""
    judges: list[tuple[Evaluator, Drafters]] = []
    if run_folder is not None:  # bad input shows before the sums are done
        recipe = run_recipe(run_folder, overrides)
        head = load_head(run_folder / "head")
        holdout = held_out(recipe)
        verifier = build_verifier(recipe)
        check_fits(head.config, verifier.facts, verifier.name)
        trees = [build_tree(tree) for tree in recipe.evaluation.trees]
        judging = [build_judge(in_float32(recipe), verifier)]
        if str(verifier.dtype) != "torch.float32":
            judging.append(verifier)
        head = head.to(verifier.device)
        judges = [(build_evaluator(recipe, judge, holdout), build_drafters(recipe, head, judge)) for judge in judging]
        samplings = [replace(one, seed=seed) for one in build_samplings(recipe)]
        sampled = [one for one in samplings if one.temperature] or [replace(samplings[0], temperature=1.0)]
    yield from proof(seed)
    if judges:
        with progress_bar("sampling text", tokens, unit="tokens") as bar:
            yield from own_proof(judges, trees, sampled, tokens, bar)


def doctor(run_folder: Path, prompts: int, tokens: int) -> Diagnosis:
    """Compare training and decoding of the run's head on the verifier's answers to held-out prompts."""
    recipe, head, verifier = open_run(run_folder)
    asked = prompts_to_answer(recipe, verifier, prompts, tokens)
    ids, names = [prompt.ids for prompt in asked], [prompt.id for prompt in asked]
    diagnosis = examine(head, verifier, ids, names, tokens, read_provenance(run_folder), learns_adapter(recipe))
    return replace(diagnosis, accuracy=diagnosis.accuracy | {"logged": logged_accuracy(run_folder)})


def analyse(run_folder: Path, prompts: int, tokens: int, cost: float | None) -> Analysis:
    """Write analysis.json: what the run's files say, and top-k accuracy on the verifier's answers to held-out prompts."""
    run = read_run(run_folder)
    recipe, head, verifier = open_run(run_folder)
    asked = [prompt.ids for prompt in prompts_to_answer(recipe, verifier, prompts, tokens)]
    deepest = max(tree.depth for tree in recipe.evaluation.trees)
    depths = deepest if head.depth is None else head.depth
    analysis = analyse_run(run, top_k(head, verifier, write_texts(head, verifier, asked, tokens), depths), cost)
    write_text(run_folder / "analysis.json", analysis.model_dump_json(indent=1) + "\n")
    return analysis


def prompts_to_answer(recipe: Recipe, verifier: Verifier, count: int, tokens: int) -> list[Prompt]:
    """Held-out prompts after which the verifier can still read `tokens` tokens."""
    asked, limit = build_prompts(verifier, held_out(recipe), count), verifier.facts.max_position_embeddings
    fitting = [prompt for prompt in asked if len(prompt.ids) + tokens <= limit]
    if not fitting:
        raise UserError(f"--tokens {tokens}: no held-out prompt leaves room for them within the verifier's limit of {limit}")
    return fitting


def in_float32(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"dtype": "float32"})})


def describe(head: DraftHead) -> dict[str, Any]:
    parameters = sum(p.numel() for p in head.parameters())
    return {"kind": head.kind, "parameters": parameters} | head.config.model_dump(mode="json", exclude={"kind"})
