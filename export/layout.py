"""What an export is: a configuration, tensors under an engine's names, and how to serve them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..heads.base import DraftHead
from ..heads.verifier import Verifier

PLACEHOLDER = "VERIFIER"  # in serve commands, where nobody said how an engine finds the verifier


@dataclass(frozen=True)
class Order:
    """What is to be exported. verifier_name: the hub id by which engines find the verifier, None where it is unknown."""

    head: DraftHead
    verifier: Verifier
    verifier_name: str | None
    dtype: torch.dtype

    def cast(self, tensor: Tensor) -> Tensor:
        """A floating-point tensor as it is stored: converted once, on the CPU."""
        return tensor.detach().to("cpu", self.dtype).contiguous()

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Export:
    """One folder. engine: who loads it, with versions; command: how it is served; notes: what its user should know."""

    engine: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    command: str
    notes: tuple[str, ...] = ()
    weights: str = "model.safetensors"


def is_local(name: str) -> bool:
    """Whether a verifier's name means something on this machine alone."""
    local = name.startswith(("builtin:", "/", ".", "~")) or name.endswith(".gguf") or "\\" in name or name.count("/") > 1
    return local or Path(name).expanduser().exists()


def public_name(verifier: Verifier, given: str | None) -> str | None:
    """How engines find the verifier: the name given, else its own where that is a hub id and no adapter makes it another."""
    if given is not None and is_local(given):
        raise UserError(f"--verifier {given}: an export names its verifier by a hub id, never by a path of this machine")
    if verifier.adapter is None:
        return given or (None if is_local(verifier.name) else verifier.name)
    if given == verifier.name:
        raise UserError(f"--verifier {given}: that is the verifier without its adapter; give the hub id of the merged model")
    return given


def adapted(model: str, adapter: str) -> str:
    """What to say of a verifier with an adapter: it is neither the base nor found under the base's name."""
    base, its = ("" if is_local(name) else f" {name}" for name in (model, adapter))
    return (f"The verifier is the base model{base} with the LoRA adapter{its or ' of this run'}: serve the two merged (peft: "
            "merge_and_unload), for the base alone is another verifier and accepts fewer drafts.")  # fmt: skip


def needs_name(order: Order, engine: str) -> str:
    if order.verifier_name is None:
        raise UserError(f"--to {engine}: the folder names its verifier ({order.verifier.name} means nothing elsewhere); give "
                        "its hub id: --verifier OWNER/NAME")  # fmt: skip
    return order.verifier_name


def refusal(engine: str, reason: str, instead: str) -> UserError:
    return UserError(f"--to {engine}: {reason}; nearest alternative: {instead}")
