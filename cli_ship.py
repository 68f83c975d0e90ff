"""`headstart export`, `verify-export`, `import`, `push`: heads to and from other formats."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import Json, RunFolder, check_run, show

app = typer.Typer()


class Dtype(StrEnum):
    """What exported tensors may be."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@app.command()
def export(
    run: RunFolder,
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
    engine: Annotated[
        str, typer.Option(help="Whose layer indices an EAGLE-3 folder holds: vllm, sglang, speculators, eagle or tensorrt-llm.")
    ] = "vllm",
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read .bin and .pt files, tensors alone.")] = False,
) -> None:
    """Make a run folder of a published head.

    EAGLE-1, EAGLE-3 and Medusa layouts, speculators folders; then eval, train and export take it.
    """
    from .shipping import import_head

    import_head(source, verifier, run_folder, engine, allow_pickle)


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="An evaluated run folder.")],
    to: Annotated[str, typer.Option(help="vllm, sglang, speculators, eagle, medusa or tensorrt-llm.")],
    repo: Annotated[str, typer.Option(help="OWNER/NAME on the hub; made private where it is new.")],
    verifier: Annotated[str | None, typer.Option(help="Its hub id, where the run has a folder or a builtin.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the tensors; float32 changes nothing.")] = Dtype.float32,
    license: Annotated[str, typer.Option(help="Of the head, as the hub spells it, such as apache-2.0.")] = "other",
    public: Annotated[bool, typer.Option("--public", help="Make the repository public.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent; send nothing.")] = False,
) -> None:
    """Publish a head on the hub with its model card.

    Needs a token (HF_TOKEN or `hf auth login`); HF_ENDPOINT names another hub.
    """
    check_run(run)
    from .push import push_run

    print(push_run(run, to, repo, dtype.value, verifier, license, public, dry_run))
