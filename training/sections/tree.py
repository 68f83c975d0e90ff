"""Trees, as recipes write them."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from .base import Section


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


TreeSection = Annotated[ChainSection | StaticSection | DynamicSection, Field(discriminator="kind")]
