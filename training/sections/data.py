"""The data section."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, WrapValidator, model_validator
from pydantic import ValidatorFunctionWrapHandler as Handler

from .answers import Answers, AnswersSection
from .base import Section
from .features import FeaturesSection
from .sources import SourceEntry


def share_or_split(value: Any, handler: Handler) -> float | Literal["split"]:
    try:
        return handler(value)
    except ValidationError:  # one fault, not one for each half of the union
        raise ValueError(f"must be a share between 0 and 1, or split, got {value!r}") from None


class DataSection(Section):
    """What the head learns from, and what is held out for evaluation."""

    train: tuple[SourceEntry, ...] = Field(
        strict=False,
        min_length=1,
        description="a list of chat files, builtin:prompts, or sections that name a file or a dataset",
    )
    holdout: Annotated[Annotated[float, Field(gt=0, lt=1)] | Literal["split"], WrapValidator(share_or_split)] = Field(
        default=0.05, description="share of the conversations held out; split obeys each row's own `split` field"
    )
    rows: int | None = Field(
        default=None, ge=2, description="most conversations to use, spread evenly over the files; null is all"
    )
    max_length: int = Field(default=2048, ge=2, description="tokens a sample; longer ones are cut")
    bad_rows: Literal["error", "skip"] = Field(
        default="error", description="stop at a row that cannot be read or rendered, or count it and go on"
    )
    answers: Answers = Field(
        default=AnswersSection(mode="keep"),
        description="keep the files' answers, regenerate or complete them: a word or a section",
    )
    answer_tokens: int = Field(default=256, ge=1, description="most new tokens of an answer")
    answer_batch: int = Field(default=64, ge=1, description="prompts answered at a time")
    packing: bool = Field(
        default=False, description="put several samples into one row, as long as the longest sample; none sees another"
    )
    features: FeaturesSection = Field(
        default="online",
        description="online runs the verifier every step, memory once; {stored: FOLDER} keeps its states on disk",
    )

    @model_validator(mode="after")
    def _mixture(self) -> Self:
        weighted = [source.weight is not None for source in self.train]
        streaming = any(source.streaming for source in self.train)
        if streaming and self.rows is None:
            raise ValueError("a streaming dataset needs data.rows: how many rows to use")
        if (any(weighted) or (streaming and len(self.train) > 1)) and not all(weighted):
            raise ValueError(f"train.{weighted.index(False)} needs a weight: a mixture weighs all of its sources or none")
        return self
