"""Packed linear layers say what plain ones say."""

import pytest
import torch
from torch import nn

from headstart.heads.packed import PackedLinear, pack_linears


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 24), (2, 5, 24), (3, 70, 24), (24,)])
def test_a_packed_layer_is_the_layer(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias)
    x = torch.randn(shape)
    with torch.no_grad():
        expected = layer(x)
        pack_linears(layer)
        assert (layer(x) - expected).abs().max() < 1e-5


def test_gradients_go_through_a_packed_layer() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=False).requires_grad_(False)
    pack_linears(layer)
    x = torch.randn(3, 24, requires_grad=True)
    layer(x).square().sum().backward()
    assert (x.grad - 2 * (x.detach() @ layer.weight.T) @ layer.weight).abs().max() < 1e-4


def test_only_plain_float32_layers_are_packed() -> None:
    class Own(nn.Linear):
        pass

    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8).bfloat16(), Own(8, 8), nn.Embedding(8, 8)])
    names = set(model.state_dict())
    pack_linears(model)
    assert [type(module) for module in model] == [PackedLinear, nn.Linear, Own, nn.Embedding]
    assert set(model.state_dict()) == names
