"""Linear layers of a frozen model with their weights laid out once for oneDNN (float32 on CPUs).

The default product lays the weights out anew in every call, which costs a pass of five to fifty tokens, the size of a draft
tree, three times what the product itself does.
"""

import torch
from torch import Tensor, nn


class PackedLinear(nn.Linear):
    """`weight` stays as it was, for whoever reads it and for gradients to x, which the packed product has none of."""

    packed: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:  # a head learns through the verifier's lm_head
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_linears(model: nn.Module) -> None:
    """Turn every float32 nn.Linear on a CPU into a PackedLinear, in place. The weights must not change afterwards."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach())
            module.__class__ = PackedLinear
            module.packed = packed
