"""From a recipe to objects: the only file that reads both. Everything it builds takes plain arguments."""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .data.answers import Answered, AnswerStore, regenerate
from .data.chat import Sample, prompt_ids, samples, truncate
from .data.conversations import Conversation, read_conversations, spread
from .data.features import FeatureSource, MemoryFeatures, OnlineFeatures
from .data.skips import Skips
from .data.vocabulary import choose_vocabulary
from .errors import UserError
from .evaluation.evaluate import Evaluator, Prompt
from .evaluation.tree import AnyTree, DynamicTree, StaticTree, chain
from .heads.base import DraftHead, LayerConfig
from .heads.builtin import cache_folder
from .heads.eagle1 import Eagle1Config, Eagle1Head
from .heads.eagle3 import Eagle3Config, Eagle3Head
from .heads.facts import Facts
from .heads.medusa import MedusaConfig, MedusaHead
from .heads.mtp import MtpConfig, MtpHead, new_mtp
from .heads.verifier import Features, Verifier
from .progress import progress_bar
from .training.recipe import (
    ChainSection,
    DynamicSection,
    Eagle1Section,
    Eagle3Section,
    MedusaSection,
    MtpSection,
    Recipe,
    StaticSection,
)
from .training.trainer import Settings

PROMPTS = Path(__file__).parent / "data" / "prompts"


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Conversations:
    train: list[Conversation]
    holdout: list[Conversation]
    skips: Skips  # what was left out, of the files and later of the samples


def build_verifier(recipe: Recipe) -> Verifier:
    return Verifier.load(recipe.verifier.model, recipe.verifier.dtype, recipe.verifier.device)


def build_judge(recipe: Recipe, verifier: Verifier | None = None) -> Verifier:
    """The verifier in the precision it judges in: the one given where that is the same."""
    dtype = recipe.evaluation.dtype or recipe.verifier.dtype
    if verifier is not None and (recipe.evaluation.dtype is None or f"torch.{dtype}" == str(verifier.dtype)):
        return verifier
    return Verifier.load(recipe.verifier.model, dtype, recipe.verifier.device)


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


def needed_layers(recipe: Recipe, verifier: Verifier) -> tuple[int, ...]:
    return eagle3_layers(recipe.head, verifier.facts) if isinstance(recipe.head, Eagle3Section) else ()


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


def build_head(recipe: Recipe, verifier: Verifier, training: Sequence[Sample], source: FeatureSource) -> DraftHead:
    torch.manual_seed(recipe.training.seed)
    if isinstance(recipe.head, MedusaSection):
        return build_medusa(recipe.head, verifier, training)
    if isinstance(recipe.head, Eagle1Section):
        return build_eagle1(recipe.head, verifier, training)
    if isinstance(recipe.head, MtpSection):
        return build_mtp(recipe.head, verifier, training)
    return build_eagle3(recipe.head, verifier, training, source)


def build_medusa(section: MedusaSection, verifier: Verifier, training: Sequence[Sample]) -> MedusaHead:
    ids = build_vocabulary(section.vocabulary, verifier, training)
    config = MedusaConfig(
        hidden_size=verifier.facts.hidden_size,
        vocab_size=verifier.facts.vocab_size,
        heads=section.heads,
        blocks=section.blocks,
        lm_head=section.lm_head,
        targets=section.targets,
        loss=section.loss,
        decay=section.decay,
        draft_vocab_size=len(ids),
    )
    head = MedusaHead(config, ids).to(verifier.device)
    head.initialise(verifier)
    return head


def layer_sizes(facts: Facts, vocabulary: int) -> dict[str, Any]:
    """The fields of a LayerConfig: decoder layers of the verifier's sizes."""
    return {name: getattr(facts, name) for name in LayerConfig.model_fields if hasattr(facts, name)} | {
        "draft_vocab_size": vocabulary
    }


def build_eagle1(section: Eagle1Section, verifier: Verifier, training: Sequence[Sample]) -> Eagle1Head:
    ids = build_vocabulary(section.vocabulary, verifier, training)
    own = section.model_dump(exclude={"vocabulary"})
    return Eagle1Head(Eagle1Config(**own, **layer_sizes(verifier.facts, len(ids))), ids).to(verifier.device)


