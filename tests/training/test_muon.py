"""Muon against torch's own, against exact singular values, and on a problem with a known answer."""

import copy

import pytest
import torch
from torch import nn

from headstart.training.muon import Muon, orthogonal


def matrix(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(12, 12), (8, 24), (24, 8), (1, 5)])
def test_singular_vectors_stay_and_singular_values_come_near_one(shape):
    g = matrix(*shape)
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    inner = u.T @ orthogonal(g) @ vh.T
    assert (inner - torch.diag(inner.diagonal())).abs().max() < 1e-5
    assert 0.65 < inner.diagonal().min() <= inner.diagonal().max() < 1.25


def test_no_gradient_is_no_update():
    assert orthogonal(torch.zeros(3, 4)).equal(torch.zeros(3, 4))


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_it_is_torchs_muon_up_to_bfloat16(shape):
    mine, theirs = nn.Parameter(matrix(*shape)), nn.Parameter(matrix(*shape))
    own = Muon([mine], lr=1e-2, weight_decay=0.1, dtype=torch.bfloat16)
    peer = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    start = mine.detach().clone()
    for number in range(5):
        mine.grad = matrix(*shape, seed=number + 1)
        theirs.grad = mine.grad.clone()
        own.step()
        peer.step()
    assert (mine - theirs).abs().max() < 0.05 * (mine - start).abs().max()


def test_a_parameter_without_gradient_is_left_alone():
    parameter = nn.Parameter(matrix(3, 3))
    before = parameter.detach().clone()
    Muon([parameter], lr=1.0, weight_decay=0.1).step()
    assert parameter.equal(before)


def test_the_state_goes_through_a_checkpoint():
    one, other = nn.Parameter(matrix(4, 6)), nn.Parameter(matrix(4, 6))
    first, second = Muon([one], lr=0.1), Muon([other], lr=0.1)
    one.grad = matrix(4, 6, seed=1)
    first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    other.data.copy_(one.data)
    for parameter, optimizer in ((one, first), (other, second)):
        parameter.grad = matrix(4, 6, seed=2)
        optimizer.step()
    assert one.equal(other)
