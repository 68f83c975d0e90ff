"""From a recipe's verifier and data sections to conversations, samples and features."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from .build_features import build_features
from .build_heads import needed_layers
from .data.agreement import Agreement, a_few, agreement
from .data.answer_store import AnswerStore
from .data.answers import Answered, complete, has_answer, regenerate
from .data.chat import Sample, samples, truncate
from .data.conversations import Conversation, read_conversations, spread
from .data.features import FeatureSource
from .data.mixing import mix
from .data.skips import Skips
from .data.sources import Source, dataset_source, file_source
from .data.spool import Chosen, Spool
from .errors import UserError
from .heads.builtin import cache_folder
from .heads.verifier import Verifier
from .progress import progress_bar, say
from .training.recipe import Recipe
from .training.sections.sources import SourceSection

CHAT_FILES = (".jsonl", ".json", ".parquet", ".csv")
PROMPTS = Path(__file__).parent / "data" / "prompts"


@dataclass(frozen=True)
class Conversations:
    train: Sequence[Conversation]
    holdout: Sequence[Conversation]
    skips: Skips  # what was left out, of the files and later of the samples


def build_conversations(recipe: Recipe) -> Conversations:
    """All conversations of the recipe, mixed by weight, parted into training and held-out ones."""
    data, skips = recipe.data, Skips()
    parts = [read_conversations(build_sources(section), skips, data.bad_rows) for section in data.train]
    if any(section.weight or section.streaming for section in data.train):
        weights = [section.weight or 1.0 for section in data.train]
        rows: Sequence[Conversation] = mix(
            parts, weights, data.rows, [section.streaming for section in data.train], recipe.training.seed
        )
    else:
        rows = spread(Spool(chain.from_iterable(parts), cache_folder() / "spool"), data.rows)
    if data.holdout == "split":
        held = [row.split == "holdout" for row in rows]
    else:
        chosen = set(random.Random(recipe.training.seed).sample(range(len(rows)), max(1, round(len(rows) * data.holdout))))
        held = [i in chosen for i in range(len(rows))]
    parted = Conversations(
        Chosen(rows, (i for i, out in enumerate(held) if not out)),
        Chosen(rows, (i for i, out in enumerate(held) if out)),
        skips,
    )
    if not parted.train or not parted.holdout:
        raise UserError(f"data.holdout: {data.holdout} leaves {len(parted.train)} conversations to train on and "
                        f"{len(parted.holdout)} held out; both need at least one")  # fmt: skip
    return parted


def build_sources(section: SourceSection) -> list[Source]:
    columns = section.columns.model_dump(exclude_none=True) if section.columns else {}
    if section.dataset is not None:
        split = section.split or "train"
        return [dataset_source(section.dataset, section.subset, split, section.revision, columns, section.streaming)]
    name = section.file or ""
    paths = sorted(PROMPTS.glob("*.jsonl")) if name == "builtin:prompts" else [Path(name).expanduser()]
    return [file_source(path, columns) for path in paths]


def held_out(recipe: Recipe, conversations: Conversations | None = None) -> Sequence[Conversation]:
    """What the recipe is judged on: the files it names for that, else what it holds out of its training files.

    conversations: those of the recipe, where they are read already.
    """
    if not recipe.evaluation.prompt_files:
        return (conversations or build_conversations(recipe)).holdout
    paths = [path for name in recipe.evaluation.prompt_files for path in prompt_paths(Path(name).expanduser())]
    skips = Skips()
    found = list(read_conversations(paths, skips))
    for line in skips.summary(skips.read):
        say(f"left out: {line}")
    return found


def prompt_paths(path: Path) -> list[Path]:
    """The file, or the chat files in a folder (no text files: those beside a benchmark are its licence)."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix.lower() in CHAT_FILES)
    if not found:
        raise UserError(f"{path}: no chat files in this folder; in a folder {', '.join(CHAT_FILES)} are read")
    return found


def render_samples(recipe: Recipe, tokenizer: Any, rows: Sequence[Conversation], skips: Skips) -> Sequence[Sample]:
    """Samples of answered conversations, on disk until training reads them: neither rows nor samples may fill the memory."""
    with progress_bar("rendering", len(rows), unit="conversations") as bar:

        def told() -> Iterator[Conversation]:
            for row in rows:
                yield row
                bar(1)

        rendered = samples(tokenizer, told(), recipe.data.max_length, skips, recipe.data.bad_rows)
        return Spool(rendered, cache_folder() / "spool")


