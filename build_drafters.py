"""From a recipe's list of drafters to objects that draft."""

from .build import build_tree
from .errors import UserError
from .evaluation.draft_model import ModelDrafter
from .evaluation.hierarchical import Hierarchical
from .evaluation.lookahead import Lookahead
from .evaluation.ngrams import PromptLookup
from .evaluation.record import undraftable
from .evaluation.tree import check_draftable
from .heads.base import DraftHead
from .heads.drafter import Drafter
from .heads.truncated import first_layers
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


def build_drafters(recipe: Recipe, head: DraftHead, verifier: Verifier) -> list[tuple[str, Drafter]]:
    """Names and drafters, in the order of the recipe, each of which can fill the recipe's trees. The head is one that fits the
    verifier, on its device. Raises UserError."""
    if fault := undraftable(head.target_ids, verifier.facts.vocab_size):
        raise UserError(f"the head's vocabulary (target_ids) cannot be drafted from: {fault}")
    drafters = [(section.name, build_drafter(section, head, verifier)) for section in recipe.evaluation.drafters]
    for name, drafter in drafters:
        for tree in recipe.evaluation.trees:
            try:
                check_draftable(build_tree(tree), drafter)
            except UserError as error:
                raise UserError(f"drafter {name}: {error}") from None
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
