"""`headstart data ...`: look at training data, prepare it, estimate what it takes."""

import sys
from contextlib import redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import Json, Overrides, RecipeName, show

app = typer.Typer(no_args_is_help=True, help="Look at training data, prepare it, estimate what it takes.")


class BadRows(StrEnum):
    error = "error"
    skip = "skip"


@app.command()
def inspect(
    files: Annotated[list[Path], typer.Argument(help="Chat files.")],
    verifier: Annotated[str, typer.Option(help="Whose tokenizer and chat template to use.")] = "builtin:smollm2-135m",
    max_length: Annotated[int, typer.Option(min=2, help="Tokens a sample.")] = 2048,
    limit: Annotated[int, typer.Option(min=0, help="Samples to show.")] = 3,
    bad_rows: Annotated[BadRows, typer.Option(help="Stop at a row that cannot be used, or count it.")] = BadRows.error,
    draft_vocabulary: Annotated[list[int] | None, typer.Option(help="A size whose coverage to tell; may be repeated.")] = None,
    read: Annotated[int, typer.Option(min=0, help="Samples that the verifier reads: how many tokens are its own choice?")] = 0,
    html: Annotated[Path | None, typer.Option(help="Write a page with the samples.")] = None,
    skipped: Annotated[Path | None, typer.Option(help="Write what is left out, and why, as JSON lines.")] = None,
    as_json: Json = False,
) -> None:
    """Count what chat files give, and show samples.

    Supervised tokens are green.
    """
    from .data.inspection import inspect_file
    from .data.inspection_view import to_terminal, write_page
    from .heads.loading import load_tokenizer
    from .heads.verifier import Verifier

    with redirect_stdout(sys.stderr):  # the first use of a builtin verifier tells of its conversion
        model = Verifier.load(verifier, "auto") if read else None
        tokenizer = model.tokenizer if model else load_tokenizer(verifier)
        sizes = draft_vocabulary or []
        inspection = inspect_file(files, tokenizer, max_length, limit, bad_rows.value, sizes, model, read)
    if html is not None:
        write_page(inspection, html)
    if skipped is not None:
        inspection.skips.write(skipped)
    show(inspection.to_json() if as_json else to_terminal(inspection))


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
