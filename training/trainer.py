"""The training loop. Takes plain arguments; `build.py` builds them from a recipe."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ..data.features import FeatureSource
from ..errors import UserError
from ..heads.base import DraftHead
from ..heads.hub import save_head
from ..heads.losses import HeadLoss
from ..heads.verifier import Verifier
from ..progress import progress_bar
from .best import better
from .checkpoint import Checkpoints, Progress
from .muon import Muon
from .tracking import Metrics

Evaluate = Callable[[DraftHead], dict[str, Any]]  # held-out decoding: at least {"tau": ..}, as `look` gives it


@dataclass(frozen=True)
class Settings:
    """How to optimise; names and meaning as in the recipe's `training` section."""

    optimizer: str
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

    Keeps the head of the best held-out tau in run_folder/head. Trainable weights and moments are float32; under a verifier in
    half precision products are bfloat16.
    """
    half = verifier.dtype.itemsize == 2
    optimizers = make_optimizers(head, settings, torch.bfloat16 if half else torch.float32)
    checkpoints = Checkpoints(run_folder / "checkpoints")
    progress = checkpoints.load(head, optimizers)
    metrics = Metrics(run_folder / "metrics.jsonl", progress.step)
    window = Window(progress.seconds)
    head.train()
    with progress_bar(f"training {head.kind}", len(plan), progress.step) as bar:
        for indices in plan[progress.step :]:
            share = rate(progress.step, len(plan), settings.warmup, settings.schedule)
            set_learning_rate(optimizers, settings.learning_rate * share)
            batch, features = source.load(indices)
            with torch.autocast(verifier.device.type, torch.bfloat16, enabled=half):
                losses = head.loss(batch, features, verifier)
            norm = step(head, losses, optimizers, settings.clip, progress.step)
            progress.step += 1
            window.add(losses, norm, int(batch.lengths.sum()))
            bar(1, f"loss {window.mean_loss():.3f}  {window.tokens_per_second():.0f} tokens/s")
            last = progress.step == len(plan)
            if last or progress.step % settings.log_every == 0:
                metrics.log(progress.step, learning_rate=settings.learning_rate * share, **window.flush())
            if last or due(progress.step, settings.evaluate_every):
                with window.paused():
                    judge(head, evaluate, progress, metrics, run_folder)
            if last or due(progress.step, settings.save_every):
                progress.seconds = window.seconds()
                checkpoints.save(head, optimizers, progress)
    return progress


def make_optimizers(head: nn.Module, settings: Settings, products: torch.dtype = torch.float32) -> list[Optimizer]:
    """AdamW for everything, or Muon for the matrices between hidden states and AdamW for the rest."""
    named = {name: p for name, p in head.named_parameters() if p.requires_grad}
    hidden = {name for name, p in named.items() if p.dim() == 2 and "lm_head" not in name}
    inner = [p for name, p in named.items() if settings.optimizer == "muon" and name in hidden]
    rest = [p for name, p in named.items() if settings.optimizer != "muon" or name not in hidden]
    lr, decay = settings.learning_rate, settings.weight_decay
    optimizers: list[Optimizer] = []
    if inner:
        optimizers.append(Muon(inner, lr, weight_decay=decay, dtype=products))
    if rest:
        optimizers.append(AdamW(rest, lr=lr, betas=settings.betas, weight_decay=decay, fused=True))
    return optimizers


def set_learning_rate(optimizers: Sequence[Optimizer], value: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = value


def rate(done: int, steps: int, warmup: float, schedule: str) -> float:
    """Share of the highest learning rate after `done` of `steps` steps: linear warm-up, then a cosine to zero or constant."""
    warm = warmup * steps
    if done < warm:
        return (done + 1) / (warm + 1)
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (done - warm) / max(steps - warm, 1)))


def step(head: nn.Module, losses: HeadLoss, optimizers: Sequence[Optimizer], clip: float, number: int) -> float:
    """One optimizer step; returns the gradient's norm before clipping. A batch without a label changes nothing."""
    head.zero_grad(set_to_none=True)
    if not bool(losses.counts.any()):
        return 0.0
    losses.total().backward()
    norm = nn.utils.clip_grad_norm_(head.parameters(), clip).item()
    if not math.isfinite(norm):
        raise UserError(f"step {number + 1}: the gradient is {norm}; lower training.learning_rate or look at the data")
    for optimizer in optimizers:
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
    by_prompt = held_out.get("by_prompt", [])
    if better(tau, by_prompt, progress.best_tau, progress.best_by_prompt) or not (run_folder / "head").exists():
        progress.best_tau, progress.best_by_prompt = tau, by_prompt
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
        self.losses.append(replace(losses, sums=losses.sums.detach()))
        self.norms.append(norm)
        self.tokens += tokens

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
        return HeadLoss(sums, counts, correct, self.losses[0].weights, parts)

    def flush(self) -> dict[str, Any]:
        """The line to log: token means over the window, each depth by its own supervised labels."""
        joined = self._joined()
        counts = joined.counts.clamp(min=1)
        line = {
            "loss": joined.total().item(),
            "loss_by_depth": (joined.sums / counts).tolist(),
            **{f"{name}_by_depth": (sums / counts).tolist() for name, sums in joined.parts.items()},
            "accuracy_by_depth": (joined.correct / counts).tolist(),
            "grad_norm": max(self.norms),
            "supervised_tokens": int(joined.counts[0]),
            "tokens_per_second": round(self.tokens_per_second(), 1),
            "seconds": round(self.seconds(), 2),
        }
        self.reset()
        return line
