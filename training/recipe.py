"""The recipe: one strict, frozen schema for everything that changes a result.

Builders read recipes; heads, losses, trees and stores never do. Nothing here imports torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, WrapValidator, field_validator
from pydantic import ValidatorFunctionWrapHandler as Handler

from ..errors import UserError
from .recipe_faults import RecipeError, nearest, tell
from .recipe_files import read_document, yaml_text

BUILTIN_VERIFIERS = ("builtin:smollm2-135m",)
BUILTIN_PROMPTS = ("builtin:prompts",)
SHIPPED = Path(__file__).parent.parent / "recipes"


def known_builtin(name: str, known: Sequence[str]) -> str:
    if name.startswith("builtin:") and name not in known:
        raise ValueError(f"there is no {name}{nearest(name, known)}")
    return name


def share_or_split(value: Any, handler: Handler) -> float | Literal["split"]:
    try:
        return handler(value)
    except ValidationError:  # one fault, not one for each half of the union
        raise ValueError(f"must be a share between 0 and 1, or split, got {value!r}") from None


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class VerifierSection(Section):
    """The frozen model that the head drafts for."""

    model: str = Field(min_length=1, description="hub id, folder, or builtin:smollm2-135m")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="bfloat16",
        description="of the verifier's weights; auto is bfloat16 where the device multiplies in it, float32 elsewhere",
    )
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="auto, cpu, mps, cuda or cuda:N")

    @field_validator("model")
    @classmethod
    def _known(cls, model: str) -> str:
        return known_builtin(model, BUILTIN_VERIFIERS)


class DataSection(Section):
    """What the head learns from, and what is held out for evaluation."""

    train: tuple[str, ...] = Field(strict=False, min_length=1, description="a list of chat files, or builtin:prompts")
    holdout: Annotated[Annotated[float, Field(gt=0, lt=1)] | Literal["split"], WrapValidator(share_or_split)] = Field(
        default=0.05, description="share of the conversations held out; split obeys each row's own `split` field"
    )
    rows: int | None = Field(
        default=None, ge=2, description="most conversations to use, spread evenly over the files; null is all"
    )
    max_length: int = Field(default=2048, ge=2, description="tokens a sample; longer ones are cut")
    answers: Literal["keep", "regenerate"] = Field(
        default="keep", description="keep the files' answers, or let the verifier answer the prompts itself"
    )
    answer_tokens: int = Field(default=256, ge=1, description="most new tokens of a regenerated answer")
    answer_batch: int = Field(default=64, ge=1, description="prompts answered at a time")
    features: Literal["online", "memory"] = Field(
        default="online", description="run the verifier every step, or once and keep its states in memory"
    )

    @field_validator("train")
    @classmethod
    def _known(cls, train: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(known_builtin(name, BUILTIN_PROMPTS) for name in train)


SoftLoss = Literal["ce", "kl", "tv", "lk"]
SOFT_LOSSES = "how far q is from p: ce, kl, tv (total variation, 1 - acceptance) or lk (-log acceptance)"


class MedusaSection(Section):
    """Medusa: independent heads on the verifier's last hidden state."""

    kind: Literal["medusa"] = "medusa"
    heads: int = Field(default=4, ge=1, le=16, description="how many tokens ahead, beyond the verifier's own next one")
    blocks: int = Field(default=1, ge=1, description="residual blocks a head")
    lm_head: Literal["own", "shared"] = Field(
        default="own", description="an output layer of its own for each head, or the verifier's, frozen"
    )
    decay: float = Field(default=0.8, gt=0, le=1, description="head i weighs decay to the power i in the loss")
    targets: Literal["hard", "soft"] = Field(
        default="hard", description="the tokens of the text, or the verifier's whole distribution"
    )
    loss: SoftLoss = Field(default="ce", description=f"{SOFT_LOSSES} (all but ce need targets: soft)")
    vocabulary: int | None = Field(default=None, ge=2, description="size of a pruned head vocabulary; null is the whole one")

    @field_validator("loss")
    @classmethod
    def _of_distributions(cls, loss: SoftLoss, info: ValidationInfo) -> SoftLoss:
        if loss != "ce" and info.data.get("targets") == "hard":
            raise ValueError(f"{loss} compares distributions: it needs targets: soft")
        return loss


