"""From a recipe's verifier and data sections to conversations, samples and features."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .build_heads import needed_layers
from .data.answers import Answered, AnswerStore, regenerate
from .data.chat import Sample, samples, truncate
from .data.conversations import Conversation, read_conversations, spread
from .data.features import FeatureSource, MemoryFeatures, OnlineFeatures
from .data.skips import Skips
from .errors import UserError
from .heads.builtin import cache_folder
from .heads.verifier import Features, Verifier
from .progress import progress_bar, say
from .training.recipe import Recipe


def build_verifier(recipe: Recipe) -> Verifier:
    return Verifier.load(recipe.verifier.model, recipe.verifier.dtype, recipe.verifier.device)


CHAT_FILES = (".jsonl", ".json", ".parquet", ".csv")
PROMPTS = Path(__file__).parent / "data" / "prompts"


@dataclass(frozen=True)
class Conversations:
    train: list[Conversation]
    holdout: list[Conversation]
    skips: Skips  # what was left out, of the files and later of the samples


def build_conversations(recipe: Recipe) -> Conversations:
    """All conversations of the recipe, parted into training and held-out ones."""
    paths = [path for name in recipe.data.train for path in data_paths(name)]
    skips = Skips()
    rows = spread(list(read_conversations(paths, skips)), recipe.data.rows)
    if recipe.data.holdout == "split":
        held = [row.split == "holdout" for row in rows]
    else:
        chosen = set(
            random.Random(recipe.training.seed).sample(range(len(rows)), max(1, round(len(rows) * recipe.data.holdout)))
        )
        held = [i in chosen for i in range(len(rows))]
    parted = Conversations(
        [row for row, out in zip(rows, held, strict=True) if not out],
        [row for row, out in zip(rows, held, strict=True) if out],
        skips,
    )
    if not parted.train or not parted.holdout:
        raise UserError(f"data.holdout: {recipe.data.holdout} leaves {len(parted.train)} conversations to train on and "
                        f"{len(parted.holdout)} held out; both need at least one")  # fmt: skip
    return parted


def held_out(recipe: Recipe) -> list[Conversation]:
    """What the recipe is judged on: the files it names for that, else what it holds out of its training files."""
    if not recipe.evaluation.prompt_files:
        return build_conversations(recipe).holdout
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


def data_paths(name: str) -> list[Path]:
    return sorted(PROMPTS.glob("*.jsonl")) if name == "builtin:prompts" else [Path(name).expanduser()]


def build_samples(recipe: Recipe, verifier: Verifier, conversations: Conversations) -> tuple[list[Sample], FeatureSource]:
    """Training samples with exact masks (the files' own answers or the verifier's), and where their features come from."""
    data, layers = recipe.data, needed_layers(recipe, verifier)
    if data.answers == "keep":
        rows = list(samples(verifier.tokenizer, conversations.train, data.max_length, conversations.skips))
        return rows, build_features(recipe, verifier, rows, layers, None)
    store = AnswerStore(cache_folder() / "answers", verifier.fingerprint, data.answer_tokens)
    turns = sum(max(1, sum(m["role"] == "user" for m in c.messages)) for c in conversations.train)
    keep = layers if data.features == "memory" else None
    with progress_bar("verifier answers the prompts: at most", turns * data.answer_tokens, unit="tokens") as bar:
        answered = regenerate(verifier, conversations.train, store, data.answer_tokens, data.answer_batch, keep, bar)
    fitting = [Answered(truncate(a.sample, data.max_length), a.features) for a in answered]
    kept = [a for a in fitting if a.sample.has_supervised]
    reason = f"no supervised token after max_length={data.max_length}"
    for answer in fitting:
        if not answer.sample.has_supervised:
            conversations.skips.drop(reason, answer.sample.source)
    if not kept:
        raise UserError(f"{len(fitting)} of {len(fitting)} rows have {reason}; raise data.max_length")
    rows = [a.sample for a in kept]
    return rows, build_features(recipe, verifier, rows, layers, [a.features if not a.sample.cut else None for a in kept])


def build_features(
    recipe: Recipe,
    verifier: Verifier,
    training: Sequence[Sample],
    layers: Sequence[int],
    known: Sequence[Features | None] | None,
) -> FeatureSource:
    if recipe.data.features == "online":
        return OnlineFeatures(verifier, training, layers)
    missing = [sample for i, sample in enumerate(training) if known is None or known[i] is None]
    tokens = sum(len(sample.ids) for sample in missing)
    with progress_bar("verifier reads the samples", tokens, unit="tokens") as bar:
        return MemoryFeatures(verifier, training, layers, 2048, known, bar)
