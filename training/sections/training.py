"""The training section."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from .base import Section

STRATEGIES = Literal["single", "ddp", "fsdp", "deepspeed"]


class FsdpSection(Section):
    """What FSDP2 shards besides the verifier's layers."""

    head: bool = Field(default=False, description="shard the head too: its weights, gradients and moments")


class DeepspeedSection(Section):
    """Where DeepSpeed's own settings stand."""

    config: str = Field(
        default="zero2", min_length=1, description="zero1, zero2 or zero3 (shipped), or a JSON file of DeepSpeed's"
    )


class TrainingSection(Section):
    """The loop: length, optimizer, and how often it speaks."""

    steps: int | None = Field(default=None, ge=1, description="optimizer steps (this or epochs)")
    epochs: float | None = Field(default=None, gt=0, validate_default=True, description="passes over the data (this or steps)")
    batch_tokens: int = Field(default=8192, ge=1, description="tokens an optimizer step, over all processes")
    group_lengths: bool = Field(
        default=True, description="samples of like length in a batch, for less padding; false draws them at random"
    )
    strategy: STRATEGIES = Field(
        default="single",
        description="one process, or how those that torchrun starts share the work; fsdp and ZeRO-3 shard the verifier too",
    )
    fsdp: FsdpSection = Field(default=FsdpSection(), description="of strategy fsdp")
    deepspeed: DeepspeedSection = Field(default=DeepspeedSection(), description="of strategy deepspeed")
    gradient_checkpointing: bool = Field(
        default=False, description="compute the head's layers again in the backward pass instead of keeping them: less memory"
    )
    compile: bool = Field(default=False, description="torch.compile the head's row-wise layers")
    accumulation: int = Field(default=1, ge=1, description="micro-batches that each process divides its share of a step into")
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="adamw, or muon for the matrices between hidden states and adamw for the rest"
    )
    learning_rate: float = Field(gt=0, description="the highest learning rate, such as 1.0e-3 (Medusa) or 1.0e-4 (EAGLE-3)")
    schedule: Literal["cosine", "constant"] = Field(default="cosine", description="the learning rate after the warm-up")
    warmup: float = Field(default=0.1, ge=0, lt=1, description="share of the steps")
    weight_decay: float = Field(
        default=0.0, ge=0, description="of AdamW and Muon: share of the weights, times the rate, a step"
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), strict=False, description="of AdamW"
    )
    clip: float = Field(default=0.5, gt=0, description="largest norm of the gradient")
    seed: int = Field(default=0, ge=0, lt=2**32, description="of weights, order and holdout")
    log_every: int = Field(default=10, ge=1, description="steps between lines of metrics.jsonl")
    save_every: int | None = Field(default=None, ge=1, description="steps between checkpoints; null saves at the end only")
    evaluate_every: int | None = Field(
        default=None, ge=1, description="steps between held-out evaluations; null evaluates at the end only"
    )
    evaluate_prompts: int | None = Field(
        default=None, ge=1, description="prompts of a held-out evaluation while training; null is all of evaluation.prompts"
    )

    evaluate_seconds: float | None = Field(
        default=None,
        gt=0,
        description="time of a held-out evaluation: it judges the prompts that fit, a batch at least",
    )

    @field_validator("optimizer")
    @classmethod
    def _whole_matrices(cls, optimizer: str, info: ValidationInfo) -> str:
        strategy, fsdp = info.data.get("strategy"), info.data.get("fsdp")
        if optimizer == "muon" and (strategy == "deepspeed" or (strategy == "fsdp" and fsdp and fsdp.head)):
            raise ValueError("muon needs whole matrices, which deepspeed and training.fsdp.head divide; use adamw")
        return optimizer

    @field_validator("epochs")
    @classmethod
    def _one_length(cls, epochs: float | None, info: ValidationInfo) -> float | None:
        if "steps" not in info.data:  # steps has a fault of its own
            return epochs
        if (epochs is None) == (info.data["steps"] is None):
            raise ValueError("give exactly one of steps and epochs" + (", not both" if epochs else ""))
        return epochs
