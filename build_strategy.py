"""From a recipe's training section to a strategy, and to a verifier that is whole or sharded as the strategy has it."""

import json
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from .errors import UserError
from .heads.loading import load_model, load_tokenizer, resolve_device, resolve_dtype
from .heads.verifier import Verifier
from .ranks import in_turn, is_first, one_by_one, share, started_by_torchrun, world
from .training.recipe import SHIPPED, Recipe
from .training.sections.training import TrainingSection
from .training.strategies.base import Strategy
from .training.strategies.plain import Plain
from .training.strategies.sharded import ShardedHead, shard_verifier
from .training.strategies.zero import Zero

OURS = ("fp16", "bf16", "optimizer", "scheduler", "gradient_clipping", "gradient_accumulation_steps",
        "train_batch_size", "train_micro_batch_size_per_gpu")  # fmt: skip


def build_strategy(section: TrainingSection) -> Strategy:
    if section.strategy == "deepspeed":
        return Zero(deepspeed_config(section), section.accumulation, section.clip)
    if section.strategy == "fsdp" and section.fsdp.head and world() > 1:
        return ShardedHead()
    return Plain()


def check_processes(recipe: Recipe) -> None:
    """Refuse a number of processes that the strategy cannot use."""
    section = recipe.training
    if world() > 1 and ":" in recipe.verifier.device:
        raise UserError(f"verifier.device: {recipe.verifier.device} is one device for {world()} processes; use cuda or auto")
    if section.strategy == "single" and world() > 1:
        raise UserError(f"training.strategy: single is one process, torchrun started {world()}; set ddp, fsdp or deepspeed")
    if section.strategy == "deepspeed" and not started_by_torchrun():
        raise UserError("training.strategy: deepspeed runs under torchrun, if only with --nproc-per-node 1")


def deepspeed_config(section: TrainingSection) -> dict[str, Any]:
    """DeepSpeed's settings, of a shipped name or a file."""
    name = section.deepspeed.config
    shipped = SHIPPED / "deepspeed" / f"{name}.json"
    path = shipped if shipped.is_file() else Path(name).expanduser()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        stage = config["zero_optimization"]["stage"]
    except OSError as error:
        raise UserError(f"training.deepspeed.config: {name}: {error.strerror}; zero1, zero2 and zero3 are shipped") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"training.deepspeed.config: {path} is no JSON object with zero_optimization.stage") from None
    if stage not in (1, 2, 3):
        raise UserError(f"training.deepspeed.config: {path}: zero_optimization.stage is {stage!r}, not 1, 2 or 3")
    for key in OURS:
        if key in config:
            raise UserError(f"training.deepspeed.config: {path} sets {key}, which the recipe decides; remove it")
    return dict(config)


def shards_verifier(section: TrainingSection) -> bool:
    """Whether the strategy divides the frozen verifier among the processes."""
    if world() == 1:
        return False
    if section.strategy == "deepspeed":
        return bool(deepspeed_config(section)["zero_optimization"]["stage"] == 3)
    return section.strategy == "fsdp"


def build_training_verifier(recipe: Recipe) -> Verifier:
    """The verifier that training runs, a share of it where the strategy shards it (collective)."""
    spec = recipe.verifier
    if not shards_verifier(recipe.training):
        with in_turn():
            return Verifier.load(spec.model, spec.dtype, spec.device)
    if recipe.data.features == "memory":
        raise UserError("data.features: memory has every process run the whole verifier; with one that is sharded use online")
    if recipe.evaluation.dtype not in (None, spec.dtype):
        raise UserError("evaluation.dtype: a sharded verifier judges in verifier.dtype; leave it null")
    device = resolve_device(spec.device)
    dtype = resolve_dtype(spec.dtype, device)
    mesh = init_device_mesh(device.type, (world(),))
    with one_by_one():  # whole in main memory, for a moment
        verifier = Verifier(load_model(spec.model, dtype, "cpu"), load_tokenizer(spec.model), spec.model)
        fingerprint = verifier.fingerprint if is_first() else ""
        shard_verifier(verifier, mesh)
    verifier.fingerprint = share(fingerprint)
    return verifier
