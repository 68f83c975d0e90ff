"""From a recipe's `data.features` to where training features come from."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .build_heads import needed_layers
from .data.chat import Sample
from .data.features import FeatureSource, MemoryFeatures, OnlineFeatures
from .data.manifest import MASK_RULE, check_folder, claim_folder
from .data.store import FeatureStore, check_room
from .data.stored import StoredFeatures
from .data.survey import SHARD, Layout, Survey, survey
from .heads.verifier import Features, Verifier
from .progress import progress_bar
from .training.recipe import Recipe
from .training.sections.features import StoredSection


def build_features(
    recipe: Recipe,
    verifier: Verifier,
    training: Sequence[Sample],
    layers: Sequence[int],
    known: Sequence[Features | None] | None,
) -> FeatureSource:
    """known: features that are there already, an entry a sample; only memory takes them. A store is not filled yet."""
    section = recipe.data.features
    row_tokens = max(len(sample.ids) for sample in training) if recipe.data.packing else None
    if section == "online":
        return OnlineFeatures(verifier, training, layers, row_tokens)
    if isinstance(section, StoredSection):
        return StoredFeatures(verifier, training, open_store(recipe, section, verifier, training), row_tokens=row_tokens)
    missing = [sample for i, sample in enumerate(training) if known is None or known[i] is None]
    tokens = sum(len(sample.ids) for sample in missing)
    with progress_bar("verifier reads the samples", tokens, unit="tokens") as bar:
        return MemoryFeatures(verifier, training, layers, 2048, known, bar, row_tokens)


def fill_features(source: FeatureSource) -> None:
    """Have the verifier read what a store lacks. Processes that do so at once share the work."""
    if isinstance(source, StoredFeatures):
        with progress_bar("verifier reads the samples", source.tokens_to_fill(), unit="tokens") as bar:
            source.fill(bar)


def build_layout(recipe: Recipe, section: StoredSection, verifier: Verifier) -> Layout:
    """EAGLE-3 reads its layers everywhere and the last state where a supervised token follows; the others the last state."""
    layers = needed_layers(recipe, verifier)
    return Layout(layers, verifier.facts.hidden_size, section.dtype, everywhere=not layers)


def open_store(recipe: Recipe, section: StoredSection, verifier: Verifier, training: Sequence[Sample]) -> FeatureStore:
    """The store in the recipe's folder. Raises UserError when it was made for anything else, or has no room."""
    folder, surveyed = Path(section.stored).expanduser(), survey(training, build_layout(recipe, section, verifier))
    key = store_key(recipe, section, verifier, surveyed)
    check_folder(folder, key)
    check_room(folder, surveyed.total_bytes(), section.keep_bytes)
    about = {"model": verifier.name, "revision": getattr(verifier.config, "_commit_hash", None), "shard_bytes": SHARD}
    claim_folder(folder, key, about)
    return FeatureStore(folder, surveyed, section.keep_bytes)


def store_key(recipe: Recipe, section: StoredSection, verifier: Verifier, surveyed: Survey) -> dict[str, Any]:
    """All that stored features depend on, by the names under which a refusal tells of them."""
    return {
        "template": hashlib.blake2b(str(verifier.tokenizer.chat_template).encode(), digest_size=8).hexdigest(),
        "verifier": verifier.fingerprint,  # weights, configuration and chat template
        "dtype": section.dtype,
        "layers": list(surveyed.layout.layers),
        "last": "every token" if surveyed.layout.everywhere else "before supervised tokens",
        "prenorm": False,
        "mask": MASK_RULE,
        "max_length": recipe.data.max_length,
        "samples": surveyed.digest,
    }
