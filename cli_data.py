"""`headstart data ...`: look at training data."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import Json, show

app = typer.Typer(no_args_is_help=True, help="Look at training data.")


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
