"""The command line. Every verb is a few lines over a function of the package, imported only when the verb runs."""

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from . import cli_data, cli_measure, cli_recipe, cli_ship
from .cli_options import Json, Overrides, RecipeName, show
from .errors import UserError

INTERRUPTED = 130  # what shells expect of a program ended by Ctrl-C

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    help="Train draft heads for speculative decoding, and measure them.",
)
app.add_typer(cli_recipe.app, name="recipe")
app.add_typer(cli_data.app, name="data")
app.add_typer(cli_measure.app)
app.add_typer(cli_ship.app)


@dataclass
class Options:
    """What stands before the verb."""

    debug: bool = False


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    context.ensure_object(Options).debug = debug


@app.command()
def quickstart(
    run_folder: Annotated[Path, typer.Option(help="Where the runs and the report go.")] = Path("runs/quickstart"),
) -> None:
    """Train and compare two heads on a laptop.

    Both Medusa and EAGLE-3, on a real model of 135M weights, with a report at the end.
    """
    from .quickstart import quickstart

    quickstart(run_folder)


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    run_folder: Annotated[Path | None, typer.Option(help="Default: runs/NAME-OF-THE-RECIPE.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it will need: memory, steps, time.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Of a dry run: processes, over all machines.")] = 1,
    device_memory: Annotated[
        float | None, typer.Option(min=0.001, help="Of a dry run: GB a device; default: this machine's.")
    ] = None,
    probe: Annotated[bool, typer.Option(help="Of a dry run: take ten real steps for the time.")] = True,
    as_json: Json = False,
) -> None:
    """Train the head of a recipe.

    Under torchrun: on all its processes, as training.strategy says. A dry run exits with 1 where something will not fit.
    """
    from .ranks import joined
    from .training.recipe import find_recipe, load_recipe

    with joined():
        path = find_recipe(recipe)
        checked = load_recipe(path, overrides or ())  # before torch is imported: faults show at once
        if dry_run:
            from .planning import dry_run as plan
            from .tables import plan_table

            found = plan(checked, ranks, device_memory, probe)
            show(found if as_json else plan_table(found))
            raise typer.Exit(int(not found["fits"]))
        from .teaching import train

        train(checked, run_folder or Path("runs") / path.stem)


@app.command()
def env(as_json: Json = False) -> None:
    """Print versions and devices, for bug reports."""
    from .cli_env import facts

    found = facts()
    lines = (f"{name:<13} {'-' if value is None else value}" for name, value in found.items())
    show(found) if as_json else print("\n".join(lines))


def run(arguments: list[str] | None = None) -> int:
    """Run one command (None: the process's own). Returns its exit code: 0, 1 failed check, 2 bad input, 130 Ctrl-C."""
    chosen = Options()
    try:
        app(args=arguments, obj=chosen, prog_name="headstart")
    except SystemExit as done:  # typer always ends so, and answers faults of usage itself
        if done.code == INTERRUPTED:
            print("interrupted", file=sys.stderr)
        return int(done.code or 0)
    except UserError as error:
        if chosen.debug:
            traceback.print_exc()
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    raise AssertionError("typer came back")


def main() -> NoReturn:
    sys.exit(run())
