"""Drafters, as recipes write them: `prompt_lookup`, `truncated:8` or a mapping with a kind and its fields."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from .base import Section


class _Drafter(Section):
    kind: str

    @property
    def name(self) -> str:
        """The kind, with what is not as it is by default: `prompt_lookup (longest 5)`."""
        own = self.model_dump(exclude_defaults=True, exclude={"kind"})
        return self.kind + (f" ({', '.join(f'{name} {value}' for name, value in own.items())})" if own else "")


class HeadDrafterSection(_Drafter):
    """The head that the recipe trains."""

    kind: Literal["head"] = "head"


class PromptLookupSection(_Drafter):
    """What followed the last tokens where they stood before in prompt or answer."""

    kind: Literal["prompt_lookup"] = "prompt_lookup"
    longest: int = Field(default=3, ge=1, description="last tokens that are looked up first")
    shortest: int = Field(default=2, ge=1, description="fewest that are looked up where more are not found")
    matches: int = Field(default=4, ge=1, description="places that are followed, the latest ones")
    length: int = Field(default=10, ge=1, description="tokens of each that are drafted at most")

    @field_validator("shortest")
    @classmethod
    def _ordered(cls, shortest: int, info: ValidationInfo) -> int:
        if shortest > info.data.get("longest", shortest):
            raise ValueError(f"must be at most longest ({info.data['longest']}), got {shortest}")
        return shortest


class HierarchicalSection(PromptLookupSection):
    """Prompt lookup where it finds something, the head elsewhere, round by round."""

    kind: Literal["hierarchical"] = "hierarchical"  # type: ignore[assignment]
    longest: int = Field(default=5, ge=1, description="last tokens that are looked up first")
    shortest: int = Field(default=3, ge=1, description="fewest that are looked up where more are not found")


class LookaheadSection(_Drafter):
    """Jacobi iterations of the verifier itself, and a pool of the n-grams they make."""

    kind: Literal["lookahead"] = "lookahead"
    window: int = Field(default=8, ge=1, description="coming tokens that are guessed in parallel")
    ngram: int = Field(default=4, ge=2, description="tokens of an n-gram; a draft has one fewer")
    guesses: int = Field(default=8, ge=1, description="n-grams kept for each first token, the latest ones")


class TruncatedSection(_Drafter):
    """The verifier's own first layers with its final norm and lm_head."""

    kind: Literal["truncated"] = "truncated"
    layers: int = Field(ge=1, description="how many of the verifier's layers draft")

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.layers}"


class ModelSection(_Drafter):
    """A smaller language model of the same vocabulary."""

    kind: Literal["model"] = "model"
    model: str = Field(min_length=1, description="hub id, folder or .gguf file")

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.model}"


def spelled_out(value: Any) -> Any:
    """`truncated:8` as the mapping it stands for."""
    if not isinstance(value, str):
        return value
    kind, _, rest = value.partition(":")
    if not rest:
        return {"kind": kind}
    field = {"truncated": "layers", "model": "model"}.get(kind, "options")
    return {"kind": kind, field: int(rest) if kind == "truncated" and rest.isdecimal() else rest}


DrafterSection = Annotated[
    HeadDrafterSection | PromptLookupSection | HierarchicalSection | LookaheadSection | TruncatedSection | ModelSection,
    Field(discriminator="kind"),
]
Drafters = Annotated[
    tuple[DrafterSection, ...],
    BeforeValidator(lambda items: [spelled_out(i) for i in items] if isinstance(items, list) else items),
]
USES_HEAD = ("head", "hierarchical")
