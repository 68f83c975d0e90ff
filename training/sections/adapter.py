"""The adapter section of a Medusa head: Medusa-2."""

from typing import Annotated, Literal

from pydantic import Field

from .base import Section


class AdapterSection(Section):
    """Medusa-2: after the heads alone, heads and a LoRA adapter of the verifier learn together."""

    rank: int = Field(default=32, ge=1, description="of the adapter's matrices")
    alpha: int = Field(default=16, ge=1, description="the adapter's product is multiplied by alpha / rank")
    dropout: float = Field(default=0.05, ge=0, lt=1, description="of what the adapter reads, while training")
    targets: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        default=None, strict=False, min_length=1, description="names of linear layers; null is all of attention and MLP"
    )
    heads_only: float = Field(default=0.5, ge=0, lt=1, description="share of the steps in which the heads learn alone")
    own: Literal["kl", "ce"] = Field(
        default="kl",
        description="what keeps the verifier: kl to itself without the adapter (self-distillation), or ce, its "
        "cross-entropy on the answers",
    )
    weight: float | None = Field(
        default=None,
        gt=0,
        description="of the heads' loss, beside the verifier's own, to the adapter; null is 0.01 with kl, 0.2 with ce",
    )
    ramp: Literal["constant", "sine"] | None = Field(
        default=None, description="of that weight after heads_only; null is sine (from 0) with kl, constant with ce"
    )
    rate: float = Field(default=0.25, gt=0, description="the adapter's learning rate, as a share of training.learning_rate")
