"""Run folders: whose recipe one holds, and its head with the verifier it was trained for."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .build import build_judge
from .errors import UserError
from .evaluation.run_folder import PROVENANCE
from .heads.base import DraftHead, check_fits
from .heads.files import check_writable, write_text
from .heads.hub import load_head
from .heads.medusa2 import ADAPTER
from .heads.verifier import Verifier
from .progress import say
from .training.recipe import Recipe, load_recipe, recipe_yaml
from .training.sections.head import MedusaSection

START = "start"  # in a run folder: an imported head that training goes on from
FREE = {  # sections and fields that may change while a run goes on: how it is computed, looked at and judged
    "evaluation", "tracking", "training.strategy", "training.fsdp", "training.deepspeed", "training.accumulation",
    "training.gradient_checkpointing", "training.compile", "training.log_every", "training.save_every",
    "training.evaluate_every", "training.evaluate_prompts", "training.evaluate_seconds",
}  # fmt: skip
JUDGED = ("evaluation", "verifier", "data.train")  # what may differ from training where a head is judged


def run_recipe(run_folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run as its head is to be judged: with the adapter that the verifier learned beside it (Medusa-2).

    Raises UserError for an override that only training reads.
    """
    recipe = load_recipe(run_folder / "recipe.yaml", overrides)
    for override in overrides:
        key = override.partition("=")[0]
        if not any(f"{key}.".startswith(f"{judged}.") for judged in JUDGED):
            raise UserError(
                f"override: {key}: the head is trained; what can be another where it is judged: {', '.join(JUDGED)}"
            )
    if not learns_adapter(recipe):
        return recipe
    adapter = run_folder / "head" / ADAPTER
    if (run_folder / "head").is_dir() and not adapter.is_dir():
        raise UserError(f"{adapter}: no such folder; the head was trained with the adapter in it and drafts for nothing else")
    say(f"the verifier is {recipe.verifier.model} with the adapter in {adapter}, and answers are held against its own")
    return recipe.model_copy(update={"verifier": recipe.verifier.model_copy(update={"adapter": str(adapter)})})


def learns_adapter(recipe: Recipe) -> bool:
    return isinstance(recipe.head, MedusaSection) and recipe.head.adapter is not None


def open_run(run_folder: Path) -> tuple[Recipe, DraftHead, Verifier]:
    """The recipe, the head and the verifier of a run, which must fit together."""
    recipe = run_recipe(run_folder)
    head = load_head(run_folder / "head")
    verifier = build_judge(recipe)
    check_fits(head.config, verifier.facts, verifier.name)
    return recipe, head.to(verifier.device), verifier


def write_provenance(run_folder: Path, provenance: dict[str, Any]) -> None:
    """Keep what the head is made of and trained on, unless the folder's training began before."""
    if not (run_folder / "checkpoints").exists():
        write_text(run_folder / PROVENANCE, json.dumps(provenance, indent=1) + "\n")


def claim(run_folder: Path, recipe: Recipe) -> None:
    """Write recipe.yaml; where there is one, it must be this recipe but for FREE fields."""
    check_claim(run_folder, recipe)
    path = run_folder / "recipe.yaml"
    if not path.exists() or load_recipe(path) != recipe:
        write_text(path, recipe_yaml(recipe))


def check_claim(run_folder: Path, recipe: Recipe) -> None:
    """Refuse a folder that holds another recipe's run, or something else, or cannot be written."""
    check_writable(run_folder)
    path = run_folder / "recipe.yaml"
    if path.exists():
        if differing := differences(load_recipe(path).model_dump(), recipe.model_dump()):
            raise UserError(f"{run_folder} holds a run of another recipe ({'; '.join(differing)}); choose another run folder "
                            "or delete it")  # fmt: skip
        return
    if run_folder.exists() and any(run_folder.iterdir()):
        raise UserError(f"{run_folder} is not empty and no run folder (no recipe.yaml in it); choose another")


def differences(there: Any, here: Any, key: str = "") -> list[str]:
    """Dotted keys whose values differ, with both, but for FREE ones."""
    if key in FREE:
        return []
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*there, *(name for name in here if name not in there)]
        return [d for name in keys for d in differences(there.get(name), here.get(name), f"{key}.{name}".lstrip("."))]
    return [] if there == here else [f"{key}: {there} there, {here} here"]
