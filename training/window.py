"""What metrics.jsonl tells of the steps since its last line: losses, hits, gradient norms, tokens and time."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..heads.losses import HeadLoss
from ..ranks import total


class Window:
    """Sums since the last logged line."""

    def __init__(self, seconds: float) -> None:
        self.start = time.perf_counter() - seconds
        self.reset()

    def reset(self) -> None:
        self.losses: list[HeadLoss] = []
        self.norms: list[float] = []
        self.tokens = 0
        self.since = time.perf_counter()

    def add(self, losses: Sequence[HeadLoss], norm: float, tokens: int) -> None:
        self.losses += [replace(loss, sums=loss.sums.detach()) for loss in losses]
        self.norms.append(norm)
        self.tokens += tokens

    def labels(self) -> int:
        """Supervised ones of this process, of all depths (not the verifier's own)."""
        return sum(int(loss.counts[:-1].sum() if loss.last_is_verifier else loss.counts.sum()) for loss in self.losses)

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is not training time."""
        begun = time.perf_counter()
        yield
        passed = time.perf_counter() - begun
        self.start += passed
        self.since += passed

    def mean_loss(self) -> float:
        return self._joined().total().item()

    def tokens_per_second(self) -> float:
        return self.tokens / max(time.perf_counter() - self.since, 1e-9)

    def _joined(self) -> HeadLoss:
        sums, counts, correct = (
            torch.stack([getattr(loss, name) for loss in self.losses]).sum(0) for name in ("sums", "counts", "correct")
        )
        parts = {name: torch.stack([loss.parts[name] for loss in self.losses]).sum(0) for name in self.losses[0].parts}
        return replace(self.losses[-1], sums=sums, counts=counts, correct=correct, parts=parts)

    def flush(self) -> dict[str, Any]:
        """The line to log: token means over the window and all processes, each depth by its own labels (collective)."""
        joined = of_all_processes(self._joined())
        self.tokens = int(total(torch.tensor(self.tokens)))
        counts = joined.counts.clamp(min=1)
        line: dict[str, Any] = {
            "loss": joined.total().item(),
            "loss_by_depth": (joined.sums / counts).tolist(),
            **{f"{name}_by_depth": (sums / counts).tolist() for name, sums in joined.parts.items()},
            "accuracy_by_depth": (joined.correct / counts).tolist(),
            "grad_norm": max(self.norms),
            "supervised_tokens": int(joined.counts[0]),
            "tokens_per_second": round(self.tokens_per_second(), 1),
            "supervised_tokens_per_second": round(int(joined.counts[0]) / max(time.perf_counter() - self.since, 1e-9), 1),
            "seconds": round(self.seconds(), 2),
        }
        if joined.last_is_verifier:
            line |= {"verifier_loss": line["loss_by_depth"].pop(), "verifier_accuracy": line["accuracy_by_depth"].pop()}
        self.reset()
        return line


def of_all_processes(loss: HeadLoss) -> HeadLoss:
    """The sums of a loss over all processes."""
    tensors = [loss.sums, loss.counts, loss.correct, *loss.parts.values()]
    sums, counts, correct, *parts = [total(tensor).to(tensor.device) for tensor in tensors]
    return replace(loss, sums=sums, counts=counts, correct=correct, parts=dict(zip(loss.parts, parts, strict=True)))
