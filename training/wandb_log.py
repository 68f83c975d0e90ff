"""Weights & Biases beside metrics.jsonl: a copy for looking at. It never asks, and nothing that happens to it ends a run."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from netrc import netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from ..errors import first_line
from ..progress import say
from ..ranks import is_first
from .tracking import Report

AXIS = "train/step"  # wandb's own step must only rise, a resumed run begins before its last line
REACH = 3.0  # seconds to find out whether there is a network


@contextmanager
def wandb_report(options: dict[str, Any] | None, run_folder: Path, config: dict[str, Any]) -> Iterator[Report]:
    """Yields what is to be told each line. options: of wandb.init, None for no wandb; of several processes the first alone.

    The run's id lies in run_folder/wandb.json, so a resumed run goes on as the same one.
    """
    if options is None or not is_first():
        yield lambda step, values: None
        return
    run = _Guarded()
    run(lambda: _start(options, run_folder, config))
    failed = True
    try:
        yield lambda step, values: run(lambda: run.held.log({AXIS: step, **flat(values)}))
        failed = False
    finally:
        run(lambda: run.held.finish(exit_code=int(failed)))


class _Guarded:
    """Calls wandb until a call fails; then says so once, and is still."""

    held: Any = None
    dead = False

    def __call__(self, action: Callable[[], Any]) -> None:
        if self.dead:
            return
        try:
            self.held = action() or self.held
        except (Exception, SystemExit) as error:  # whatever it raises, the run matters more
            self.dead = True
            reason = first_line(error)
            say(f"wandb: {reason}; the run goes on without it, metrics.jsonl is complete")


def _start(options: dict[str, Any], run_folder: Path, config: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError:
        raise RuntimeError("not installed (pip install 'headstart[wandb]')") from None
    path = run_folder / "wandb.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"id": uuid4().hex[:8]}) + "\n", encoding="utf-8")
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_key() and _reachable() else "offline")
    run = wandb.init(
        **options,
        id=json.loads(path.read_text(encoding="utf-8"))["id"],
        resume="allow" if mode == "online" else None,  # offline there is nothing to look up: the id joins the parts
        mode=mode,
        dir=run_folder,
        config=config,
        settings=wandb.Settings(silent=True, console="off", init_timeout=60),
    )
    run.define_metric(AXIS)
    run.define_metric("*", step_metric=AXIS)
    if mode == "offline":
        say(f"wandb: no key or no network; offline, `wandb sync {run_folder}/wandb/offline-run-*` sends it later")
    return run


def _host() -> str:
    return urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc(os.environ.get("NETRC")).authenticators(_host()) is not None
    except (OSError, ValueError):
        return False


def _reachable() -> bool:
    parts = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    try:
        socket.create_connection((_host(), parts.port or (443 if parts.scheme == "https" else 80)), REACH).close()
    except OSError:
        return False
    return True


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers under one-level names: lists by index, dictionaries by key; what is no number is left out, and so are lists of
    lists (a pair for each prompt of a look)."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            found |= flat({str(i): part for i, part in enumerate(value) if not isinstance(part, list)}, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{name}"] = value
    return found
