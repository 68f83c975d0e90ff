"""The tracking section."""

from pydantic import Field

from .base import Section


class WandbSection(Section):
    """A copy of metrics.jsonl at Weights & Biases; offline where there is no key or no network."""

    project: str = Field(min_length=1, description="the project's name")
    entity: str | None = Field(default=None, description="user or team; null is the key's own")
    name: str | None = Field(default=None, description="of the run; null lets wandb choose")
    group: str | None = Field(default=None, description="runs that belong together")
    tags: tuple[str, ...] = Field(default=(), strict=False, description="a list of tags")


class TrackingSection(Section):
    """Where metrics go besides the run folder's metrics.jsonl."""

    wandb: WandbSection | None = Field(default=None, description="a section with the project; null is no wandb")
