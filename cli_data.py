"""`headstart data ...`: look at training data, prepare it, and say beforehand what it takes."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import Json, Overrides, RecipeName, show

app = typer.Typer(no_args_is_help=True, help="Look at training data, prepare it, estimate what it takes.")


@app.command()
def inspect(
    files: Annotated[list[Path], typer.Argument(help="Chat files.")],
    verifier: Annotated[str, typer.Option(help="Whose tokenizer and chat template to use.")] = "builtin:smollm2-135m",
    max_length: Annotated[int, typer.Option(min=2, help="Tokens a sample.")] = 2048,
    limit: Annotated[int, typer.Option(min=0, help="Samples to show.")] = 3,
    as_json: Json = False,
) -> None:
    """Count what chat files give, and show samples.

    Supervised tokens are green.
    """
    from .data.inspection import inspect_file
    from .heads.loading import load_tokenizer

    with redirect_stdout(sys.stderr):  # the first use of a builtin verifier tells of its conversion
        inspection = inspect_file(files, load_tokenizer(verifier), max_length, limit)
    show(inspection.to_json() if as_json else inspection)


@app.command()
def prepare(recipe: RecipeName, overrides: Overrides = None, as_json: Json = False) -> None:
    """Render, mask, answer and store a recipe's data.

    A second run makes only what is missing.
    """
    from .training.recipe import find_recipe, load_recipe

    checked = load_recipe(find_recipe(recipe), overrides or ())
    from .preparing import prepare
    from .tables import facts_table

    with redirect_stdout(sys.stderr):
        result = prepare(checked)
    show(result if as_json else facts_table("prepared", result))


@app.command()
def estimate(recipe: RecipeName, overrides: Overrides = None, as_json: Json = False) -> None:
    """Say what a recipe's data takes of disk, memory and time.

    Writes nothing. Exits with 2 when the disk has no room for it.
    """
    from .training.recipe import find_recipe, load_recipe

    checked = load_recipe(find_recipe(recipe), overrides or ())
    from .estimating import estimate
    from .tables import facts_table

    with redirect_stdout(sys.stderr):
        result = estimate(checked)
    show(result if as_json else facts_table("estimate", result))
