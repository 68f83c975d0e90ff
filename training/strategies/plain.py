"""One process with a head, or several with a whole head each, whose gradients are summed once a step."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from ...heads.base import DraftHead
from ...heads.batch import Batch
from ...heads.losses import HeadLoss
from ...heads.verifier import Features, Verifier
from ...ranks import world
from .base import Moments, Strategy, check_finite, make_equal

BUCKET = 2**25  # numbers summed over the processes at a time


class Plain(Strategy):
    """`single` and `ddp`: gradients are summed after the last backward pass, so that processes with unlike shares cannot
    wait for each other in the middle of one."""

    def start(self, head: DraftHead, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        make_equal(head)
        self.head, self.optimizers = head, optimizers()

    def loss(self, batch: Batch, features: Features, verifier: Verifier) -> HeadLoss:
        return self.head.loss(batch, features, verifier)

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def sum_gradients(self) -> None:
        if world() > 1:
            for bucket in buckets(list(self.parameters().values())):
                gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                distributed.all_reduce(flat)
                for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                    parameter.grad = part.view_as(parameter)

    def step(self, clip: float, number: int) -> float:
        self.sum_gradients()
        norm = self.clip(clip)
        check_finite(norm, number)
        for optimizer in self.optimizers:
            optimizer.step()
        self.head.zero_grad(set_to_none=True)
        return norm

    def clip(self, clip: float) -> float:
        return nn.utils.clip_grad_norm_(self.parameters().values(), clip).item()

    def weights(self) -> dict[str, Tensor]:
        return self.head.state_dict()

    def moments(self) -> Moments:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters().items()}
        return {names[p]: dict(state) for optimizer in self.optimizers for p, state in optimizer.state.items()}

    def restore(self, moments: Moments) -> None:
        names = {parameter: name for name, parameter in self.parameters().items()}
        for optimizer in self.optimizers:
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            state = {i: self.placed(moments[names[p]], p) for i, p in enumerate(mine) if names[p] in moments}
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def placed(self, state: dict[str, Tensor], parameter: nn.Parameter) -> dict[str, Tensor]:
        """The moments of a whole parameter as its optimizer holds them: of its own, to write to."""
        return {key: value.clone() for key, value in state.items()}

    def whole(self) -> DraftHead:
        return self.head.eval()


def buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one precision together, up to BUCKET numbers."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        full = sum(p.numel() for p in bucket) + parameter.numel() > BUCKET
        if bucket and (full or bucket[0].dtype != parameter.dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket
