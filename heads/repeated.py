"""Passes that come again in every round with the same shapes: recorded as CUDA graphs where there is a GPU, and replayed.

A round launches thousands of small kernels, which costs a GPU more than what they compute. A recorded pass is launched at once;
it reads and writes the same memory each time, so what differs from round to round (ids, positions, masks, the slots of new
tokens) is copied into buffers, and it attends over slots of the cache up to a multiple of SPAN. Each recording is compared with
the pass as it is: a model whose pass cannot be recorded, or says something else then, is run without.

Shapes: B rows, T new tokens, S slots of the cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import first_line
from ..progress import say
from .cache import RaggedCache

Inputs = dict[str, Tensor]
Compute = Callable[[Inputs, Inputs], list[Tensor]]  # inputs, and who sees whom: bool [B, T, S] by kind of attention
Replay = Callable[[], list[Tensor]]  # computes again, into the same tensors

SPAN = 256  # slots
REPEATS = 4  # passes of the same shapes before one is recorded, which costs about three


def cuda_graph(run: Replay) -> Replay:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()

    def replay() -> list[Tensor]:
        graph.replay()
        return outputs

    return replay


RECORDERS: dict[str, Callable[[Replay], Replay]] = {"cuda": cuda_graph}  # by kind of device


class Repeated:
    """The passes of a verifier and of what drafts for it, over any caches."""

    def __init__(self) -> None:
        self.refused: set[str] = set()  # passes that cannot be recorded

    def run(self, cache: RaggedCache, name: str, tokens: int, inputs: Inputs, seen: Inputs, compute: Compute) -> list[Tensor]:
        """compute(inputs, seen), which writes `tokens` new tokens a row to the cache. Passes of one name and the same shapes
        over a cache run as they are until the one that is recorded."""
        device = next(iter(inputs.values())).device
        record = RECORDERS.get(device.type)
        if record is None or name in self.refused:
            return compute(inputs, seen)
        end = min(cache.capacity, -(-cache.end(tokens) // SPAN) * SPAN)
        slots = cache.slots(tokens, device)
        masks = {kind: functional.pad(mask, (0, end - mask.shape[-1])) for kind, mask in seen.items()}
        key = (name, end, *(tensor.shape for tensor in (slots, *inputs.values(), *masks.values())))
        known = cache.recorded.get(key, 0)
        if isinstance(known, Recorded):
            return known(slots, inputs, masks)
        expected = compute(inputs, seen)
        cache.recorded[key] = known + 1
        if known + 1 < REPEATS:
            return expected
        try:
            found = Recorded(cache, slots, end, inputs, masks, compute, record)
            check_equal(found(slots, inputs, masks), expected)
            cache.recorded[key] = found
        except (RuntimeError, ValueError) as error:
            self.refused.add(name)
            say(f"{name}: not recorded as a CUDA graph, which makes decoding slower: {first_line(error)}")
        return expected


class Recorded:
    """One pass over buffers of its own."""

    def __init__(
        self, cache: RaggedCache, slots: Tensor, end: int, inputs: Inputs, seen: Inputs, compute: Compute,
        record: Callable[[Replay], Replay],
    ) -> None:  # fmt: skip
        self.slots = slots.clone()
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self.seen = {kind: mask.clone() for kind, mask in seen.items()}

        def run() -> list[Tensor]:
            with cache.writing_at(self.slots, end):
                return compute(self.inputs, self.seen)

        self.replay = record(run)

    def __call__(self, slots: Tensor, inputs: Inputs, seen: Inputs) -> list[Tensor]:
        self.slots.copy_(slots)
        for mine, given in ((self.inputs, inputs), (self.seen, seen)):
            for name, buffer in mine.items():
                buffer.copy_(given[name])
        return [output.clone() for output in self.replay()]


def check_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Raises ValueError where a recorded pass computes something else."""
    for one, other in zip(found, expected, strict=True):
        if not other.numel():
            continue
        tolerance = 1e-3 if other.dtype in (torch.float32, torch.float64) else 0.1
        scale = max(1.0, other.float().nan_to_num().abs().max().item())
        if not torch.allclose(one.float(), other.float(), rtol=0, atol=tolerance * scale, equal_nan=True):
            raise ValueError("a recorded pass differs from the pass as it is")
