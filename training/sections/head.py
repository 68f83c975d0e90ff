"""The head section: one class for each kind of head."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from .adapter import AdapterSection
from .base import Section

SoftLoss = Literal["ce", "kl", "tv", "lk"]
SOFT_LOSSES = "how far q is from p: ce, kl, tv (total variation, 1 - acceptance) or lk (-log acceptance)"


class MedusaSection(Section):
    """Medusa: independent heads on the verifier's last hidden state."""

    kind: Literal["medusa"] = "medusa"
    heads: int = Field(default=4, ge=1, le=16, description="how many tokens ahead, beyond the verifier's own next one")
    blocks: int = Field(default=1, ge=1, description="residual blocks a head")
    lm_head: Literal["own", "shared"] = Field(
        default="own", description="an output layer of its own for each head, or the verifier's, frozen"
    )
    decay: float = Field(default=0.8, gt=0, le=1, description="head i weighs decay to the power i in the loss")
    targets: Literal["hard", "soft"] = Field(
        default="hard", description="the tokens of the text, or the verifier's whole distribution"
    )
    loss: SoftLoss = Field(default="ce", description=f"{SOFT_LOSSES} (all but ce need targets: soft)")
    vocabulary: int | None = Field(default=None, ge=2, description="size of a pruned head vocabulary; null is the whole one")
    start: str | None = Field(
        default=None, min_length=1, description="a folder with a published head to go on from; null is a new head"
    )
    adapter: AdapterSection | None = Field(
        default=None, description="a section for Medusa-2, which trains a LoRA of the verifier too; null is Medusa-1"
    )

    @field_validator("loss")
    @classmethod
    def _of_distributions(cls, loss: SoftLoss, info: ValidationInfo) -> SoftLoss:
        if loss != "ce" and info.data.get("targets") == "hard":
            raise ValueError(f"{loss} compares distributions: it needs targets: soft")
        return loss


class Eagle3Section(Section):
    """EAGLE-3: one decoder layer that reads three of the verifier's hidden states and then its own outputs."""

    kind: Literal["eagle3"] = "eagle3"
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, strict=False, min_length=1, description="indices of hidden states; null is 2, n//2, n-3"
    )
    draft_vocabulary: int | None = Field(
        default=None, ge=2, description="size of the draft vocabulary; null is the verifier's whole one"
    )
    depth: int = Field(default=7, ge=1, description="steps of the training-time test")
    decay: float = Field(default=0.8, gt=0, le=1, description="step k weighs decay to the power k in the loss")
    loss: SoftLoss = Field(default="ce", description=SOFT_LOSSES)
    fc_norm: bool = Field(
        default=False, description="EAGLE-3.1: a norm for each of the verifier's states before they are fused"
    )
    norm_output: bool = Field(default=False, description="EAGLE-3.1: the next step reads the output after its norm")
    start: str | None = Field(
        default=None, min_length=1, description="a folder with a published head to go on from; null is a new head"
    )


class Eagle1Section(Section):
    """EAGLE-1: one decoder layer that imitates the verifier's next hidden state; with more steps, HASS."""

    kind: Literal["eagle1"] = "eagle1"
    vocabulary: int | None = Field(default=None, ge=2, description="size of a pruned draft vocabulary; null is the whole one")
    depth: int = Field(default=1, ge=1, description="aligned steps: 1 is EAGLE-1; HASS has more, usually 3 or 4")
    decay: float = Field(default=1.0, gt=0, le=1, description="step k weighs decay to the power k in the loss")
    cross_entropy: float = Field(default=0.1, ge=0, description="weight of the soft cross-entropy beside the regression")
    top_tokens: int = Field(
        default=0, ge=0, validate_default=True,
        description="how many of the verifier's likeliest tokens count once more, with their own cross-entropy; HASS has 10",
    )  # fmt: skip
    noise: float = Field(default=0.1, ge=0, description="uniform noise of this size on the states while training")
    noise_by_length: bool = Field(default=False, description="scale the noise by 512 / tokens of the sample")
    start: str | None = Field(
        default=None, min_length=1, description="a folder with a published head to go on from; null is a new head"
    )

    @field_validator("top_tokens")
    @classmethod
    def _within(cls, top_tokens: int, info: ValidationInfo) -> int:
        vocabulary = info.data.get("vocabulary")
        if vocabulary is not None and top_tokens > vocabulary:
            raise ValueError(f"must be at most vocabulary ({vocabulary}), got {top_tokens}")
        return top_tokens


class MtpSection(Section):
    """Multi-token prediction: whole decoder layers on the verifier's last hidden state."""

    kind: Literal["mtp"] = "mtp"
    form: Literal["parallel", "sequential", "recursive"] = Field(
        default="recursive",
        description="parallel: independent modules; sequential: each reads the one before; recursive: one, again and again",
    )
    vocabulary: int | None = Field(default=None, ge=2, description="size of a pruned head vocabulary; null is the whole one")
    depth: int = Field(default=3, ge=1, le=16, description="modules; of the recursive form, steps it is trained for")
    decay: float | None = Field(
        default=None, gt=0, le=1, description="depth k weighs decay to the power k; null is 0.6 if recursive, else 1"
    )
    weight: float = Field(default=1.0, gt=0, description="of the whole loss, the lambda of DeepSeek-V3")
    start: Literal["verifier"] | None = Field(
        default=None, description="verifier: go on from the modules that the verifier brings itself; null is new ones"
    )

    @field_validator("start")
    @classmethod
    def _of_this_form(cls, start: str | None, info: ValidationInfo) -> str | None:
        if start is not None and info.data.get("form") == "parallel":
            raise ValueError("a verifier's own modules read tokens: form must be sequential or recursive")
        return start


HeadSection = Annotated[MedusaSection | Eagle1Section | Eagle3Section | MtpSection, Field(discriminator="kind")]
