"""`headstart train --dry-run`: what a recipe will need, before anything is loaded or written."""

import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from .build import build_plan, build_settings, build_verifier
from .build_data import Conversations, build_conversations, build_samples
from .build_heads import CONFIGS, build_head, eagle3_layers, head_fields, ready, vocabulary_size
from .build_strategy import deepspeed_config
from .data.chat import prompt_ids, samples
from .data.conversations import spread
from .data.skips import Skips
from .errors import UserError
from .heads.adapters import new_adapter
from .heads.base import DraftHead
from .heads.base import build_head as new_head
from .heads.facts import Facts, read_facts
from .heads.loading import load_skeleton, load_tokenizer, resolve_device
from .heads.sizes import VerifierSizes, count, verifier_sizes
from .training.estimate import HeadSizes, Strategy, Work, host_features, memory
from .training.recipe import Recipe
from .training.sections.adapter import AdapterSection
from .training.sections.features import StoredSection
from .training.sections.head import Eagle3Section, MedusaSection
from .training.sections.training import TrainingSection
from .training.trainer import fit

ZERO: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
PROBE_STEPS = 10
PROBE_ROWS = 64  # conversations it reads
LOOKED_AT = 256  # conversations whose tokens are counted


def dry_run(recipe: Recipe, ranks: int, device_memory: float | None, probe: bool) -> dict[str, Any]:
    """Parameters, memory by part of each of `ranks` processes, steps, tokens and time. device_memory: GB; None: this machine's.

    The verifier's config.json is enough for all but the time.
    """
    model = load_skeleton(recipe.verifier.model, recipe.verifier.dtype, recipe.verifier.device)
    facts, sizes = read_facts(model, model.get_output_embeddings()), verifier_sizes(model)
    head = skeleton_head(recipe, facts)
    trained, work = head_sizes(recipe, facts, head), step_work(recipe, facts, model.dtype.itemsize, ranks)
    if isinstance(recipe.head, MedusaSection) and recipe.head.adapter is not None:
        trained, work = with_adapter(recipe, recipe.head.adapter, model, trained, work)
    strategy = strategy_of(recipe.training)
    parts = memory(strategy, ranks, sizes, trained, work)
    available = device_memory or memory_of(resolve_device(recipe.verifier.device)) / 1e9
    warnings: list[str] = []
    conversations = read_data(recipe, warnings)
    in_memory, each = recipe.data.features == "memory", None
    if conversations is not None and (in_memory or recipe.training.steps is None):
        each = round(len(conversations.train) * tokens_each(recipe, conversations))
    steps, tokens = length(recipe.training, each)
    needed = sum(parts.values()) / 1e9
    fits = needed <= available
    if not fits:
        warnings.append(
            f"a process needs about {needed:.1f} GB on a device of {available:.1f} GB; {advice(strategy, ranks, sizes, work)}"
        )
    host = host_features(each, work) / 1e9 if in_memory and each is not None else 0.0
    if host > (limit := memory_of(torch.device("cpu")) / 1e9):
        fits = False
        warnings.append(f"data.features: memory keeps {host:.1f} GB of states, this machine has {limit:.1f} GB; use online")
    rate: float | None = None
    why_not: str | None = "not asked for"
    if probe:
        alone = sum(memory("single", 1, sizes, trained, work).values()) / 1e9
        here = memory_of(resolve_device(recipe.verifier.device)) / 1e9
        rate, why_not = probed(recipe, ranks, conversations) if alone <= here else (None, "one process does not fit here")
    return {
        "verifier": {
            "name": recipe.verifier.model,
            "parameters": sizes.total,
            "active": sizes.active,
            "dtype": str(model.dtype),
        },
        "head": {"kind": head.kind, "parameters": count(head)},
        "strategy": strategy,
        "ranks": ranks,
        "memory_gb": {name: round(size / 1e9, 3) for name, size in parts.items()},
        "memory_total_gb": round(needed, 3),
        "device_memory_gb": round(available, 3),
        "host_features_gb": round(host, 3),
        "steps": steps,
        "tokens": tokens,
        "tokens_per_second": rate and round(rate * ranks, 1),
        "hours": rate and tokens and round(tokens / (rate * ranks) / 3600, 3),
        "not_probed": why_not,
        "fits": fits,
        "warnings": warnings,
    }


def skeleton_head(recipe: Recipe, facts: Facts) -> DraftHead:
    vocabulary = vocabulary_size(recipe.head) or facts.vocab_size
    config = CONFIGS[recipe.head.kind](**head_fields(recipe.head, facts, vocabulary))
    with torch.device("meta"):
        return new_head(config.model_dump())


def strategy_of(section: TrainingSection) -> Strategy:
    """The row of the memory table that a recipe's strategy stands for."""
    if section.strategy == "fsdp":
        return "fsdp_head" if section.fsdp.head else "fsdp"
    if section.strategy != "deepspeed":
        return section.strategy
    stage: int = deepspeed_config(section)["zero_optimization"]["stage"]
    return ZERO[stage]


