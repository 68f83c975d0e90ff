"""`headstart recipe ...`: list, copy, show and check recipes. Nothing here imports torch."""

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import Json, Overrides, RecipeName
from .errors import UserError

app = typer.Typer(no_args_is_help=True, help="List, copy, show and check recipes.")


@app.command()
def ls(as_json: Json = False) -> None:
    """List the shipped recipes."""
    from .training.recipe import load_recipe, shipped_recipes

    rows = []
    for name, path in shipped_recipes().items():
        recipe = load_recipe(path)
        rows.append({"name": name, "head": recipe.head.kind, "verifier": recipe.verifier.model, "path": str(path)})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("recipe", "head", "verifier")
    for row in rows:
        table.add_row(row["name"], row["head"], row["verifier"])
    Console().print(table)


@app.command()
def copy(
    name: RecipeName,
    target: Annotated[Path | None, typer.Argument(help="A file or a folder; default: this folder.")] = None,
) -> None:
    """Copy a recipe to start your own from. Never overwrites."""
    from .heads.files import writing
    from .training.recipe import find_recipe

    source = find_recipe(name)
    target = target or Path()
    if target.is_dir():
        target = target / source.name
    if target.exists():
        raise UserError(f"{target}: already there; give another name: headstart recipe copy {name} OTHER.yaml")
    with writing(target):
        shutil.copyfile(source, target)
    print(f"{target}: written; train it with: headstart train {target}")


@app.command()
def show(name: RecipeName, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print a recipe with every default spelled out."""
    from .training.recipe import find_recipe, load_recipe, recipe_yaml

    recipe = load_recipe(find_recipe(name), overrides or ())
    print(json.dumps(recipe.model_dump(mode="json"), indent=2) if as_json else recipe_yaml(recipe).rstrip())


@app.command()
def check(name: RecipeName, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check a recipe and print every fault.

    Exits with 2 when there is one.
    """
    from .training.recipe import find_recipe, load_recipe

    try:
        load_recipe(find_recipe(name), overrides or ())
    except UserError as error:
        if not as_json:
            raise
        print(json.dumps({"ok": False, "faults": str(error).splitlines()}, indent=2))
        raise typer.Exit(2) from None
    print(json.dumps({"ok": True, "faults": []}, indent=2) if as_json else f"{name}: ok")


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from .training.recipe import schema_json

    print(json.dumps(schema_json(), indent=2))
