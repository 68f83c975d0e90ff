"""What the training loop asks of a strategy. Methods marked collective are called by all processes together.

A loss is a share of the optimizer step's: sums over a few samples, divided by the supervised tokens of the whole step. Shares
add up over micro-batches and processes, and every strategy comes to the same gradient.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from ...errors import UserError
from ...heads.base import DraftHead, build_head
from ...heads.batch import Batch
from ...heads.losses import HeadLoss
from ...heads.verifier import Features, Verifier
from ...ranks import is_first, world

Moments = dict[str, dict[str, Tensor]]  # by parameter name and, within, by the optimizer's own name for it


class Strategy(ABC):
    """Weights, gradients and moments of a head, wherever they lie."""

    head: DraftHead
    optimizers: Sequence[Optimizer]

    @abstractmethod
    def start(self, head: DraftHead, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        """Take over a whole head, the same on all processes; make its optimizers once its weights lie where they shall be."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizers hold, by name."""
        return {name: p for name, p in self.head.named_parameters() if p.requires_grad}

    @abstractmethod
    def loss(self, batch: Batch, features: Features, verifier: Verifier) -> HeadLoss:
        """The head's loss on a micro-batch (collective)."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a share of the step's loss (collective). last: no other micro-batch follows."""

    @abstractmethod
    def step(self, clip: float, number: int) -> float:
        """Sum the gradients of all processes, clip, update the weights, forget the gradients (collective).

        Returns the gradient's norm before clipping; raises UserError where it is not finite. number: of the step, from 1.
        """

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The whole head's state_dict (collective)."""

    @abstractmethod
    def moments(self) -> Moments:
        """The optimizers' state of whole parameters (collective)."""

    @abstractmethod
    def restore(self, moments: Moments) -> None:
        """Go on with moments that some strategy has told (collective)."""

    @abstractmethod
    def whole(self) -> DraftHead:
        """The head as one process decodes with it, in eval mode (collective; of use on the first process)."""


def copy_of(head: DraftHead, weights: dict[str, Tensor], device: torch.device) -> DraftHead:
    """A plain head with these weights; without them on all processes but the first, which alone decodes."""
    plain = build_head(head.config.model_dump())
    if is_first():
        plain.load_state_dict(weights)
        plain.to(device)
    return plain.eval()


def make_equal(head: DraftHead) -> None:
    """Give every process the first one's weights."""
    if world() > 1:
        for tensor in head.state_dict().values():
            distributed.broadcast(tensor, src=0)


def check_finite(norm: float, number: int) -> None:
    if not math.isfinite(norm):
        raise UserError(f"step {number}: the gradient is {norm}; lower training.learning_rate or look at the data")
