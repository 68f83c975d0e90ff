"""FSDP2: a verifier sharded by layer, and a head sharded as a whole.

The verifier's embeddings, last norm and lm_head stay whole on every process: heads read them at any moment.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ...heads.base import DraftHead
from ...heads.verifier import Verifier
from ...ranks import is_first, share, world
from ..stopping import Preempted, Stop
from .base import Moments, copy_of, make_equal
from .plain import Plain


def shard_verifier(verifier: Verifier, mesh: DeviceMesh) -> None:
    """Leave a share of every decoder layer on this process's device; a layer is whole only while it runs."""
    inside = {p for layer in verifier.layers for p in layer.parameters()}
    for layer in verifier.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    outside = set(verifier.decoder.parameters()) - inside - {p for layer in verifier.layers for p in layer.parameters()}
    fully_shard(verifier.decoder, mesh=mesh, ignored_params=outside)  # no weights: it lets a layer come while the last one runs
    verifier.model.to(mesh.device_type)
    verifier.sharded = True


@contextmanager
def leading(verifier: Verifier, stop: Stop | None = None, judge: Verifier | None = None) -> Iterator[bool]:
    """The first process alone works with the verifier in the block; yields whether this is it (collective).

    The others wait, and lend their shares of a sharded verifier, a pass of theirs for each of the first one's. A wish to stop
    ends the block before the next pass of it, or of the whole verifier `judge` that judges in another precision.
    """
    if not is_first():
        while share(None):
            verifier.features(torch.zeros(1, 1, dtype=torch.long, device=verifier.device))
        yield False
        return

    def before(*_: object) -> None:
        if stop is not None and stop.requested:
            raise Preempted
        if verifier.sharded:
            share(True)

    decoders = {verifier.decoder, (judge or verifier).decoder}
    handles = [decoder.register_forward_pre_hook(before, prepend=True) for decoder in decoders]
    try:
        yield True
    except Preempted:
        pass
    finally:
        for handle in handles:
            handle.remove()
    share(False)


class ShardedHead(Plain):
    """`fsdp` with its head sharded too: weights, gradients and moments are whole on no process."""

    def start(self, head: DraftHead, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        make_equal(head)
        self.device = next(head.parameters()).device
        fully_shard(head, mesh=init_device_mesh(self.device.type, (world(),)), reshard_after_forward=False)
        register_fsdp_forward_method(head, "loss")
        head.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # sums, not means: the loss is normalised
        head.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        self.head, self.optimizers = head, optimizers()

    def sum_gradients(self) -> None:
        """FSDP has done it in the backward pass."""

    def clip(self, clip: float) -> float:
        return whole_tensor(nn.utils.clip_grad_norm_(self.parameters().values(), clip)).item()

    def weights(self) -> dict[str, Tensor]:
        return {name: whole_tensor(tensor) for name, tensor in self.head.state_dict().items()}

    def moments(self) -> Moments:
        return {name: {key: whole_tensor(value) for key, value in state.items()} for name, state in super().moments().items()}

    def placed(self, state: dict[str, Tensor], parameter: nn.Parameter) -> dict[str, Tensor]:
        assert isinstance(parameter, DTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        return {
            key: distribute_tensor(value.to(self.device), mesh, placements) if value.dim() else value.clone()
            for key, value in state.items()
        }

    def whole(self) -> DraftHead:
        return copy_of(self.head, self.weights(), self.device)


def whole_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