class Eagle3Section(Section):
    """EAGLE-3: one decoder layer that reads three of the verifier's hidden states and then its own outputs."""

    kind: Literal["eagle3"] = "eagle3"
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, strict=False, min_length=1, description="indices of hidden states; null is 2, n//2, n-3"
    )
    draft_vocabulary: int | None = Field(
        default=None, ge=2, description="size of the draft vocabulary; null is the verifier's whole one"
    )
    depth: int = Field(default=7, ge=1, description="steps of the training-time test")
    decay: float = Field(default=0.8, gt=0, le=1, description="step k weighs decay to the power k in the loss")
    loss: SoftLoss = Field(default="ce", description=SOFT_LOSSES)
    fc_norm: bool = Field(
        default=False, description="EAGLE-3.1: a norm for each of the verifier's states before they are fused"
    )
    norm_output: bool = Field(default=False, description="EAGLE-3.1: the next step reads the output after its norm")


class Eagle1Section(Section):
    """EAGLE-1: one decoder layer that imitates the verifier's next hidden state; with more steps, HASS."""

    kind: Literal["eagle1"] = "eagle1"
    vocabulary: int | None = Field(default=None, ge=2, description="size of a pruned draft vocabulary; null is the whole one")
    depth: int = Field(default=1, ge=1, description="aligned steps: 1 is EAGLE-1; HASS has more, usually 3 or 4")
    decay: float = Field(default=1.0, gt=0, le=1, description="step k weighs decay to the power k in the loss")
    cross_entropy: float = Field(default=0.1, ge=0, description="weight of the soft cross-entropy beside the regression")
    top_tokens: int = Field(
        default=0, ge=0, validate_default=True,
        description="how many of the verifier's likeliest tokens count once more, with their own cross-entropy; HASS has 10",
    )  # fmt: skip
    noise: float = Field(default=0.1, ge=0, description="uniform noise of this size on the states while training")
    noise_by_length: bool = Field(default=False, description="scale the noise by 512 / tokens of the sample")

    @field_validator("top_tokens")
    @classmethod
    def _within(cls, top_tokens: int, info: ValidationInfo) -> int:
        vocabulary = info.data.get("vocabulary")
        if vocabulary is not None and top_tokens > vocabulary:
            raise ValueError(f"must be at most vocabulary ({vocabulary}), got {top_tokens}")
        return top_tokens


class MtpSection(Section):
    """Multi-token prediction: whole decoder layers on the verifier's last hidden state."""

    kind: Literal["mtp"] = "mtp"
    form: Literal["parallel", "sequential", "recursive"] = Field(
        default="recursive",
        description="parallel: independent modules; sequential: each reads the one before; recursive: one, again and again",
    )
    vocabulary: int | None = Field(default=None, ge=2, description="size of a pruned head vocabulary; null is the whole one")
    depth: int = Field(default=3, ge=1, le=16, description="modules; of the recursive form, steps it is trained for")
    decay: float | None = Field(
        default=None, gt=0, le=1, description="depth k weighs decay to the power k; null is 0.6 if recursive, else 1"
    )
    weight: float = Field(default=1.0, gt=0, description="of the whole loss, the lambda of DeepSeek-V3")


