"""The verbs between run folders and the folders that serving engines load: export, verify, import."""

from pathlib import Path
from typing import Literal

import torch

from .errors import UserError
from .export.layout import Order, public_name
from .export.read import read_head
from .export.verify import Verdict, verify
from .export.write import write_export
from .heads.base import DraftHead
from .heads.eagle3 import Eagle3Head
from .heads.files import replace_folder
from .heads.hub import save_head
from .heads.verifier import Verifier
from .progress import say
from .runs import START, open_run
from .training.recipe import Recipe, recipe_yaml
from .training.sections.base import Section
from .training.sections.head import Eagle1Section, Eagle3Section, MedusaSection

SECTIONS: dict[str, type[Section]] = {"eagle1": Eagle1Section, "eagle3": Eagle3Section, "medusa": MedusaSection}


Dtype = Literal["float32", "bfloat16", "float16"]


def order_of(run_folder: Path, dtype: Dtype, verifier_name: str | None) -> Order:
    """What is to be exported of a run. verifier_name: its hub id, where the recipe has a folder or a builtin."""
    _, head, verifier = open_run(run_folder)
    return Order(head, verifier, public_name(verifier, verifier_name), getattr(torch, dtype))


def export_run(run_folder: Path, engine: str, output: Path, dtype: Dtype = "float32", verifier_name: str | None = None) -> None:
    """Write the run's head as `engine` loads it. verifier_name: as for `order_of`."""
    export = write_export(order_of(run_folder, dtype, verifier_name), engine, output)
    say(f"{output}: a head for {export.engine}; how to serve it is in {output / 'SERVING.md'}")


def verify_export(folder: Path, engine: str, run_folder: Path | None = None) -> Verdict:
    """Apply the engine's loader contract to a folder, and compare it with the head of a run."""
    if run_folder is None:
        return verify(folder, engine)
    _, head, verifier = open_run(run_folder)
    return verify(folder, engine, head, verifier)


def import_head(
    source: Path, verifier_name: str, run_folder: Path, engine: str = "vllm", allow_pickle: bool = False
) -> DraftHead:
    """Make a run folder of a published head: recipe.yaml, head/ to evaluate and export, start/ to train on from."""
    if run_folder.exists() and (not run_folder.is_dir() or any(run_folder.iterdir())):
        raise UserError(f"{run_folder} is there and not empty; choose another run folder")
    verifier = Verifier.load(verifier_name, "float32")
    head = read_head(source, verifier, engine, allow_pickle)
    recipe = recipe_yaml(recipe_for(head, verifier_name))

    def write(target: Path) -> None:
        (target / "recipe.yaml").write_text(recipe, encoding="utf-8")
        save_head(head, target / START)
        save_head(head, target / "head")

    replace_folder(run_folder, write)
    say(f"{run_folder}: {head.kind} head for {verifier_name}; headstart eval {run_folder} measures it")
    return head


def recipe_for(head: DraftHead, verifier_name: str) -> Recipe:
    """The recipe of a run that would go on training an imported head on the project's own prompts."""
    rows = head.config.model_dump()
    pruned = len(head.target_ids) if len(head.target_ids) < head.config.vocab_size else None
    size = "draft_vocabulary" if isinstance(head, Eagle3Head) else "vocabulary"
    fields = SECTIONS[head.kind].model_fields
    section = {name: rows[name] for name in fields if name in rows} | {size: pruned}
    return Recipe.model_validate({
        "verifier": {"model": verifier_name, "dtype": "float32"},
        "data": {"train": ["builtin:prompts"], "holdout": "split", "answers": "regenerate", "max_length": 1024},
        "head": section,
        "training": {"steps": 200, "batch_tokens": 1024, "learning_rate": 1e-4},
        "evaluation": {"trees": [{"kind": "chain", "depth": min(4, head.depth or 4)}]},
    })  # fmt: skip
