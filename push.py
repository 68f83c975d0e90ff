"""`headstart push`: an export with its model card, checked, and sent to a hub."""

import tempfile
from pathlib import Path

from .card import model_card
from .errors import UserError
from .evaluation import plots
from .evaluation.report import training_curves
from .evaluation.run_folder import Run, read_run
from .export.layout import needs_name
from .export.leaks import leaks
from .export.upload import check_repo, upload
from .export.verify import verify
from .export.write import write_export
from .progress import say
from .shipping import Dtype, order_of


def push_run(
    run_folder: Path,
    engine: str,
    repo: str,
    dtype: Dtype = "float32",
    verifier_name: str | None = None,
    license: str = "other",
    public: bool = False,
    dry_run: bool = False,
) -> str:
    """Publish the run's head as `engine` loads it, with README.md and training.png.

    Returns the repository's address, or with dry_run what would be sent: each file with its size, and the card. Refuses a run
    that was never evaluated, an export that the engine's loader would misread, and files with secrets or paths of this machine.
    """
    check_repo(repo)
    run = read_run(run_folder)  # before any model is loaded
    order = order_of(run_folder, dtype, verifier_name)
    head, name = order.head, needs_name(order, engine)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / repo.rpartition("/")[2]
        export = write_export(order, engine, folder)
        if broken := verify(folder, engine, head, order.verifier).broken:
            raise UserError(f"{engine} would misread this export: {broken[0]}")
        card = model_card(run, export, name, license)
        (folder / "README.md").write_text(card, encoding="utf-8")
        (folder / "training.png").write_bytes(training_picture(run))
        if found := list(leaks(folder)):
            raise UserError("\n".join(found))
        if dry_run:
            sizes = [f"{path.stat().st_size:>12,}  {path.name}" for path in sorted(folder.iterdir())]
            return "\n".join([*sizes, "", card])
        address = upload(folder, repo, f"{head.kind} head for {name}, as {export.engine} loads it", public)
    say(f"{address}: pushed, {'public' if public else 'private'}")
    return address


def training_picture(run: Run) -> bytes:
    curves = training_curves(run)
    if not curves:
        raise UserError(f"{run.folder / 'metrics.jsonl'}: no loss and no held-out tau in it; train the head first")
    with plots.style():
        return plots.to_png(plots.training("Training", "#1f6f6b", *curves))