class TrainingSection(Section):
    """The loop: length, optimizer, and how often it speaks."""

    steps: int | None = Field(default=None, ge=1, description="optimizer steps (this or epochs)")
    epochs: float | None = Field(default=None, gt=0, validate_default=True, description="passes over the data (this or steps)")
    batch_tokens: int = Field(default=8192, ge=1, description="tokens an optimizer step, over all processes")
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="adamw, or muon for the matrices between hidden states and adamw for the rest"
    )
    learning_rate: float = Field(gt=0, description="the highest learning rate, such as 1.0e-3 (Medusa) or 1.0e-4 (EAGLE-3)")
    schedule: Literal["cosine", "constant"] = Field(default="cosine", description="the learning rate after the warm-up")
    warmup: float = Field(default=0.1, ge=0, lt=1, description="share of the steps")
    weight_decay: float = Field(default=0.0, ge=0, description="of AdamW")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), strict=False, description="of AdamW"
    )
    clip: float = Field(default=0.5, gt=0, description="largest norm of the gradient")
    seed: int = Field(default=0, ge=0, lt=2**32, description="of weights, order and holdout")
    log_every: int = Field(default=10, ge=1, description="steps between lines of metrics.jsonl")
    save_every: int | None = Field(default=None, ge=1, description="steps between checkpoints; null saves at the end only")
    evaluate_every: int | None = Field(
        default=None, ge=1, description="steps between held-out evaluations; null evaluates at the end only"
    )
    evaluate_prompts: int | None = Field(
        default=None, ge=1, description="prompts of a held-out evaluation while training; null is all of evaluation.prompts"
    )

    @field_validator("epochs")
    @classmethod
    def _one_length(cls, epochs: float | None, info: ValidationInfo) -> float | None:
        if "steps" not in info.data:  # steps has a fault of its own
            return epochs
        if (epochs is None) == (info.data["steps"] is None):
            raise ValueError("give exactly one of steps and epochs" + (", not both" if epochs else ""))
        return epochs


class ChainSection(Section):
    """One draft after the other."""

    kind: Literal["chain"] = "chain"
    depth: int = Field(ge=1, description="tokens drafted a round")

    @property
    def width(self) -> int:
        return 1


class StaticSection(Section):
    """The same tree every round."""

    kind: Literal["static"] = "static"
    paths: tuple[Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)], ...] = Field(
        strict=False, min_length=1, description="a list of paths of child ranks, such as [[0], [1], [0, 0]]"
    )

    @field_validator("paths")
    @classmethod
    def _closed(cls, paths: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        for number, path in enumerate(paths):
            if not path:
                raise ValueError("[] is the root, which is always there: remove it")
            if path in paths[:number]:
                raise ValueError(f"path {list(path)} is listed twice")
            if path[:-1] and path[:-1] not in paths:
                raise ValueError(f"path {list(path)} needs its parent {list(path[:-1])}")
        return paths

    @property
    def depth(self) -> int:
        return max(map(len, self.paths))

    @property
    def width(self) -> int:
        return max(path[-1] for path in self.paths) + 1


class DynamicSection(Section):
    """A tree grown every round where the head is most sure (EAGLE-2)."""

    kind: Literal["dynamic"] = "dynamic"
    depth: int = Field(ge=1, description="levels")
    top_k: int = Field(ge=1, description="children a node, and nodes that grow on a level")
    nodes: int = Field(ge=2, description="nodes kept for verification, the root included")

    @property
    def width(self) -> int:
        return self.top_k


HeadSection = Annotated[MedusaSection | Eagle1Section | Eagle3Section | MtpSection, Field(discriminator="kind")]
TreeSection = Annotated[ChainSection | StaticSection | DynamicSection, Field(discriminator="kind")]


class EvaluationSection(Section):
    """Real decoding with the head on held-out prompts."""

    trees: tuple[TreeSection, ...] = Field(
        default=(ChainSection(depth=4),), strict=False, min_length=1, description="a list of trees, each evaluated"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="of the verifier's weights while judging; null is verifier.dtype"
    )
    max_new_tokens: int = Field(default=128, ge=1, description="tokens decoded a prompt")
    batch: int = Field(default=1, ge=1, description="prompts decoded at a time")
    prompts: int | None = Field(default=None, ge=1, description="how many held-out prompts; null is all of them")
    timing_prompts: int = Field(default=0, ge=0, description="prompts decoded one at a time for the speed-up; 0 skips it")
    timing_repeats: int = Field(default=3, ge=3, description="measurements a prompt, of which the median counts")


class Recipe(Section):
    """All of a run. Read one with load_recipe, write it with recipe_yaml."""

    verifier: VerifierSection = Field(description="a section that names the verifier")
    data: DataSection = Field(description="a section that lists the training files")
    head: HeadSection = Field(description="a section with the kind of head")
    training: TrainingSection = Field(description="a section with steps or epochs and the learning rate")
    evaluation: EvaluationSection = Field(default=EvaluationSection(), description="how the head is judged")

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
