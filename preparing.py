"""`headstart data prepare`: everything that training will read, made beforehand."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .build import build_verifier
from .build_data import build_conversations, build_samples, render_samples
from .build_features import fill_features
from .data.chat import Sample, counts
from .data.store import shard_files
from .heads.loading import load_tokenizer
from .training.recipe import Recipe
from .training.sections.features import StoredSection


def prepare(recipe: Recipe) -> dict[str, Any]:
    """Render, mask, answer and store what the recipe trains on, and count it. A second run makes only what is missing."""
    conversations = build_conversations(recipe)
    section = recipe.data.features
    training: Iterable[Sample]
    if recipe.data.answers.mode == "keep" and not isinstance(section, StoredSection):
        training = render_samples(recipe, load_tokenizer(recipe.verifier.model), conversations.train, conversations.skips)
    else:
        wanted = section if isinstance(section, StoredSection) else "online"  # what lies in memory ends with this process
        data = recipe.data.model_copy(update={"features": wanted})
        training, features = build_samples(recipe.model_copy(update={"data": data}), build_verifier(recipe), conversations)
        fill_features(features)
    skips = conversations.skips
    result: dict[str, Any] = {"rows": skips.read, "held_out": len(conversations.holdout), **counts(training)}
    result["skipped"] = dict(skips.counts.most_common())
    if isinstance(section, StoredSection):
        folder = Path(section.stored).expanduser()
        skips.write(folder / "skipped.jsonl")
        sizes = [stat.st_size for _, stat in shard_files(folder)]
        result["stored"] = {"folder": str(folder), "shards": len(sizes), "bytes": sum(sizes)}
    return result