def build_samples(recipe: Recipe, verifier: Verifier, conversations: Conversations) -> tuple[Sequence[Sample], FeatureSource]:
    """Training samples with exact masks (the files' own answers or the verifier's), and where their features come from."""
    data, layers, skips = recipe.data, needed_layers(recipe, verifier), conversations.skips
    if data.answers.mode == "keep" or data.answers.server:
        train = serve_answers(recipe, conversations) if data.answers.server else conversations.train
        rendered = render_samples(recipe, verifier.tokenizer, train, skips)
        return rendered, build_features(recipe, verifier, rendered, layers, None)
    answered = write_answers(recipe, verifier, conversations, layers)
    fitting = [Answered(truncate(a.sample, data.max_length), a.features) for a in answered]
    kept = [a for a in fitting if a.sample.has_supervised]
    reason = f"no supervised token after max_length={data.max_length}"
    for answer in fitting:
        if not answer.sample.has_supervised:
            skips.drop(reason, answer.sample.source)
    if not kept:
        raise UserError(f"{len(fitting)} of {len(fitting)} rows have {reason}; raise data.max_length")
    rows = [a.sample for a in kept]
    return rows, build_features(recipe, verifier, rows, layers, [a.features if not a.sample.cut else None for a in kept])


def write_answers(
    recipe: Recipe, verifier: Verifier, conversations: Conversations, layers: Sequence[int]
) -> Sequence[Answered]:
    """The verifier itself answers every turn, or only what ends without an answer."""
    data, rows = recipe.data, conversations.train
    store = AnswerStore(
        cache_folder() / "answers", verifier.fingerprint, data.answer_tokens, data.answers.temperature, data.answers.seed
    )
    keep = layers if data.features == "memory" else None
    most = turns(rows, data.answers.mode) * data.answer_tokens
    with progress_bar("verifier answers the prompts: at most", most, unit="tokens") as bar:
        write = complete if data.answers.mode == "complete" else regenerate
        answered = write(
            verifier, rows, store, data.answer_tokens, data.answer_batch, keep, bar,
            lambda bad, source: conversations.skips.refuse(bad, source, data.bad_rows),
        )  # fmt: skip
    if not answered:
        raise UserError(nothing_answered(conversations))
    return answered


def serve_answers(recipe: Recipe, conversations: Conversations) -> list[Conversation]:
    """A server writes the answers."""
    from .data.chat_server import ChatServer  # its client library is of no use to other runs
    from .data.served_answers import serve, served_store

    data, rows = recipe.data, conversations.train
    answers = data.answers
    with ChatServer(
        answers.server or "", answers.model, data.answer_tokens, answers.temperature, answers.seed, answers.concurrency,
        answers.timeout, answers.retries,
    ) as server:  # fmt: skip
        store = served_store(cache_folder() / "answers", server)
        with progress_bar(f"{server.url} answers the prompts: at most", turns(rows, answers.mode), unit="answers") as bar:
            answered = serve(server, rows, store, answers.concurrency, answers.mode == "complete", conversations.skips, bar)
    if not answered:
        raise UserError(nothing_answered(conversations))
    return answered


def check_author(recipe: Recipe, training: Sequence[Sample], source: FeatureSource) -> Agreement | None:
    """How far the verifier would write what is learned, from a few samples; None where it wrote every word greedily."""
    answers = recipe.data.answers
    if answers.mode == "regenerate" and not answers.server and not answers.temperature:
        return None
    return agreement(source, a_few(training))


def turns(rows: Sequence[Conversation], mode: str) -> int:
    """Most answers that will be written."""
    if mode == "complete":
        return sum(not has_answer(row) for row in rows)
    return sum(max(1, sum(message["role"] == "user" for message in row.messages)) for row in rows)


def nothing_answered(conversations: Conversations) -> str:
    told = "; ".join(conversations.skips.summary(len(conversations.train)))
    return f"not one of the {len(conversations.train)} conversations has an answer" + (f": {told}" if told else "")
