"""From a recipe's verifier and data sections to conversations, samples and features."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .build_features import build_features
from .build_heads import needed_layers
from .data.answers import Answered, AnswerStore, regenerate
from .data.chat import Sample, samples, truncate
from .data.conversations import Conversation, read_conversations, spread
from .data.features import FeatureSource
from .data.skips import Skips
from .data.spool import Chosen, Spool
from .errors import UserError
from .heads.builtin import cache_folder
from .heads.verifier import Verifier
from .progress import progress_bar
from .training.recipe import Recipe


def build_verifier(recipe: Recipe) -> Verifier:
    return Verifier.load(recipe.verifier.model, recipe.verifier.dtype, recipe.verifier.device)


PROMPTS = Path(__file__).parent / "data" / "prompts"


@dataclass(frozen=True)
class Conversations:
    train: Sequence[Conversation]
    holdout: Sequence[Conversation]
    skips: Skips  # what was left out, of the files and later of the samples


def build_conversations(recipe: Recipe) -> Conversations:
    """All conversations of the recipe, parted into training and held-out ones."""
    paths = [path for name in recipe.data.train for path in data_paths(name)]
    skips = Skips()
    rows = spread(Spool(read_conversations(paths, skips), cache_folder() / "spool"), recipe.data.rows)
    if recipe.data.holdout == "split":
        held = [row.split == "holdout" for row in rows]
    else:
        chosen = set(
            random.Random(recipe.training.seed).sample(range(len(rows)), max(1, round(len(rows) * recipe.data.holdout)))
        )
        held = [i in chosen for i in range(len(rows))]
    parted = Conversations(
        Chosen(rows, (i for i, out in enumerate(held) if not out)),
        Chosen(rows, (i for i, out in enumerate(held) if out)),
        skips,
    )
    if not parted.train or not parted.holdout:
        raise UserError(f"data.holdout: {recipe.data.holdout} leaves {len(parted.train)} conversations to train on and "
                        f"{len(parted.holdout)} held out; both need at least one")  # fmt: skip
    return parted


def data_paths(name: str) -> list[Path]:
    return sorted(PROMPTS.glob("*.jsonl")) if name == "builtin:prompts" else [Path(name).expanduser()]


def render_samples(recipe: Recipe, tokenizer: Any, conversations: Conversations) -> Sequence[Sample]:
    """The files' own answers, on disk until training reads them: neither rows nor samples may fill the memory."""
    with progress_bar("rendering", len(conversations.train), unit="conversations") as bar:

        def told() -> Iterator[Conversation]:
            for conversation in conversations.train:
                yield conversation
                bar(1)

        rows = samples(tokenizer, told(), recipe.data.max_length, conversations.skips)
        return Spool(rows, cache_folder() / "spool")


def build_samples(recipe: Recipe, verifier: Verifier, conversations: Conversations) -> tuple[Sequence[Sample], FeatureSource]:
    """Training samples with exact masks (the files' own answers or the verifier's), and where their features come from."""
    data, layers = recipe.data, needed_layers(recipe, verifier)
    if data.answers == "keep":
        rendered = render_samples(recipe, verifier.tokenizer, conversations)
        return rendered, build_features(recipe, verifier, rendered, layers, None)
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
