"""The evaluation section."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from .base import Section
from .drafter import Drafters, HeadDrafterSection
from .tree import ChainSection, TreeSection


class EvaluationSection(Section):
    """Real decoding with the head on held-out prompts."""

    trees: tuple[TreeSection, ...] = Field(
        default=(ChainSection(depth=4),), strict=False, min_length=1, description="a list of trees, each evaluated"
    )
    drafters: Drafters = Field(
        default=(HeadDrafterSection(),),
        strict=False,
        min_length=1,
        description="a list of drafters, each evaluated: head, prompt_lookup, lookahead, hierarchical, truncated:LAYERS or "
        "model:MODEL",
    )
    prompt_files: tuple[str, ...] = Field(
        default=(), strict=False, description="a list of chat files or folders to evaluate on; empty is the held-out ones"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="of the verifier's weights while judging; null is verifier.dtype"
    )
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(0.0,), strict=False, min_length=1, description="a list of temperatures, each evaluated; 0 is greedy"
    )
    rule: Literal["candidates", "without_replacement", "typical"] = Field(
        default="candidates", description="how drafts are verified at temperatures above 0; typical is lossy"
    )
    top_k: int | None = Field(default=None, ge=1, description="likeliest tokens the verifier samples from; null is all")
    top_p: float = Field(default=1.0, gt=0, le=1, description="probability of the likeliest tokens it samples from; 1 is all")
    min_p: float = Field(default=0.0, ge=0, le=1, description="least probability, as a share of the likeliest token's")
    repetition_penalty: float = Field(default=1.0, ge=0.01, description="divides the logits of tokens already there; 1 is none")
    seed: int = Field(default=0, ge=0, lt=2**32, description="of sampling")
    max_new_tokens: int = Field(default=128, ge=1, description="tokens decoded a prompt")
    batch: int = Field(default=1, ge=1, description="prompts decoded at a time")
    prompts: int | None = Field(default=None, ge=1, description="how many held-out prompts; null is all of them")
    timing_prompts: int = Field(default=0, ge=0, description="prompts decoded one at a time for the speed-up; 0 skips it")
    timing_repeats: int = Field(default=3, ge=3, description="measurements a prompt, of which the median counts")

    @field_validator("rule")
    @classmethod
    def _fixed_shapes(cls, rule: str, info: ValidationInfo) -> str:
        if rule == "without_replacement" and any(tree.kind == "dynamic" for tree in info.data.get("trees", ())):
            raise ValueError("without_replacement needs trees whose shape is fixed in advance (chain, static); "
                             "for a dynamic one use candidates")  # fmt: skip
        return rule

    @field_validator("repetition_penalty")
    @classmethod
    def _known_to_rule(cls, penalty: float, info: ValidationInfo) -> float:
        if penalty != 1 and info.data.get("rule") == "typical":
            raise ValueError("rule typical cannot take a repetition penalty; use candidates or without_replacement")
        return penalty
