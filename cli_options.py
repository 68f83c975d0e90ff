"""What several verbs of the command line share: their options, and how results are shown."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import UserError

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Such as training.steps=100.")]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]


def show(result: Any) -> None:
    """Plain data as JSON, anything else as rich prints it."""
    if isinstance(result, dict):
        print(json.dumps(result, indent=2))
        return
    from rich.console import Console

    Console().print(result)


def check_run(folder: Path) -> None:
    if not (folder / "recipe.yaml").is_file():
        raise UserError(f"{folder}: not a run folder (no recipe.yaml in it); `headstart train` writes one")
