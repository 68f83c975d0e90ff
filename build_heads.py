"""From a recipe's head section to a head to train."""

from collections.abc import Sequence
from typing import Any

import torch

from .build import build_tree
from .build_start import read_start
from .data.chat import Sample
from .data.features import FeatureSource, OriginalFeatures
from .data.vocabulary import choose_vocabulary, template_tokens
from .errors import UserError
from .evaluation.tree import unfillable
from .heads.adapters import new_adapter
from .heads.base import DraftHead, HeadConfig
from .heads.eagle1 import Eagle1Config, Eagle1Head
from .heads.eagle3 import Eagle3Config, Eagle3Head
from .heads.facts import Facts
from .heads.medusa import MedusaConfig, MedusaHead
from .heads.medusa2 import AdaptedMedusa, Together
from .heads.mtp import new_mtp
from .heads.mtp_base import MtpConfig, MtpHead
from .heads.own_mtp import fill, has_bias, read_own_modules
from .heads.verifier import Verifier
from .progress import say
from .training.compiling import compile_layers
from .training.recipe import Recipe
from .training.sections.head import Eagle1Section, Eagle3Section, HeadSection, MedusaSection, MtpSection


def build_head(recipe: Recipe, verifier: Verifier, training: Sequence[Sample], source: FeatureSource) -> DraftHead:
    torch.manual_seed(recipe.training.seed)
    if (started := read_start(recipe.head, verifier)) is not None:
        return started.to(verifier.device)
    if isinstance(recipe.head, MedusaSection):
        return build_medusa(recipe.head, verifier, training)
    if isinstance(recipe.head, Eagle1Section):
        return build_eagle1(recipe.head, verifier, training)
    if isinstance(recipe.head, MtpSection):
        return build_mtp(recipe.head, verifier, training)
    return build_eagle3(recipe.head, verifier, training, source)


def check_head(recipe: Recipe, verifier: Verifier) -> None:
    """Refuse, before the verifier has answered for hours, a head that cannot be made or cannot fill the recipe's trees."""
    section = recipe.head
    started = read_start(section, verifier)
    if isinstance(section, MtpSection) and section.start is not None:
        read_own_modules(verifier, module_count(section))
    size = vocabulary_size(section)
    if size is not None and started is None:
        choose_vocabulary([], size, verifier.facts.vocab_size, pinned(verifier))
    depth, tokens = (None, size or verifier.facts.vocab_size) if started is None else (started.depth, len(started.target_ids))
    if isinstance(section, Eagle1Section) and section.top_tokens > tokens:
        raise UserError(f"head.top_tokens: {section.top_tokens} in the recipe; the head knows {tokens} tokens")
    check_trees(recipe, depth, tokens)


def check_trees(recipe: Recipe, depth: int | None, tokens: int) -> None:
    """A head that training goes on from may have other depths and tokens than the recipe's section says."""
    for tree in recipe.evaluation.trees:
        if reason := unfillable(build_tree(tree), depth, tokens):
            raise UserError(f"evaluation.trees: {reason}")


def build_medusa(section: MedusaSection, verifier: Verifier, training: Sequence[Sample]) -> MedusaHead:
    ids = build_vocabulary(section.vocabulary, verifier, training)
    config = MedusaConfig(**head_fields(section, verifier.facts, len(ids)))
    head = MedusaHead(config, ids).to(verifier.device)
    head.initialise(verifier)
    return head


def adapt(recipe: Recipe, verifier: Verifier, head: DraftHead) -> DraftHead:
    """With `head.adapter`, the head together with a new adapter of the verifier, which has it from now on."""
    section = recipe.head.adapter if isinstance(recipe.head, MedusaSection) else None
    if section is None:
        return head
    assert isinstance(head, MedusaHead)
    torch.manual_seed(recipe.training.seed)
    adapter = verifier.attach(
        lambda model: new_adapter(model, verifier.name, section.rank, section.alpha, section.dropout, section.targets)
    )
    weight = section.weight or (0.01 if section.own == "kl" else 0.2)
    ramp = section.ramp or ("sine" if section.own == "kl" else "constant")
    return AdaptedMedusa(head, adapter, Together(section.heads_only, section.own, weight, ramp, section.rate))


