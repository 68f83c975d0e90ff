"""Memory of a training run before it starts: plain arithmetic, in bytes, a part at a time, for one process.

Weights, gradients and moments are exact. What a pass needs for a moment is a count of the tensors that are alive together, so a
rough one; allocators and libraries add to it.
"""

from dataclasses import dataclass
from typing import Literal

from ..heads.losses import CHUNK_ROWS
from ..heads.sizes import VerifierSizes

Strategy = Literal["single", "ddp", "fsdp", "fsdp_head", "zero1", "zero2", "zero3"]
SHARDS_VERIFIER = ("fsdp", "fsdp_head", "zero3")
WHOLE = 4  # bytes of a weight, a gradient or a moment: float32
DDP_BUCKET = 2**25  # numbers exchanged at a time
ZERO_BUCKET = 500_000_000
CHOICE_ROWS = 512  # of verifier logits at a time
LIBRARIES = 1.5e9  # what the device's context and libraries hold


@dataclass(frozen=True)
class HeadSizes:
    """parameters: trained ones; matrices: those of them that muon steps (none under adamw); columns: of its vocabulary;
    passes: how often a label's row runs through a layer; row: numbers kept a row and pass for the backward pass; whole_teacher:
    the teacher's probabilities of all rows are in memory at once (Medusa's soft targets)."""

    parameters: int
    matrices: int
    columns: int
    passes: int
    row: int
    whole_teacher: bool = False


@dataclass(frozen=True)
class Work:
    """tokens: of a micro-batch, padding included; share: of all of a process's in a step, whose states are there at once;
    hidden: of the verifier; states: kept a token, the last one included; vocabulary: of the verifier; bytes: of one of its
    weights; online: it runs in the step; kept: numbers a token that it keeps for a backward pass of its own (Medusa-2)."""

    tokens: int
    share: int
    hidden: int
    intermediate: int
    states: int
    vocabulary: int
    bytes: int
    online: bool
    kept: int = 0


def memory(strategy: Strategy, ranks: int, verifier: VerifierSizes, head: HeadSizes, work: Work) -> dict[str, float]:
    """Bytes on each process's device, by part."""
    half = work.bytes == 2
    parts = {"verifier": verifier_weights(strategy, ranks, verifier) * work.bytes}
    parts |= head_state(strategy, ranks, head)
    parts["head weights in bfloat16"] = 2.0 * head.parameters if half else 0.0
    parts["features"] = float(work.share * work.states * work.hidden * work.bytes)
    if work.online:
        alive = work.tokens * (6 * work.hidden + 3 * work.intermediate) * work.bytes
        parts["verifier pass"] = float(alive + CHOICE_ROWS * work.vocabulary * (work.bytes + 4))
    if work.kept:
        parts["verifier's backward pass"] = float(work.tokens * work.kept * work.bytes)
    parts["head pass"] = float(work.tokens * head.passes * head.row * (2 if half else 4))
    rows = 4 * CHUNK_ROWS + (2 * work.tokens if head.whole_teacher else 0)  # softmax makes a second table
    parts["loss"] = float(rows * head.columns * 4)
    parts["libraries"] = LIBRARIES
    return parts


def verifier_weights(strategy: Strategy, ranks: int, verifier: VerifierSizes) -> float:
    """Sharded by layer, embedding and lm_head stay whole, and two layers are whole at a time: the one that runs, the next."""
    if strategy in SHARDS_VERIFIER and ranks > 1:
        return verifier.outside + verifier.layers / ranks + 2 * verifier.layer
    return float(verifier.total)


def head_state(strategy: Strategy, ranks: int, head: HeadSizes) -> dict[str, float]:
    """Weights, gradients and moments of the head, and what exchanging them takes."""
    whole = float(WHOLE * head.parameters)
    moments = 2 * whole - WHOLE * head.matrices  # muon has one moment, adamw two
    weights, gradients, exchange = whole, whole, 0.0
    if strategy == "fsdp_head":
        weights, gradients, moments, exchange = whole / ranks, whole / ranks, moments / ranks, 2 * whole  # whole in a step
    elif strategy in ("zero1", "zero2", "zero3"):
        moments /= ranks
        exchange = float(WHOLE * min(head.parameters, ZERO_BUCKET))
        if strategy == "zero3":
            weights, exchange = whole / ranks, exchange + whole  # whole in a step
        else:
            weights += whole / ranks  # its own copy of what it steps
        if strategy != "zero1":
            gradients /= ranks
    elif ranks > 1:
        exchange = float(WHOLE * min(head.parameters, DDP_BUCKET))
    return {"head weights": weights, "gradients": gradients, "moments": moments, "exchange": exchange}


def host_features(tokens: int, work: Work) -> float:
    """Bytes of main memory that `features: memory` keeps for all training samples."""
    return float(tokens * work.states * work.hidden * work.bytes)
