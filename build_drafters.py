"""From a recipe's list of drafters to objects that draft."""

from .build import build_tree
from .errors import UserError
from .evaluation.draft_model import ModelDrafter, check_tokenizer
from .evaluation.hierarchical import Hierarchical
from .evaluation.lookahead import Lookahead
from .evaluation.ngrams import PromptLookup
from .evaluation.record import undraftable
from .evaluation.tree import unfillable
from .heads.base import DraftHead
from .heads.drafter import Drafter
from .heads.loading import load_tokenizer
from .heads.truncated import check_layers, first_layers
from .heads.verifier import Verifier
from .training.recipe import Recipe
from .training.sections.drafter import (
    DrafterSection,
    HeadDrafterSection,
    LookaheadSection,
    ModelSection,
    PromptLookupSection,
    TruncatedSection,
)


def check_drafters(recipe: Recipe, verifier: Verifier) -> None:
    """Refuse what `build_drafters` would, as far as it shows without loading another model."""
    for section in recipe.evaluation.drafters:
        if isinstance(section, TruncatedSection):
            check_layers(verifier, section.layers)
        elif isinstance(section, ModelSection):
            check_tokenizer(section.model, load_tokenizer(section.model), verifier.tokenizer)


def build_drafters(recipe: Recipe, head: DraftHead, verifier: Verifier) -> list[tuple[str, Drafter]]:
    """Names and drafters, in the order of the recipe; each can fill all of its trees, else UserError. The head is one that fits
    the verifier, on its device."""
    if fault := undraftable(head.target_ids, verifier.facts.vocab_size):
        raise UserError(f"the head's vocabulary (target_ids) cannot be drafted from: {fault}")
    drafters = [(section.name, build_drafter(section, head, verifier)) for section in recipe.evaluation.drafters]
    for name, drafter in drafters:
        for tree in recipe.evaluation.trees:
            if reason := unfillable(build_tree(tree), drafter.depth, len(drafter.target_ids)):
                raise UserError(f"evaluation.trees: {name}: {reason}")
    return drafters


def build_drafter(section: DrafterSection, head: DraftHead, verifier: Verifier) -> Drafter:
    size, device = verifier.facts.vocab_size, verifier.device
    if isinstance(section, HeadDrafterSection):
        return head
    if isinstance(section, TruncatedSection):
        return ModelDrafter(first_layers(verifier, section.layers), verifier)
    if isinstance(section, ModelSection):
        return ModelDrafter(Verifier.load(section.model, verifier.dtype, str(device)), verifier)
    own = section.model_dump(exclude={"kind"})
    if isinstance(section, LookaheadSection):
        return Lookahead(size, device, **own)
    assert isinstance(section, PromptLookupSection)
    lookup = PromptLookup(size, device, **own)
    return lookup if section.kind == "prompt_lookup" else Hierarchical(lookup, head)
