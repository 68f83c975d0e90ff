"""Checkpoints: everything a stopped run needs to go on exactly where it was, the same whatever the strategy.

head.safetensors: the whole head; optimizers.pt: the moments of whole parameters by name; progress.json. Noise is drawn from the
step's number, so no random state is kept.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer

from ..heads.base import DraftHead
from ..heads.files import replace_folder
from ..ranks import barrier, is_first, share
from .strategies.base import Strategy


@dataclass
class Progress:
    """Plain numbers of a run. step: optimizer steps done; judged: the newest of them with a held-out evaluation; best_tau: of
    the head in `head/`; seconds: training time so far."""

    step: int = 0
    best_tau: float = 0.0
    seconds: float = 0.0
    judged: int = 0


class Checkpoints:
    """`step-N` folders under `folder`, of which only the newest is kept. The first process writes, all read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))

    def save(self, strategy: Strategy, progress: Progress) -> None:
        weights, moments = strategy.weights(), strategy.moments()

        def write(target: Path) -> None:
            save_file({k: v.detach().cpu().contiguous() for k, v in weights.items()}, target / "head.safetensors")
            torch.save(
                {k: {name: v.cpu() for name, v in state.items()} for k, state in moments.items()}, target / "optimizers.pt"
            )
            (target / "progress.json").write_text(json.dumps(vars(progress)))

        if is_first():
            replace_folder(self.folder / f"step-{progress.step}", write)
            for step in self.steps()[:-1]:
                shutil.rmtree(self.folder / f"step-{step}")
        barrier()

    def load(self, head: DraftHead, strategy: Strategy, optimizers: Callable[[], Sequence[Optimizer]]) -> Progress:
        """Start the strategy with the newest checkpoint, or the head as it is where there is none; say where the run stands."""
        if is_first():
            self.tidy()
        newest = share(max(self.steps(), default=None))
        if newest is None:
            strategy.start(head, optimizers)
            return Progress()
        source = self.folder / f"step-{newest}"
        head.load_state_dict(load_file(source / "head.safetensors"))
        strategy.start(head, optimizers)
        strategy.restore(torch.load(source / "optimizers.pt", weights_only=True, mmap=True))
        return Progress(**json.loads((source / "progress.json").read_text()))

    def tidy(self) -> None:
        """Put right what a kill left: a folder that was being replaced goes back, half-written ones go."""
        for moved in self.folder.glob(".step-*-old"):
            place = self.folder / "-".join(moved.name.removeprefix(".").split("-")[:2])
            if not place.exists():
                moved.rename(place)
        for left in self.folder.glob(".step-*"):
            shutil.rmtree(left)