def step_work(recipe: Recipe, facts: Facts, itemsize: int, ranks: int) -> Work:
    captured = len(eagle3_layers(recipe.head, facts)) if isinstance(recipe.head, Eagle3Section) else 0
    batch, parts = recipe.training.batch_tokens, recipe.training.accumulation
    longest = min(recipe.data.max_length, batch)  # a sample is never divided
    return Work(
        tokens=max(-(-batch // (ranks * parts)), longest),
        share=max(-(-batch // ranks), longest),
        hidden=facts.hidden_size,
        intermediate=facts.intermediate_size,
        states=1 + captured,
        vocabulary=facts.vocab_size,
        bytes=itemsize,
        online=recipe.data.features == "online",
    )


def head_sizes(recipe: Recipe, facts: Facts, head: DraftHead) -> HeadSizes:
    """row: the numbers that autograd keeps of a supervised position in one pass."""
    muon = recipe.training.optimizer == "muon"
    matrices = sum(p.numel() for name, p in head.named_parameters() if p.dim() == 2 and "lm_head" not in name)
    hidden, soft = facts.hidden_size, False
    if isinstance(recipe.head, MedusaSection):
        passes, row, soft = recipe.head.heads, (4 * recipe.head.blocks + 1) * hidden, recipe.head.targets == "soft"
    else:
        passes, row = recipe.head.depth, kept_by_layer(facts)
    if recipe.training.gradient_checkpointing:
        row = 3 * hidden  # what a layer reads; all else is computed again
    return HeadSizes(count(head), matrices if muon else 0, len(head.target_ids), passes, row, soft)


def kept_by_layer(facts: Facts) -> int:
    """Numbers that autograd keeps of a row in a decoder layer."""
    return 12 * facts.hidden_size + 4 * facts.num_attention_heads * facts.head_dim + 4 * facts.intermediate_size


def with_adapter(
    recipe: Recipe, section: AdapterSection, model: PreTrainedModel, head: HeadSizes, work: Work
) -> tuple[HeadSizes, Work]:  # fmt: skip
    """Medusa-2: the adapter is trained too, and the verifier runs in every step, whatever features are stored."""
    adapter = new_adapter(model, recipe.verifier.model, section.rank, section.alpha, section.dropout, section.targets)
    learned = sum(weight.numel() for weight in adapter.weights.values())
    by_muon = learned if recipe.training.optimizer == "muon" and section.rate == 1 else 0
    facts = read_facts(model, model.get_output_embeddings())
    head = replace(head, parameters=head.parameters + learned, matrices=head.matrices + by_muon)
    kept = kept_by_layer(facts)
    if section.dropout:  # each projection's input once more, as the adapter sees it
        kept += 5 * facts.hidden_size + facts.num_attention_heads * facts.head_dim + facts.intermediate_size
    return head, replace(work, online=True, kept=facts.num_hidden_layers * kept)


def advice(strategy: Strategy, ranks: int, sizes: VerifierSizes, work: Work) -> str:
    if sizes.total * work.bytes > 20e9 and strategy in ("single", "ddp", "zero1", "zero2"):
        return "shard the verifier: training.strategy=fsdp on more processes"
    if strategy in ("fsdp", "fsdp_head", "zero3"):
        return f"start more than {ranks} processes, or lower training.batch_tokens"
    return "lower training.batch_tokens, data.max_length or the head's vocabulary, or raise training.accumulation"


def memory_of(device: torch.device) -> float:
    """Bytes of a device; of main memory for a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def read_data(recipe: Recipe, warnings: list[str]) -> Conversations | None:
    """The conversations, where the files are here already."""
    try:
        return build_conversations(recipe)
    except UserError as error:
        warnings.append(f"data: {error}")
        return None


def length(section: TrainingSection, each: int | None) -> tuple[int | None, int | None]:
    """Optimizer steps, and the tokens they read (at most: a step is hardly ever full). each: tokens of an epoch, if known."""
    if section.steps is not None:
        return section.steps, section.steps * section.batch_tokens
    if each is None or section.epochs is None:
        return None, None
    tokens = round(section.epochs * each)
    return max(1, -(-tokens // section.batch_tokens)), tokens


def tokens_each(recipe: Recipe, conversations: Conversations) -> float:
    """Mean tokens a conversation gives, as a sample of them says; data.max_length where there is no tokenizer to count with."""
    data = recipe.data
    try:
        tokenizer = load_tokenizer(recipe.verifier.model)
    except UserError:
        return float(data.max_length)
    some = spread(conversations.train, LOOKED_AT)
    if data.answers.mode == "keep":
        return sum(len(s.ids) for s in samples(tokenizer, some, data.max_length, Skips())) / len(some)
    prompts = [prompt_ids(tokenizer, [m for m in c.messages if m["role"] != "assistant"], c.tools) for c in some]
    return sum(min(len(ids) + data.answer_tokens, data.max_length) for ids in prompts) / len(some)


def probed(recipe: Recipe, ranks: int, conversations: Conversations | None) -> tuple[float | None, str | None]:
    """Tokens a second of one process over ten real steps, or why there are none. Nothing is left behind."""
    if conversations is None:
        return None, "the data is not here"
    section = recipe.training
    alone = section.model_copy(
        update={"strategy": "single", "steps": PROBE_STEPS, "epochs": None, "log_every": 1, "save_every": None,
                "evaluate_every": None, "batch_tokens": max(1, section.batch_tokens // ranks)}
    )  # fmt: skip
    data = recipe.data
    if isinstance(data.features, StoredSection):  # the store is for all samples; memory is about as fast to read
        data = data.model_copy(update={"features": "memory"})
    recipe = recipe.model_copy(update={"training": alone, "data": data})
    few = replace(conversations, train=spread(conversations.train, PROBE_ROWS))
    try:
        verifier = build_verifier(recipe)
        rows, features = build_samples(recipe, verifier, few)
    except UserError as error:
        return None, str(error)
    head = build_head(recipe, verifier, rows, features)
    head, features = ready(recipe, verifier, head, features)
    plan = build_plan(recipe, rows)
    with TemporaryDirectory() as folder:
        fit(head, verifier, features, plan, build_settings(recipe), Path(folder), lambda head: {"tau": 0.0})
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["tokens_per_second"] for line in lines if "tokens_per_second" in line), None
