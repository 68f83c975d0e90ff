"""Where training features come from: the `features` key of the data section."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, WrapValidator
from pydantic import ValidatorFunctionWrapHandler as Handler

from .base import Section

UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12}


class StoredSection(Section):
    """States written to a folder once and read from there every epoch."""

    stored: str = Field(min_length=1, description="the folder to write them to; the same one is used again")
    dtype: Literal["bfloat16", "float8", "int8", "float32"] = Field(
        default="bfloat16", description="of the states on disk; float8 and int8 have a scale for each row"
    )
    keep: str | None = Field(
        default=None, pattern=r"^\d+(\.\d+)? ?(MB|GB|TB)$",
        description="a size such as 200GB, beyond which the oldest states are deleted; null keeps all",
    )  # fmt: skip

    @property
    def keep_bytes(self) -> int | None:
        return None if self.keep is None else round(float(self.keep[:-2]) * UNITS[self.keep[-2:]])


def one_fault(value: Any, handler: Handler) -> Any:
    """The faults of a section are its own; anything else has one, not one for each part of the union."""
    if isinstance(value, dict):
        return StoredSection.model_validate(value)
    try:
        return handler(value)
    except ValidationError:
        raise ValueError(f"must be online, memory or a section such as {{stored: FOLDER}}, got {value!r}") from None


FeaturesSection = Annotated[Literal["online", "memory"] | StoredSection, WrapValidator(one_fault)]
