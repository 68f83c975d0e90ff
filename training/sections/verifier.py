"""The verifier section."""

from typing import Literal

from pydantic import Field, field_validator

from .base import Section
from .builtin import BUILTIN_VERIFIERS, known_builtin


class VerifierSection(Section):
    """The frozen model that the head drafts for."""

    model: str = Field(min_length=1, description="hub id, folder, .gguf file or builtin:smollm2-135m")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="bfloat16",
        description="of the verifier's weights; auto is bfloat16 where the device multiplies in it, float32 elsewhere",
    )
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="auto, cpu, mps, cuda or cuda:N")

    adapter: str | None = Field(
        default=None, min_length=1, description="a peft LoRA on top of the model: folder or hub id; null is none"
    )
    bits: Literal[4, 8] | None = Field(
        default=None, description="weights of 4 or 8 bits (bitsandbytes, on a CUDA device); null is dtype"
    )

    @field_validator("model")
    @classmethod
    def _known(cls, model: str) -> str:
        return known_builtin(model, BUILTIN_VERIFIERS)
