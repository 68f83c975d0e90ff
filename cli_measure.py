"""`headstart eval`, `lossless`, `tree`, `advise`, `doctor`, `analyse`, `report`: what is measured of a run."""

import json
import os
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from . import cli_trees
from .cli_options import Json, RunFolder, check_run, show
from .errors import UserError

app = typer.Typer()
EvaluationOverrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Of the recipe, such as evaluation.batch=8.")
]
DrafterNames = Annotated[
    list[str] | None,
    typer.Option(help="head, prompt_lookup, lookahead, hierarchical, truncated:LAYERS or model:MODEL; may be repeated."),
]
Trees = Annotated[
    list[str] | None, typer.Option(help="chain:DEPTH, dynamic:DEPTH,TOP_K,NODES or static:FILE.json; may be repeated.")
]


@app.command(name="eval")
def evaluate(
    run: RunFolder,
    overrides: EvaluationOverrides = None,
    drafter: DrafterNames = None,
    tree: Trees = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="A chat file or a folder of them; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a head, and other drafters, by decoding.

    Held-out prompts, every drafter with every tree; writes evaluation.json.

    --drafter, --tree and --prompts replace the lists of the recipe.
    Exits with 1 when an answer differs from the verifier's own greedy decoding.
    """
    check_run(run)
    from .judging import evaluate

    asked = [*(overrides or []), *cli_trees.overrides(drafter or [], tree or [], prompts or [])]
    with redirect_stdout(sys.stderr):  # progress must not mix with the results
        evaluate(run, asked)
    evaluation = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    from .tables import results_table

    show(evaluation if as_json else results_table(evaluation))
    if any(result["identical_to_greedy"] is False for result in evaluation["results"]):
        raise typer.Exit(1)


@app.command()
def lossless(
    run: Annotated[Path | None, typer.Argument(help="A run folder, to test its own verifier and head too.")] = None,
    overrides: EvaluationOverrides = None,
    drafter: DrafterNames = None,
    tree: Trees = None,
    tokens: Annotated[int, typer.Option(min=1000, help="Sampled tokens of the run's test; 50,000 take minutes.")] = 50_000,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of random models, trees and samples.")] = 0,
    as_json: Json = False,
) -> None:
    """Prove that decoding with drafts is lossless.

    --drafter and --tree replace the lists of the recipe.
    Exits with 1 when a gate fails: a rule is not exact, a wrong rule is not caught, a text is not the verifier's.
    """
    asked = [*(overrides or []), *cli_trees.overrides(drafter or [], tree or [], [])]
    if run is not None:
        check_run(run)
    elif asked:
        raise UserError("--drafter and --tree: of what run? `headstart lossless RUN --drafter ..`")
    from .judging import lossless
    from .tables import gates_table

    with redirect_stdout(sys.stderr):
        gates = list(lossless(run, tokens, seed, asked))
    show({"gates": [asdict(gate) for gate in gates]} if as_json else gates_table(gates))
    if not all(gate.passed for gate in gates):
        raise typer.Exit(1)


Nodes = Annotated[int, typer.Option(min=2, help="Of the tree, the root included.")]
Depth = Annotated[int | None, typer.Option(min=1, help="Levels; default: what the head drafts, else 5.")]
Calibration = Annotated[int, typer.Option(min=1, help="Prompts of the training files that the head is tried on.")]


@app.command()
def tree(
    run: RunFolder,
    nodes: Nodes = 32,
    depth: Depth = None,
    prompts: Calibration = 16,
    output: Annotated[Path | None, typer.Option(help="Write the tree, for `eval --tree static:FILE`.")] = None,
    as_json: Json = False,
) -> None:
    """Find the best static tree for a head.

    Counts how often each of its choices is right on prompts of the training files, and takes the nodes worth most.
    """
    check_run(run)
    from .heads.files import check_writable, write_text
    from .tables import ranks_table
    from .tuning import search_tree

    if output is not None:
        check_writable(output.parent)
    with redirect_stdout(sys.stderr):
        found, ranks = search_tree(run, nodes, depth, prompts)
    result = found.tree.describe() | {"predicted_tau": found.tau}
    if output is not None:
        write_text(output, json.dumps(result) + "\n")
    show(result | {"reached": ranks.reached, "hits": ranks.hits} if as_json else ranks_table(ranks, found))


@app.command()
def advise(
    run: RunFolder,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences decoded at a time; may be repeated; default: 1.")
    ] = None,
    nodes: Nodes = 64,
    depth: Depth = None,
    prompts: Calibration = 16,
    measure: Annotated[bool, typer.Option("--measure", help="Decode the held-out prompts with the trees, too.")] = False,
    as_json: Json = False,
) -> None:
    """Say which tree decodes fastest on this device.

    From measured latencies and how often the head's choices are right; --measure decodes and compares.
    """
    check_run(run)
    from .tables import advice_table
    from .tuning import advise_run

    with redirect_stdout(sys.stderr):
        found = [one for its in advise_run(run, batch or [1], nodes, depth, prompts, measure).values() for one in its]
    show({"advice": [one.describe() for one in found]} if as_json else advice_table(found))


@app.command()
def doctor(
    run: RunFolder,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts that the verifier answers.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 64,
    as_json: Json = False,
) -> None:
    """Find where training and decoding of a head part.

    Exits with 1 when they do, with the first place and the likely cause.
    """
    check_run(run)
    from .judging import doctor
    from .tables import diagnosis_tables

    with redirect_stdout(sys.stderr):
        diagnosis = doctor(run, prompts, tokens)
    first = diagnosis.first
    if as_json:
        show(asdict(diagnosis) | {"healthy": first is None, "first": None if first is None else asdict(first)})
    else:
        show(diagnosis_tables(diagnosis))
    if first is not None:
        raise typer.Exit(1)


@app.command()
def analyse(
    run: Annotated[Path, typer.Argument(help="A run folder with its evaluation.json.")],
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts that the verifier answers.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 64,
    cost: Annotated[float | None, typer.Option(min=0, help="Of a draft in verifier passes; default: as timed.")] = None,
    as_json: Json = False,
) -> None:
    """Write analysis.json and the run's page with its pictures.

    alpha against KL during training, how many drafts pay, top-k accuracy by depth, tau by kind of text and context.
    """
    check_run(run)
    from .evaluation.report import write_report
    from .judging import analyse
    from .tables import analysis_tables

    with redirect_stdout(sys.stderr):
        analysis = analyse(run, prompts, tokens, cost)
        page = write_report([run], run / "report.html")
    show(analysis.model_dump() if as_json else analysis_tables(analysis, page))


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
