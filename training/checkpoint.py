"""Checkpoints: everything a stopped run needs to go on exactly where it was."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from ..heads.base import DraftHead
from ..heads.files import replace_folder


@dataclass
class Progress:
    """Plain numbers of a run. step: optimizer steps done; best_tau, best_by_prompt: of the head in `head/`, and [emitted,
    rounds] of each prompt it was judged on; seconds: training time so far."""

    step: int = 0
    best_tau: float = 0.0
    seconds: float = 0.0
    best_by_prompt: list[list[int]] = field(default_factory=list)


class Checkpoints:
    """`step-N` folders under `folder`, of which only the newest is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))

    def save(self, head: DraftHead, optimizers: Sequence[Optimizer], progress: Progress) -> None:
        def write(target: Path) -> None:
            save_file({k: v.detach().cpu().contiguous() for k, v in head.state_dict().items()}, target / "head.safetensors")
            torch.save([optimizer.state_dict() for optimizer in optimizers], target / "optimizers.pt")
            torch.save(random_states(), target / "random.pt")  # a head may draw noise
            (target / "progress.json").write_text(json.dumps(vars(progress)))

        replace_folder(self.folder / f"step-{progress.step}", write)
        for step in self.steps()[:-1]:
            replaced = self.folder / f"step-{step}"
            for file in replaced.iterdir():
                file.unlink()
            replaced.rmdir()

    def load(self, head: DraftHead, optimizers: Sequence[Optimizer]) -> Progress:
        """Restore the newest checkpoint, if there is one, and say where it stood."""
        steps = self.steps()
        if not steps:
            return Progress()
        source = self.folder / f"step-{steps[-1]}"
        head.load_state_dict(load_file(source / "head.safetensors"))
        states = torch.load(source / "optimizers.pt", weights_only=True)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        restore_random(torch.load(source / "random.pt", weights_only=True))
        return Progress(**json.loads((source / "progress.json").read_text()))


def random_states() -> list[Tensor]:
    """The state of torch's generators: of the CPU, then of every CUDA device in use."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def restore_random(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in enumerate(states[1 : 1 + torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
