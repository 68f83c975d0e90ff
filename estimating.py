"""`headstart data estimate`: the disk, memory and time that a recipe's data takes, before anything is written."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .build import build_verifier
from .build_data import build_conversations, render_samples
from .build_features import build_layout, store_key
from .build_heads import needed_layers
from .data.answer_store import AnswerStore
from .data.answers import has_answer
from .data.chat import Sample, counts, prompt_ids, sample_of, truncate
from .data.conversations import Conversation
from .data.features import compute
from .data.manifest import check_folder
from .data.packing import collate
from .data.skips import BadRow
from .data.spool import Spool
from .data.store import check_room, free_bytes, shard_files
from .data.survey import SHARD, survey
from .errors import UserError
from .heads.builtin import cache_folder
from .heads.generate import generate
from .heads.packed import PackedLinear
from .heads.verifier import Verifier
from .training.recipe import Recipe
from .training.sections.features import StoredSection

PROBE_TOKENS = 2048  # most tokens of a probe of the verifier
PROBE_SECONDS = 1.0  # a probe this long says enough
PROBE_ANSWER = 8  # tokens an answer


@dataclass
class Planned:
    """Samples as they will be, and the tokens of answers among them that the verifier has yet to write (at most)."""

    samples: Sequence[Sample]
    unwritten: int
    prompts: list[list[int]]  # of some of those answers


def estimate(recipe: Recipe) -> dict[str, Any]:
    """Counts, bytes and seconds. Raises UserError when the disk has no room, or the folder holds something else."""
    conversations = build_conversations(recipe)
    verifier = build_verifier(recipe)
    if recipe.data.answers.mode == "keep":
        planned = Planned(render_samples(recipe, verifier.tokenizer, conversations.train, conversations.skips), 0, [])
    else:
        planned = plan_answers(recipe, verifier, conversations.train)
    counted, section = counts(planned.samples), recipe.data.features
    layers, width = needed_layers(recipe, verifier), verifier.facts.hidden_size
    token = (len(layers) + 1) * width * verifier.dtype.itemsize + 8
    held, disk, there, folder = recipe.training.batch_tokens * token, 0, 0, None
    if isinstance(section, StoredSection):
        folder = Path(section.stored).expanduser()
        surveyed = survey(planned.samples, build_layout(recipe, section, verifier))
        disk = surveyed.total_bytes() if section.keep_bytes is None else min(surveyed.total_bytes(), section.keep_bytes)
        if recipe.data.answers.mode == "keep":  # else only the answers tell what the samples will be
            check_folder(folder, store_key(recipe, section, verifier, surveyed))
        check_room(folder, disk)
        there = sum(stat.st_size for _, stat in shard_files(folder))
        held += 2 * min(SHARD, disk)  # as computed, and as written
    elif section == "memory":
        held = counted["tokens"] * token
    speed = reading_speed(verifier, planned.samples, layers)
    seconds = counted["tokens"] / speed * (1 - min(1.0, there / disk) if disk else 1.0)
    if planned.unwritten and not recipe.data.answers.server:  # nobody knows how fast a server is
        seconds += planned.unwritten / answering_speed(verifier, planned.prompts)
    return {
        **counted,
        "at_most": planned.unwritten > 0,
        "disk_bytes": disk,
        "disk_there_bytes": there,
        "disk_free_bytes": free_bytes(folder or cache_folder()),
        "memory_bytes": weight_bytes(verifier) + held,
        "verifier_tokens_per_second": round(speed, 1),
        "seconds": round(seconds, 1),
    }


def weight_bytes(verifier: Verifier) -> int:
    """Of the verifier's weights, and of the second layout that CPUs multiply by."""
    packed = (module.weight for module in verifier.model.modules() if isinstance(module, PackedLinear))
    return sum(weight.nbytes for weight in (*verifier.model.parameters(), *packed))


def plan_answers(recipe: Recipe, verifier: Verifier, conversations: Sequence[Conversation]) -> Planned:
    """Each conversation up to its last question, and the stored answer or room for the longest one. What cannot be rendered
    is left out: `data prepare` tells of it."""
    data, tokenizer = recipe.data, verifier.tokenizer
    answers = data.answers
    store = AnswerStore(cache_folder() / "answers", verifier.fingerprint, data.answer_tokens, answers.temperature, answers.seed)
    planned = Planned([], 0, [])

    def answered(conversation: Conversation) -> Sample:
        if answers.mode == "complete" and has_answer(conversation):
            return sample_of(tokenizer, conversation)
        messages = conversation.asked
        ids = prompt_ids(tokenizer, messages, conversation.tools)
        answer = store.get(ids)
        if answer is None:
            turns = 1 if answers.mode == "complete" else max(1, sum(message["role"] == "user" for message in messages))
            planned.unwritten += turns * data.answer_tokens
            planned.prompts += [ids] if len(planned.prompts) < data.answer_batch else []
        length = data.answer_tokens if answer is None else len(answer)
        return Sample(ids + [0] * length, [False] * len(ids) + [True] * length)

    def rows() -> Iterator[Sample]:
        for conversation in conversations:
            try:
                sample = truncate(answered(conversation), data.max_length)
            except (BadRow, UserError):
                continue
            if sample.has_supervised:
                yield sample

    planned.samples = Spool(rows(), cache_folder() / "spool")
    return planned


def reading_speed(verifier: Verifier, samples: Sequence[Sample], layers: Sequence[int]) -> float:
    """Tokens a second of passes as features take them: ever larger ones, until one is long enough to judge by."""
    tokens, seconds = 0, 0.0
    for wanted in (64, PROBE_TOKENS // 8, PROBE_TOKENS // 4, PROBE_TOKENS):  # the first only warms up
        rows: list[Sample] = []
        while sum(len(row.ids) for row in rows) < wanted:
            rows.append(truncate(samples[len(rows) * 7919 % len(samples)], wanted))
        start = time.perf_counter()
        compute(verifier, collate(rows, verifier.device), layers).last.sum().item()  # waits for a device
        tokens, seconds = sum(len(row.ids) for row in rows), time.perf_counter() - start
        if wanted > 64 and seconds >= PROBE_SECONDS:
            break
    return tokens / seconds


def answering_speed(verifier: Verifier, prompts: Sequence[Sequence[int]]) -> float:
    """New tokens a second of a whole batch of prompts."""
    generate(verifier, prompts[:1], 2)  # warms up
    start = time.perf_counter()
    answers = generate(verifier, prompts, PROBE_ANSWER)
    return sum(map(len, answers)) / (time.perf_counter() - start)
