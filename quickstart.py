"""`headstart quickstart`: train Medusa and EAGLE-3 heads on a real small model, decode held-out prompts, draw the page.

Every stage keeps what it has done (answers in the cache, checkpoints and results in the run folder), so a second call goes on
where a killed one stopped.
"""

import json
from pathlib import Path

from rich.console import Console

from .evaluation.report import write_report
from .judging import evaluate
from .progress import say
from .runs import claim
from .tables import results_table
from .teaching import train
from .training.recipe import load_recipe, shipped_recipes
from .workshop import Workshop, open_workshop

HEADS = ("eagle3", "medusa")


def quickstart(run_folder: Path) -> None:
    """Run the whole job into run_folder/{eagle3,medusa} and write run_folder/report.html."""
    recipes = {kind: load_recipe(shipped_recipes()[f"smollm2-135m/{kind}"]) for kind in HEADS}
    folders = {kind: run_folder / kind for kind in HEADS}
    for kind, folder in folders.items():
        claim(folder, recipes[kind])
    workshop: Workshop | None = None
    for kind, folder in folders.items():
        if finished(folder):
            say(f"{folder}: already trained and evaluated")
            continue
        workshop = workshop or open_workshop(recipes[kind])
        train(recipes[kind], folder, workshop)
        say(f"evaluating {kind} on held-out prompts")
        evaluate(folder, workshop=workshop)
    page = write_report(list(folders.values()), run_folder / "report.html")
    evaluations = [json.loads((folder / "evaluation.json").read_text(encoding="utf-8")) for folder in folders.values()]
    Console().print(results_table(*evaluations))
    print(f"report: {page}")


def finished(folder: Path) -> bool:
    return (folder / "evaluation.json").exists()
