"""The training loop. Takes plain arguments; `build.py` builds them from a recipe."""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ..data.features import FeatureSource
from ..errors import UserError
from ..heads.base import DraftHead
from ..heads.hub import save_head
from ..heads.losses import HeadLoss
from ..heads.verifier import Verifier
from ..progress import progress_bar
from .checkpoint import Checkpoints, Progress
from .tracking import Metrics

Evaluate = Callable[[DraftHead], dict[str, Any]]  # held-out decoding: at least {"tau": ..}


@dataclass(frozen=True)
class Settings:
    """How to optimise; names and meaning as in the recipe's `training` section."""

    learning_rate: float
    warmup: float
    schedule: str
    weight_decay: float
    betas: tuple[float, float]
    clip: float
    log_every: int
    save_every: int | None
    evaluate_every: int | None


def fit(
    head: DraftHead,
    verifier: Verifier,
    source: FeatureSource,
    plan: Sequence[Sequence[int]],
    settings: Settings,
    run_folder: Path,
    evaluate: Evaluate,
) -> Progress:
    """Train `head` on the batches of `plan` (sample indices, one entry an optimizer step), resuming what the run folder holds.

    Keeps the head of the best held-out tau in run_folder/head. Trainable weights and moments are float32.
    """
    optimizer, scheduler = make_optimizer(head, settings, len(plan))
    checkpoints = Checkpoints(run_folder / "checkpoints")
    progress = checkpoints.load(head, optimizer, scheduler)
    metrics = Metrics(run_folder / "metrics.jsonl", progress.step)
    window = Window(progress.seconds)
    head.train()
    with progress_bar(f"training {head.kind}", len(plan), progress.step) as bar:
        for indices in plan[progress.step :]:
            batch, features = source.load(indices)
            losses = head.loss(batch, features, verifier)
            norm = step(head, losses, optimizer, settings.clip, progress.step)
            with warnings.catch_warnings():  # a first batch without a label makes no optimizer step
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                scheduler.step()
            progress.step += 1
            window.add(losses, norm, int(batch.lengths.sum()))
            bar(1, f"loss {window.mean_loss():.3f}  {window.tokens_per_second():.0f} tokens/s")
            last = progress.step == len(plan)
            if last or progress.step % settings.log_every == 0:
                metrics.log(progress.step, learning_rate=scheduler.get_last_lr()[0], **window.flush())
            if last or due(progress.step, settings.evaluate_every):
                judge(head, evaluate, progress, metrics, run_folder)
            if last or due(progress.step, settings.save_every):
                progress.seconds = window.seconds()
                checkpoints.save(head, optimizer, scheduler, progress)
    return progress


def make_optimizer(head: nn.Module, settings: Settings, steps: int) -> tuple[AdamW, LambdaLR]:
    parameters = [p for p in head.parameters() if p.requires_grad]
    optimizer = AdamW(
        parameters, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )
    return optimizer, LambdaLR(optimizer, lambda done: rate(done, steps, settings.warmup, settings.schedule))


def rate(done: int, steps: int, warmup: float, schedule: str) -> float:
    """Share of the highest learning rate after `done` of `steps` steps: linear warm-up, then a cosine to zero or constant."""
    warm = warmup * steps
    if done < warm:
        return (done + 1) / (warm + 1)
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (done - warm) / max(steps - warm, 1)))


def step(head: nn.Module, losses: HeadLoss, optimizer: AdamW, clip: float, number: int) -> float:
    """One optimizer step; returns the gradient's norm before clipping. A batch without a label changes nothing."""
    optimizer.zero_grad(set_to_none=True)
    if not bool(losses.counts.any()):
        return 0.0
    losses.total().backward()
    norm = nn.utils.clip_grad_norm_(head.parameters(), clip).item()
    if not math.isfinite(norm):
        raise UserError(f"step {number + 1}: the gradient is {norm}; lower training.learning_rate or look at the data")
    optimizer.step()
    return norm


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def judge(head: DraftHead, evaluate: Evaluate, progress: Progress, metrics: Metrics, run_folder: Path) -> None:
    """Decode held-out prompts for real and keep the head if it is the best so far."""
    head.eval()
    held_out = evaluate(head)
    head.train()
    metrics.log(progress.step, held_out=held_out)
    tau = held_out["tau"] or 0.0  # None: every answer ended before its first round
    if tau > progress.best_tau or not (run_folder / "head").exists():
        progress.best_tau = tau
        save_head(head, run_folder / "head")


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

    def add(self, losses: HeadLoss, norm: float, tokens: int) -> None:
        self.losses.append(HeadLoss(losses.sums.detach(), losses.counts, losses.correct, losses.weights))
        self.norms.append(norm)
        self.tokens += tokens

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def mean_loss(self) -> float:
        return self._joined().total().item()

    def tokens_per_second(self) -> float:
        return self.tokens / max(time.perf_counter() - self.since, 1e-9)

    def _joined(self) -> HeadLoss:
        sums, counts, correct = (
            torch.stack([getattr(loss, name) for loss in self.losses]).sum(0) for name in ("sums", "counts", "correct")
        )
        return HeadLoss(sums, counts, correct, self.losses[0].weights)

    def flush(self) -> dict[str, Any]:
        """The line to log: token means over the window, each depth by its own supervised labels."""
        joined = self._joined()
        counts = joined.counts.clamp(min=1)
        line = {
            "loss": joined.total().item(),
            "loss_by_depth": (joined.sums / counts).tolist(),
            "accuracy_by_depth": (joined.correct / counts).tolist(),
            "grad_norm": max(self.norms),
            "supervised_tokens": int(joined.counts[0]),
            "tokens_per_second": round(self.tokens_per_second(), 1),
            "seconds": round(self.seconds(), 2),
        }
        self.reset()
        return line
