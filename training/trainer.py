"""The training loop. Takes plain arguments; `build.py` builds them from a recipe."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ..data.features import FeatureSource
from ..heads.base import DraftHead
from ..heads.batch import Batch
from ..heads.hub import save_head
from ..heads.verifier import Features, Verifier
from ..progress import progress_bar
from ..ranks import rank, share, total, world
from .best import better
from .checkpoint import Checkpoints, Progress
from .muon import Muon
from .profile import PAUSED, Profile
from .stopping import Stop, stopping
from .strategies.base import Strategy
from .strategies.plain import Plain
from .strategies.sharded import leading
from .tracking import Metrics, Report
from .window import Window

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
    accumulation: int
    seed: int
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
    strategy: Strategy | None = None,
    report: Report = lambda step, values: None,
    judging: Verifier | None = None,
) -> Progress:
    """Train `head` on the batches of `plan` (sample indices, one entry an optimizer step), resuming what the run folder holds.

    Keeps the head of the best held-out tau in run_folder/head. Trainable weights and moments are float32; under a verifier in
    half precision products are bfloat16. On SIGTERM saves after the step at hand and returns before the plan's end.
    judging: the verifier that `evaluate` decodes with, if it is another one.
    """
    strategy = strategy or Plain()
    products = torch.bfloat16 if verifier.dtype.itemsize == 2 else torch.float32
    profile = Profile(head, verifier, products)
    source.lap = profile.lap
    checkpoints = Checkpoints(run_folder / "checkpoints")
    progress = checkpoints.load(head, strategy, lambda: make_optimizers(head, settings, products, head.rate_of))
    kept = replace(progress)
    metrics = Metrics(run_folder / "metrics.jsonl", progress.step, report)
    window = Window(progress.seconds)
    head.train()
    with progress_bar(f"training {head.kind}", len(plan), progress.step) as bar, stopping() as stop:
        while True:
            finished = progress.step == len(plan)
            unjudged = progress.judged < progress.step and not stop.agreed
            if unjudged and (finished or due(progress.step, settings.evaluate_every)):
                with window.paused():
                    judge(strategy, verifier, evaluate, progress, metrics, run_folder, stop, judging)
                profile.lap(PAUSED)
            if progress != kept and (finished or stop.agreed or due(progress.step, settings.save_every)):
                progress.seconds = window.seconds()
                checkpoints.save(strategy, progress)
                kept = replace(progress)
            if finished or stop.agreed:
                return progress
            share = rate(progress.step, len(plan), settings.warmup, settings.schedule)
            set_learning_rate(strategy.optimizers, settings.learning_rate * share)
            head.begin_step(progress.step / len(plan))
            step(strategy, verifier, source, plan[progress.step], settings, progress.step + 1, window, stop)
            progress.step += 1
            bar(1, f"loss {window.mean_loss():.3f}  {window.tokens_per_second():.0f} tokens/s  {profile.note}")
            if progress.step == len(plan) or progress.step % settings.log_every == 0:
                used = profile.flush(window.tokens, window.labels(), len(window.norms), len(plan) - progress.step)
                metrics.log(progress.step, learning_rate=settings.learning_rate * share, **window.flush(), **used)


def make_optimizers(
    head: nn.Module, settings: Settings, products: torch.dtype = torch.float32,
    rate_of: Callable[[str], float] = lambda name: 1.0,
) -> list[Optimizer]:  # fmt: skip
    """AdamW for everything, or Muon for the matrices between hidden states and AdamW for the rest.

    rate_of: what a parameter's learning rate is multiplied with; those that have one of their own are AdamW's.
    """
    named = {name: p for name, p in head.named_parameters() if p.requires_grad}
    hidden = {name for name, p in named.items() if p.dim() == 2 and "lm_head" not in name and rate_of(name) == 1}
    inner = [p for name, p in named.items() if settings.optimizer == "muon" and name in hidden]
    outer = {name: p for name, p in named.items() if settings.optimizer != "muon" or name not in hidden}
    rest = [
        {"params": [p for name, p in outer.items() if rate_of(name) == rate], "rate": rate}
        for rate in dict.fromkeys(map(rate_of, outer))
    ]
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
            group["lr"] = value * group.get("rate", 1.0)


def rate(done: int, steps: int, warmup: float, schedule: str) -> float:
    """Share of the highest learning rate after `done` of `steps` steps: linear warm-up, then a cosine to zero or constant."""
    warm = warmup * steps
    if done < warm:
        return (done + 1) / (warm + 1)
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (done - warm) / max(steps - warm, 1)))


def step(
    strategy: Strategy, verifier: Verifier, source: FeatureSource, indices: Sequence[int], settings: Settings, number: int,
    window: Window, stop: Stop,
) -> None:  # fmt: skip
    """One optimizer step on these samples, of which every process takes its micro-batches. Without a label nothing changes."""
    torch.manual_seed(random.Random(f"{settings.seed}-{number}-{rank()}").getrandbits(63))  # a head may draw noise
    source.lap("other")
    mine = shares(indices, settings.accumulation)
    parts = [load(source, part) for part in mine]
    source.lap("data")
    counts = torch.stack([strategy.head.supervised(*part).flatten(1).sum(1) for part in parts]).sum(0)
    *everyone, wishes = total(torch.stack([*counts, counts.new_tensor(stop.requested)])).tolist()
    stop.agreed = wishes > 0
    source.lap("other")
    joint = counts.new_tensor(everyone)
    norm, losses = 0.0, []
    for i, (batch, features) in enumerate(parts):
        with torch.autocast(verifier.device.type, torch.bfloat16, enabled=verifier.dtype.itemsize == 2):
            losses.append(strategy.loss(replace(batch, counts=joint), features, verifier))
        source.lap("forward")
        if any(everyone):
            strategy.backward(losses[-1].total(joint), last=i == len(parts) - 1)
            source.lap("backward")
    if any(everyone):
        norm = strategy.step(settings.clip, number)
        source.lap("optimizer")
    window.add(losses, norm, sum(int(batch.lengths.sum()) for (batch, _), part in zip(parts, mine, strict=True) if part))


def shares(indices: Sequence[int], accumulation: int) -> list[Sequence[int]]:
    """This process's micro-batches of an optimizer step, some empty where there are fewer samples than micro-batches.

    Samples lie in order of length: dealt out one by one, all shares are about equal.
    """
    return [indices[rank() + world() * i :: world() * accumulation] for i in range(accumulation)]


def load(source: FeatureSource, indices: Sequence[int]) -> tuple[Batch, Features]:
    """A micro-batch; a silent one, which keeps step with the other processes, where there are no samples."""
    if indices:
        return source.load(indices)
    batch, features = source.load([0])
    assert features.choice is not None
    silent = replace(batch, mask=torch.zeros_like(batch.mask))
    return silent, replace(features, choice=torch.full_like(features.choice, -1))


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def judge(
    strategy: Strategy, verifier: Verifier, evaluate: Evaluate, progress: Progress, metrics: Metrics, run_folder: Path,
    stop: Stop, judging: Verifier | None,
) -> None:  # fmt: skip
    """Decode held-out prompts for real and keep the head if it is the best so far. A wish to stop leaves it for later."""
    head = strategy.whole()
    with leading(verifier, stop, judging) as leads:
        if leads:
            held_out = evaluate(head)
            metrics.log(progress.step, held_out=held_out)
            tau = held_out["tau"] or 0.0  # None: every answer ended before its first round
            by_prompt = held_out.get("by_prompt", [])
            if better(tau, by_prompt, progress.best_tau, progress.best_by_prompt) or not (run_folder / "head").exists():
                progress.best_tau, progress.best_by_prompt = tau, by_prompt
                save_head(head, run_folder / "head")
            progress.judged = progress.step
    strategy.head.train()
    progress.judged = share(progress.judged)
    stop.agreed = progress.judged < progress.step
