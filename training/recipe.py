"""The recipe: one strict, frozen schema for everything that changes a result; its sections are in sections/.

Builders read recipes; heads, losses, trees and stores never do. Nothing here imports torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from ..errors import UserError
from .recipe_faults import RecipeError, nearest, tell
from .recipe_files import read_document, yaml_text
from .sections.base import Section
from .sections.data import DataSection
from .sections.evaluation import EvaluationSection
from .sections.head import Eagle3Section, HeadSection, MedusaSection, MtpSection
from .sections.tracking import TrackingSection
from .sections.training import TrainingSection
from .sections.verifier import VerifierSection

SHIPPED = Path(__file__).parent.parent / "recipes"


class Recipe(Section):
    """All of a run. Read one with load_recipe, write it with recipe_yaml."""

    verifier: VerifierSection = Field(description="a section that names the verifier")
    data: DataSection = Field(description="a section that lists the training files")
    head: HeadSection = Field(description="a section with the kind of head")
    training: TrainingSection = Field(description="a section with steps or epochs and the learning rate")
    evaluation: EvaluationSection = Field(default=EvaluationSection(), description="how the head is judged")
    tracking: TrackingSection = Field(default=TrackingSection(), description="where metrics go besides metrics.jsonl")

    @field_validator("evaluation")
    @classmethod
    def _draftable(cls, evaluation: EvaluationSection, info: ValidationInfo) -> EvaluationSection:
        head = info.data.get("head")  # None where it has faults of its own
        deepest, parts = None, "heads"
        if isinstance(head, MedusaSection):
            deepest = head.heads
        elif isinstance(head, MtpSection) and head.form != "recursive":
            deepest, parts = head.depth, "modules"
        widest = head and (head.draft_vocabulary if isinstance(head, Eagle3Section) else head.vocabulary)
        for tree in evaluation.trees:
            if deepest and tree.depth > deepest:
                raise ValueError(f"a {tree.kind} tree of depth {tree.depth} needs as many {parts}; this head has {deepest}")
            if widest and tree.width > widest:
                raise ValueError(f"a {tree.kind} tree with {tree.width} children a node needs as large a draft vocabulary; "
                                 f"this head has {widest} tokens")  # fmt: skip
        return evaluation


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe. overrides: 'training.steps=100', in order; the value is YAML.

    Raises RecipeError (a UserError) with every fault at once, a line each, in the order of the file.
    """
    document = read_document(Path(path))
    for override in overrides:
        document.override(override)
    recipe = None
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        for key, message in tell(error, Recipe):
            document.fault(document.line(key), key, message)
    if recipe is None or document.faults:
        raise RecipeError(document.faults)
    return recipe


def recipe_yaml(recipe: Recipe) -> str:
    """The resolved recipe with every default spelled out; load_recipe reads it back to an equal one."""
    return yaml_text(recipe.model_dump(mode="json"))


def schema_json() -> dict[str, Any]:
    """JSON schema of a recipe, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with the package: {'smollm2-135m/eagle3': its file}."""
    return {path.relative_to(SHIPPED).with_suffix("").as_posix(): path for path in sorted(SHIPPED.glob("*/*.yaml"))}


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a recipe given as a path or as the name of a shipped one; the path wins."""
    path, shipped = Path(name_or_path), shipped_recipes()
    if path.is_file():
        return path
    if str(name_or_path) in shipped:
        return shipped[str(name_or_path)]
    hint = nearest(str(name_or_path), list(shipped)) or "; `headstart recipe ls` lists the shipped ones"
    raise UserError(f"{name_or_path}: no such file and no shipped recipe of that name{hint}")
