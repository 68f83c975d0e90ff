"""Where the time of this process's training steps goes, and how much of the device they use; defined in docs/metrics.md."""

import resource
import time
from typing import Any

import torch

from ..heads.base import DraftHead
from ..heads.sizes import flops_a_label, verifier_sizes
from ..heads.verifier import Verifier

PARTS = ("data", "verifier", "forward", "backward", "optimizer", "other")
PAUSED = "paused"  # not training: held-out evaluation


class Profile:
    """`lap(part)` books the time since the lap before to a part. On a GPU it is the device's time: nothing waits for it."""

    def __init__(self, head: DraftHead, verifier: Verifier, products: torch.dtype) -> None:
        self.device = verifier.device
        self.flops_a_token = 2 * verifier_sizes(verifier.model).active
        self.flops_a_label = flops_a_label(head)
        self.peak = product_flops(self.device, products)
        self.note = ""  # of the last line, for the progress bar
        self.marks: list[tuple[str, Any]] = []

    def lap(self, part: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((part, event))
        else:
            self.marks.append((part, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """By part, since the last line."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        spent = dict.fromkeys((*PARTS, PAUSED), 0.0)
        for (_, before), (part, after) in zip(self.marks, self.marks[1:], strict=False):
            spent[part] += before.elapsed_time(after) / 1e3 if self.device.type == "cuda" else after - before
        del spent[PAUSED]
        return spent

    def flush(self, tokens: int, labels: int, steps: int, remaining: int) -> dict[str, Any]:
        """What a logged line tells of the `steps` since the one before. tokens, labels (of all depths): this process's."""
        spent = self.seconds()
        whole = max(sum(spent.values()), 1e-9)
        flops = self.flops_a_label * labels + (self.flops_a_token * tokens if spent["verifier"] else 0)
        line = {
            "time_shares": {part: round(seconds / whole, 4) for part, seconds in spent.items()},
            "mfu": round(flops / whole / self.peak, 4),
            "peak_memory_gb": round(peak_memory(self.device) / 1e9, 3),
            "eta_seconds": round(whole / steps * remaining, 3),
        }
        self.note = f"{line['mfu']:.0%} MFU  {line['peak_memory_gb']:.1f} GB"
        self.marks = self.marks[-1:]
        return line


def product_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP a second that a large square matrix product reaches here: the best of four."""
    size = 4096 if device.type == "cuda" else 512
    x = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        x @ x
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / max(best, 1e-9)


def peak_memory(device: torch.device) -> float:
    """The most bytes in use so far: of the device, or of the process where that is a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
