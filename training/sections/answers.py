"""data.answers: who writes the answers that a head learns from."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from .base import Section


class AnswersSection(Section):
    """Who writes the answers. `answers: regenerate` is short for `answers: {mode: regenerate}`."""

    mode: Literal["keep", "regenerate", "complete"] = Field(
        default="regenerate",
        description="keep the files' answers, replace every one, or answer only conversations whose last answer is missing",
    )
    temperature: float = Field(default=0.0, ge=0, description="of new answers; 0 is greedy")
    seed: int = Field(default=0, ge=0, description="of new answers at a temperature above 0")
    server: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="the http address of an OpenAI-compatible server",
    )
    model: str | None = Field(default=None, min_length=1, description="the server's name for the verifier; null asks it")
    concurrency: int = Field(default=32, ge=1, le=1024, description="requests under way at a time")
    timeout: float = Field(default=600.0, gt=0, description="seconds that one answer may take")
    retries: int = Field(default=6, ge=0, description="times a failed request is sent again, after longer and longer pauses")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        given = self.model_fields_set - {"mode"}
        if self.mode == "keep" and given:
            raise ValueError(f"{min(given)} is of no use where the files' answers are kept")
        plain = type(self).model_fields
        for name in ("model", "concurrency", "timeout", "retries"):
            if self.server is None and getattr(self, name) != plain[name].default:
                raise ValueError(f"{name} belongs to a server, and none is named")
        return self


def named_mode(value: Any) -> Any:
    return {"mode": value} if isinstance(value, str) else value


def briefly(answers: AnswersSection) -> Any:
    """A mode with nothing more to say stays its name alone."""
    plain = answers == AnswersSection(mode=answers.mode)
    return answers.mode if plain else answers.model_dump()


Answers = Annotated[
    AnswersSection,
    BeforeValidator(named_mode, json_schema_input_type=Literal["keep", "regenerate", "complete"] | AnswersSection),
    PlainSerializer(briefly),
]
