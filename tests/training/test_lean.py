"""Gradient checkpointing and torch.compile: the same losses and gradients, less memory, few graphs."""

import pytest
import torch
from torch._dynamo.utils import counters

from headstart.training.compiling import compile_layers

HEADS = ["medusa", "eagle3", "eagle1", "mtp parallel", "mtp sequential", "mtp recursive"]


@pytest.fixture(params=HEADS)
def new_head(request, tiny):
    name, _, form = request.param.partition(" ")
    build = request.getfixturevalue(f"tiny_{name}")
    verifier = tiny("llama")
    return (lambda: build(verifier, **({"form": form} if form else {}))), verifier


def batch(batch_of, ids_of, lengths):
    return batch_of([ids_of(length, length) for length in lengths], [[(2, length)] for length in lengths])


def gradients(head, verifier, batch, features):
    """loss, gradients, and how many numbers the graph keeps for its backward pass."""
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    head.train()
    head.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = head.loss(batch, features, verifier).total()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in head.named_parameters()}, sum(saved.values())


def test_recomputed_layers_have_the_same_gradients_and_keep_less(new_head, batch_of, ids_of, features_of):
    build, verifier = new_head
    found = []
    for recompute in (False, True):
        head = build()
        head.recompute = recompute
        rows = batch(batch_of, ids_of, [60, 41, 50])
        found.append(gradients(head, verifier, rows, features_of(verifier, rows, head.needs)))
    (loss, plain, kept), (again, recomputed, less) = found
    assert again == loss
    assert all(recomputed[name].equal(gradient) for name, gradient in plain.items())
    assert less < 0.8 * kept


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by dynamo, of the rows it is given
def test_case_51_compiled_layers_have_few_graphs_and_the_same_loss(new_head, batch_of, ids_of, features_of):
    """Twelve batches of other sizes, one sample and one row among them."""
    build, verifier = new_head
    plain, compiled = build(), build()
    torch._dynamo.reset()
    counters.clear()
    compile_layers(compiled, backend="eager")
    for size in range(12):
        rows = batch(batch_of, ids_of, [6 + 3 * size, 9, 7][: 1 + size % 3])
        features = features_of(verifier, rows, plain.needs)
        loss, expected, _ = gradients(plain, verifier, rows, features)
        told, found, _ = gradients(compiled, verifier, rows, features)
        assert told == pytest.approx(loss, rel=1e-6)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5)
    assert 1 <= counters["stats"]["unique_graphs"] <= 2
    assert plain.state_dict().keys() == compiled.state_dict().keys()
