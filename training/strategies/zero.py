"""DeepSpeed's ZeRO: moments (stage 1), gradients (2) and weights (3) of the head divided among the processes.

DeepSpeed's configuration comes from a file; what the training loop decides (micro-batches, clipping, precision) comes from it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import UserError
from ...heads.base import DraftHead
from ...heads.batch import Batch
from ...heads.losses import HeadLoss
from ...heads.verifier import Features, Verifier
from ...ranks import rank, world
from .base import Moments, Strategy, check_finite, copy_of, make_equal

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, the one optimizer here


class LossModule(nn.Module):
    """A head whose forward pass is its loss: DeepSpeed knows modules and tensors only."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, batch: Batch, features: Features, verifier: Verifier, zero: Tensor | None) -> tuple[Tensor, ...]:
        """zero: a 0.0 that asks for a gradient. ZeRO-3 takes the weights away once the gradients of a module's inputs are
        there, so there must be one, and it must be the last that the backward pass comes to."""
        if zero is not None:
            features = replace(features, last=features.last + zero, layers=features.layers + zero)
        loss = self.head.loss(batch, features, verifier)
        self.names = list(loss.parts)
        return (loss.sums, loss.counts, loss.correct, loss.weights, *loss.parts.values())


class Zero(Strategy):
    def __init__(self, config: dict[str, Any], accumulation: int, clip: float) -> None:
        """config: as DeepSpeed reads it, with zero_optimization.stage."""
        self.stage = int(config["zero_optimization"]["stage"])
        self.config = config | {
            "train_micro_batch_size_per_gpu": 1,  # it counts samples with it, no more
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clip,
        }

    def start(self, head: DraftHead, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
        try:
            import deepspeed
        except ImportError:
            raise UserError("training.strategy: deepspeed is not installed; pip install 'headstart[deepspeed]'") from None
        make_equal(head)
        self.head, self.device = head, next(head.parameters()).device
        if self.device.type == "cpu":  # it would compile an extension, for sums within one machine
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        module = LossModule(head)
        if self.stage == 3:  # the loss reads weights of inner modules: all are there or none
            deepspeed.utils.set_z3_leaf_modules(module, [LossModule])
        (optimizer,) = optimizers()
        self.module = module
        self.engine, self.zero, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=self.config)
        self.optimizers = [self.zero]

    def loss(self, batch: Batch, features: Features, verifier: Verifier) -> HeadLoss:
        zero = features.last.new_zeros(()).requires_grad_() if self.stage == 3 else None
        sums, counts, correct, weights, *parts = self.engine(batch, features, verifier, zero)
        return HeadLoss(sums, counts, correct, weights, dict(zip(self.module.names, parts, strict=True)))

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * world(), scale_wrt_gas=False)  # it takes means over processes; the loss is to be summed
        if not last:
            self.engine.step()  # counts the micro-batch

    def step(self, clip: float, number: int) -> float:
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        check_finite(norm, number)
        return norm

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        state = self.head.state_dict()
        return state | {name: safe_get_full_fp32_param(p) for name, p in self.parameters().items()}

    def flats(self) -> list[Tensor]:
        """The flat shares of weights that the optimizer steps."""
        return self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups

    def moments(self) -> Moments:
        from deepspeed.utils import safe_get_full_optimizer_state

        states = self.zero.optimizer.state
        if not states:
            return {}
        count = states[self.flats()[0]]["step"]
        return {
            name: {"step": count.clone()} | {key: safe_get_full_optimizer_state(p, key) for key in MOMENTS}
            for name, p in self.parameters().items()
        }

    def restore(self, moments: Moments) -> None:
        if not moments:
            return
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        count = next(iter(moments.values()))["step"]
        for flat in self.flats():
            self.zero.optimizer.state[flat] = {"step": count.to(flat.device, copy=True)} | {
                key: torch.zeros_like(flat) for key in MOMENTS
            }
        if self.stage < 3:
            self.zero._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.parameters().items():
            for key in MOMENTS:
                value = moments[name][key].to(self.device)
                if self.stage < 3:
                    safe_set_full_optimizer_state(parameter, value, key)
                else:
                    safe_set_local_optimizer_state(parameter, local_share(value, parameter), key)

    def whole(self) -> DraftHead:
        if self.stage < 3:
            return self.head.eval()
        return copy_of(self.head, self.weights(), self.device)


def local_share(value: Tensor, parameter: Any) -> Tensor:
    """This process's part of a whole parameter's values, in ZeRO-3's division, padded with zeros."""
    from deepspeed.utils import safe_get_local_fp32_param

    size = safe_get_local_fp32_param(parameter).numel()
    padded = torch.zeros(size * world(), dtype=value.dtype, device=value.device)
    padded[: value.numel()] = value.flatten()
    return padded[rank() * size : (rank() + 1) * size]
