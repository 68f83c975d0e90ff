"""The command line. Every verb is a few lines over a function of the package, imported only when the verb runs."""

import json
import os
import sys
import traceback
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from . import cli_recipe
from .cli_recipe import Json, Overrides, RecipeName
from .errors import UserError

INTERRUPTED = 130  # what shells expect of a program ended by Ctrl-C

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    help="Train draft heads for speculative decoding, and measure them.",
)
data_app = typer.Typer(no_args_is_help=True, help="Look at training data.")
app.add_typer(cli_recipe.app, name="recipe")
app.add_typer(data_app, name="data")


class Dtype(StrEnum):
    """What exported tensors may be."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


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
) -> None:
    """Train the head of a recipe."""
    from .training.recipe import find_recipe, load_recipe

    path = find_recipe(recipe)
    checked = load_recipe(path, overrides or ())  # before torch is imported: faults show at once
    from .jobs import train

    train(checked, run_folder or Path("runs") / path.stem)


@app.command(name="eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder.")], overrides: Overrides = None, as_json: Json = False
) -> None:
    """Measure a trained head on held-out prompts.

    Exits with 1 when an answer differs from the verifier's own greedy decoding.
    """
    check_run(run)
    from .jobs import evaluate

    with redirect_stdout(sys.stderr):  # progress must not mix with the results
        evaluate(run, overrides or [])
    evaluation = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    from .tables import results_table

    show(evaluation if as_json else results_table(evaluation))
    if any(result["identical_to_greedy"] is False for result in evaluation["results"]):
        raise typer.Exit(1)


@app.command()
def lossless(
    run: Annotated[Path | None, typer.Argument(help="A run folder, to test its own verifier and head too.")] = None,
    tokens: Annotated[int, typer.Option(min=1000, help="Sampled tokens of the run's test; takes its time.")] = 50_000,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of random models, trees and samples.")] = 0,
    as_json: Json = False,
) -> None:
    """Prove that decoding with drafts is lossless.

    Exits with 1 when a gate fails: a rule is not exact, a wrong rule is not caught, a text is not the verifier's.
    """
    if run is not None:
        check_run(run)
    from .jobs import lossless
    from .tables import gates_table

    with redirect_stdout(sys.stderr):
        gates = list(lossless(run, tokens, seed))
    show({"gates": [asdict(gate) for gate in gates]} if as_json else gates_table(gates))
    if not all(gate.passed for gate in gates):
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders to compare.")],
    output: Annotated[Path | None, typer.Option(help="Default: report.html in the run folder, or beside several.")] = None,
) -> None:
    """Write one HTML page about one or more runs."""
    for run in runs:
        check_run(run)
    from .evaluation.report import write_report

    folder = runs[0] if len(runs) == 1 else Path(os.path.commonpath([run.absolute().parent for run in runs]))
    print(write_report(runs, output or folder / "report.html"))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    to: Annotated[str, typer.Option(help="vllm, sglang, speculators, eagle, medusa or tensorrt-llm.")],
    output: Annotated[Path, typer.Option(help="The folder to write.")],
    verifier: Annotated[str | None, typer.Option(help="Its hub id, where the run has a folder or a builtin.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the tensors; float32 changes nothing.")] = Dtype.float32,
) -> None:
    """Write a head as a serving engine loads it.

    Refuses what the engine cannot serve, and names what comes nearest.
    """
    check_run(run)
    from .shipping import export_run

    export_run(run, to, output, dtype.value, verifier)


@app.command(name="verify-export")
def verify_export(
    folder: Annotated[Path, typer.Argument(help="An export, or a folder of someone else's.")],
    engine: Annotated[str, typer.Option(help="vllm, sglang, speculators, eagle, medusa or tensorrt-llm.")],
    run: Annotated[Path | None, typer.Option(help="The run whose head must draft the same.")] = None,
    as_json: Json = False,
) -> None:
    """Hold a folder against the loader of an engine.

    Exits with 1 when a rule is broken, a line each.
    """
    if run is not None:
        check_run(run)
    from .shipping import verify_export

    verdict = verify_export(folder, engine, run)
    if as_json:
        show({"ok": not verdict.broken, "broken": verdict.broken, "difference": verdict.difference})
    else:
        drafts = "" if verdict.difference is None else f"; logits differ from the run's by at most {verdict.difference:.2g}"
        print("\n".join(verdict.broken) or f"{folder}: {engine} loads it{drafts}")
    if verdict.broken:
        raise typer.Exit(1)


@app.command(name="import")
def import_head(
    source: Annotated[Path, typer.Argument(help="A folder with a published head.")],
    verifier: Annotated[str, typer.Option(help="The model it drafts for: hub id, folder, .gguf or builtin.")],
    run_folder: Annotated[Path, typer.Option(help="The run folder to make.")],
    engine: Annotated[str, typer.Option(help="Whose layer indices it holds, where it names any.")] = "vllm",
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read .bin and .pt files, tensors alone.")] = False,
) -> None:
    """Make a run folder of a published head.

    EAGLE-1, EAGLE-3 and Medusa layouts, speculators folders; then eval, train and export take it.
    """
    from .shipping import import_head

    import_head(source, verifier, run_folder, engine, allow_pickle)


@data_app.command()
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
def env(as_json: Json = False) -> None:
    """Print versions and devices, for bug reports."""
    from .cli_env import facts

    found = facts()
    lines = (f"{name:<13} {'-' if value is None else value}" for name, value in found.items())
    show(found) if as_json else print("\n".join(lines))


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