def ready(recipe: Recipe, verifier: Verifier, head: DraftHead, source: FeatureSource) -> tuple[DraftHead, FeatureSource]:
    """A head as the recipe trains it, and the features it learns from."""
    head = adapt(recipe, verifier, head)
    head.recompute = recipe.training.gradient_checkpointing
    if recipe.training.compile:
        compile_layers(head)
    if isinstance(head, AdaptedMedusa):  # held against the verifier as it was
        source = OriginalFeatures(source, head.adapter)
    return head, source


CONFIGS: dict[str, type[HeadConfig]] = {
    "medusa": MedusaConfig, "eagle1": Eagle1Config, "eagle3": Eagle3Config, "mtp": MtpConfig,
}  # fmt: skip


def head_fields(section: HeadSection, facts: Facts, vocabulary: int) -> dict[str, Any]:
    """The config of a head of this section that drafts `vocabulary` tokens of a verifier."""
    names = CONFIGS[section.kind].model_fields
    fields = {name: getattr(facts, name) for name in names if hasattr(facts, name)}
    fields |= {name: value for name, value in section if name in names} | {"draft_vocab_size": vocabulary}
    if isinstance(section, Eagle3Section):
        fields["layers"] = eagle3_layers(section, facts)
    if isinstance(section, MtpSection) and section.decay is None:
        fields["decay"] = 0.6 if section.form == "recursive" else 1.0
    return fields


def vocabulary_size(section: HeadSection) -> int | None:
    """Tokens of the head's own vocabulary; None where it is the verifier's whole one."""
    return section.draft_vocabulary if isinstance(section, Eagle3Section) else section.vocabulary


def build_eagle1(section: Eagle1Section, verifier: Verifier, training: Sequence[Sample]) -> Eagle1Head:
    ids = build_vocabulary(section.vocabulary, verifier, training)
    return Eagle1Head(Eagle1Config(**head_fields(section, verifier.facts, len(ids))), ids).to(verifier.device)


def module_count(section: MtpSection) -> int:
    return 1 if section.form == "recursive" else section.depth


def build_mtp(section: MtpSection, verifier: Verifier, training: Sequence[Sample]) -> MtpHead:
    modules = [] if section.start is None else read_own_modules(verifier, module_count(section))
    ids = build_vocabulary(section.vocabulary, verifier, training)
    fields = head_fields(section, verifier.facts, len(ids))
    head = new_mtp(MtpConfig(**fields | {"attention_bias": bool(modules) and has_bias(modules)}), ids)
    if modules:
        fill(head, modules, verifier)
    else:
        head.initialise(verifier)
    return head.to(verifier.device)


def build_eagle3(section: Eagle3Section, verifier: Verifier, training: Sequence[Sample], source: FeatureSource) -> Eagle3Head:
    facts = verifier.facts
    ids = build_vocabulary(section.draft_vocabulary, verifier, training)
    config = Eagle3Config(**head_fields(section, facts, len(ids)))
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


def needed_layers(recipe: Recipe, verifier: Verifier) -> tuple[int, ...]:
    section = recipe.head
    if not isinstance(section, Eagle3Section):
        return ()
    started = read_start(section, verifier) if section.layers is None else None
    return eagle3_layers(section, verifier.facts) if started is None else started.needs


def pinned(verifier: Verifier) -> set[int]:
    """Ids that every vocabulary has."""
    return {*verifier.facts.stop_ids, *template_tokens(verifier.tokenizer)}


def build_vocabulary(size: int | None, verifier: Verifier, training: Sequence[Sample]) -> torch.Tensor:
    vocab_size = verifier.facts.vocab_size
    if size is None:
        return torch.arange(vocab_size)
    chosen = choose_vocabulary(((s.ids, s.mask) for s in training), size, vocab_size, pinned(verifier))
    say(f"draft vocabulary: {size} of {vocab_size} tokens, {chosen.coverage:.2%} of the supervised ones")
    return torch.tensor(chosen.ids)
