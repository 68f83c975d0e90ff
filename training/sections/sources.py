"""An entry of data.train: a chat file by its name alone, or a section with a file or a dataset."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from .base import Section
from .builtin import BUILTIN_PROMPTS, known_builtin


class ColumnsSection(Section):
    """Which of the rows' own columns holds what; with it, no other column is read."""

    messages: str | None = Field(default=None, description="the column with a list of messages")
    prompt: str | None = Field(default=None, description="the column with a prompt")
    response: str | None = Field(default=None, description="the column with its answer")
    instruction: str | None = Field(default=None, description="the column with an instruction")
    input: str | None = Field(default=None, description="the column with the text that an instruction speaks of")
    output: str | None = Field(default=None, description="the column with the answer to an instruction")
    system: str | None = Field(default=None, description="the column with a system message")
    tools: str | None = Field(default=None, description="the column with a list of tools")
    id: str | None = Field(default=None, description="the column with the row's own name")
    category: str | None = Field(default=None, description="the column with the kind of conversation")
    split: str | None = Field(default=None, description="the column that says `holdout` of rows to hold out")

    @model_validator(mode="after")
    def _speaks(self) -> Self:
        if not (self.messages or self.prompt or self.instruction):
            raise ValueError("must name the column of messages, prompt or instruction")
        return self


class SourceSection(Section):
    """A file or a dataset, its share of the mixture, and its columns."""

    file: str | None = Field(default=None, min_length=1, description="a chat file, or builtin:prompts")
    dataset: str | None = Field(default=None, min_length=1, description="a hub id, or a folder that `datasets` can load")
    subset: str | None = Field(default=None, min_length=1, description="configuration of the dataset, such as main")
    split: str | None = Field(default=None, min_length=1, description="split of the dataset; null is train")
    revision: str | None = Field(default=None, min_length=1, description="branch, tag or commit of the dataset")
    streaming: bool = Field(default=False, description="read only as many rows of the dataset as are used; needs data.rows")
    columns: ColumnsSection | None = Field(default=None, description="a section of ours: theirs; null reads rows as they are")
    weight: float | None = Field(
        default=None, gt=0, description="share of the mixture against the other weights; null everywhere takes every row"
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.file is None) == (self.dataset is None):
            raise ValueError("must have either a file or a dataset")
        if self.file is not None:
            known_builtin(self.file, BUILTIN_PROMPTS)
            if given := [name for name in ("subset", "split", "revision", "streaming") if getattr(self, name)]:
                raise ValueError(f"{given[0]} belongs to a dataset, this is a file")
        return self


def named_file(value: Any) -> Any:
    if isinstance(value, str):
        return {"file": value}
    if not isinstance(value, dict | SourceSection):
        raise ValueError(f"must be a chat file or a section with a file or a dataset, got {value!r}")
    return value


def briefly(source: SourceSection) -> Any:
    """A file with nothing more to say stays its name alone."""
    given = source.model_dump(exclude_defaults=True)
    return given["file"] if list(given) == ["file"] else source.model_dump()


SourceEntry = Annotated[
    SourceSection, BeforeValidator(named_file, json_schema_input_type=str | SourceSection), PlainSerializer(briefly)
]