def build_mtp(section: MtpSection, verifier: Verifier, training: Sequence[Sample]) -> MtpHead:
    ids = build_vocabulary(section.vocabulary, verifier, training)
    own = section.model_dump(exclude={"vocabulary", "decay"})
    decay = section.decay or (0.6 if section.form == "recursive" else 1.0)
    head = new_mtp(MtpConfig(**own, decay=decay, **layer_sizes(verifier.facts, len(ids))), ids).to(verifier.device)
    head.initialise(verifier)
    return head


def build_eagle3(section: Eagle3Section, verifier: Verifier, training: Sequence[Sample], source: FeatureSource) -> Eagle3Head:
    facts = verifier.facts
    ids = build_vocabulary(section.draft_vocabulary, verifier, training)
    config = Eagle3Config(
        layers=eagle3_layers(section, facts),
        depth=section.depth,
        decay=section.decay,
        loss=section.loss,
        fc_norm=section.fc_norm,
        norm_output=section.norm_output,
        **layer_sizes(facts, len(ids)),
    )
    head = Eagle3Head(config, ids).to(verifier.device)
    batch, features = source.load(range(min(16, len(training))))
    head.even_inputs(features.layers[batch.mask])
    head.initialise(verifier)
    return head


def eagle3_layers(section: Eagle3Section, facts: Facts) -> tuple[int, ...]:
    """The states to read: sorted, distinct, 1 <= i < layers, as engines assume."""
    n = facts.num_hidden_layers
    if section.layers is None:
        layers = (2, n // 2, n - 3)
        if not 2 < n // 2 < n - 3:
            raise UserError(f"head.layers: a verifier of {n} layers has no default (2, n//2, n-3); give three indices")
        return layers
    if list(section.layers) != sorted(set(section.layers)) or not all(1 <= i < n for i in section.layers):
        raise UserError(f"head.layers: {list(section.layers)} must ascend, without repeats, between 1 and {n - 1}")
    return section.layers


def build_vocabulary(size: int | None, verifier: Verifier, training: Sequence[Sample]) -> torch.Tensor:
    vocab_size = verifier.facts.vocab_size
    if size is None:
        return torch.arange(vocab_size)
    pinned = {*verifier.facts.stop_ids, *verifier.tokenizer.all_special_ids}
    chosen = choose_vocabulary(((s.ids, s.mask) for s in training), size, vocab_size, pinned)
    say(f"draft vocabulary: {size} of {vocab_size} tokens, {chosen.coverage:.2%} of the supervised ones")
    return torch.tensor(chosen.ids)


def build_settings(recipe: Recipe) -> Settings:
    fields = Settings.__dataclass_fields__
    return Settings(**{name: getattr(recipe.training, name) for name in fields})


def build_tree(section: ChainSection | StaticSection | DynamicSection) -> AnyTree:
    if isinstance(section, ChainSection):
        return chain(section.depth)
    if isinstance(section, StaticSection):
        return StaticTree(section.paths)
    return DynamicTree(section.depth, section.top_k, section.nodes)


def build_prompts(verifier: Verifier, conversations: Sequence[Conversation], limit: int | None) -> list[Prompt]:
    """Held-out prompts: each conversation up to its last question."""
    prompts = []
    for conversation in spread(conversations, limit):
        messages = list(conversation.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if messages:
            ids = prompt_ids(verifier.tokenizer, messages, conversation.tools)
            prompts.append(Prompt(ids, conversation.id, conversation.category, str(messages[-1]["content"])))
    if not prompts:
        raise UserError("evaluation: no held-out conversation asks a question")
    return prompts


def build_evaluator(recipe: Recipe, verifier: Verifier, conversations: Sequence[Conversation]) -> Evaluator:
    section = recipe.evaluation
    prompts = build_prompts(verifier, conversations, section.prompts)
    limit = verifier.facts.max_position_embeddings
    for prompt in prompts:
        if len(prompt.ids) + section.max_new_tokens > limit:
            raise UserError(f"evaluation: prompt {prompt.id} has {len(prompt.ids)} tokens; with max_new_tokens="
                            f"{section.max_new_tokens} it passes the verifier's limit of {limit}")  # fmt: skip
    return Evaluator(verifier, prompts, section.max_new_tokens, section.batch, section.timing_prompts, section.timing_repeats)
