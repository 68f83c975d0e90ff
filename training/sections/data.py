"""The data section."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, WrapValidator, field_validator
from pydantic import ValidatorFunctionWrapHandler as Handler

from .base import Section
from .builtin import BUILTIN_PROMPTS, known_builtin
from .features import FeaturesSection


def share_or_split(value: Any, handler: Handler) -> float | Literal["split"]:
    try:
        return handler(value)
    except ValidationError:  # one fault, not one for each half of the union
        raise ValueError(f"must be a share between 0 and 1, or split, got {value!r}") from None


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
    packing: bool = Field(
        default=False, description="put several samples into one row, as long as the longest sample; none sees another"
    )
    features: FeaturesSection = Field(
        default="online",
        description="online runs the verifier every step, memory once; {stored: FOLDER} keeps its states on disk",
    )

    @field_validator("train")
    @classmethod
    def _known(cls, train: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(known_builtin(name, BUILTIN_PROMPTS) for name in train)
