"""Medusa-2: the joint loss and its gradients against merged weights W + alpha / rank * B A and a walk over positions."""

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call

from headstart.data.chat import Sample
from headstart.data.features import OriginalFeatures, compute
from headstart.data.packing import collate
from headstart.heads.adapters import new_adapter
from headstart.heads.batch import Batch
from headstart.heads.hub import load_head, save_head
from headstart.heads.medusa import MedusaHead
from headstart.heads.medusa2 import AdaptedMedusa, Together
from headstart.heads.sizes import flops_a_label
from headstart.heads.verifier import Features, Verifier
from headstart.training.muon import Muon
from headstart.training.trainer import make_optimizers, set_learning_rate
from headstart.training.window import Window

Build = Callable[..., Any]
RANK, ALPHA = 3, 6
SPANS = [[(3, 6), (8, 12)], [(4, 7)], [(2, 4)]]


@pytest.fixture(autouse=True)
def old_name() -> None:
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")


@pytest.fixture
def batch(ids_of: Build, batch_of: Build) -> Batch:
    return batch_of([ids_of(seed, length) for seed, length in [(1, 12), (2, 7), (3, 9)]], SPANS)


@pytest.fixture
def make(tiny: Build, tiny_medusa: Build) -> Callable[..., tuple[Verifier, AdaptedMedusa]]:
    """`make(together..., **head)`: a verifier with a random adapter, and a random head that learns with it."""

    def build(heads_only: float = 0.0, own: Any = "kl", weight: float = 0.3, ramp: Any = "constant", dropout: float = 0.0,
              **head: Any) -> tuple[Verifier, AdaptedMedusa]:  # fmt: skip
        verifier = tiny("llama", initializer_range=0.2)
        adapter = verifier.attach(lambda model: new_adapter(model, "llama", RANK, ALPHA, dropout, None))
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for weights in adapter.weights.values():
                weights.copy_(torch.randn(weights.shape, generator=generator) * 0.1)
        together = Together(heads_only, own, weight, ramp, rate=0.25)
        return verifier, AdaptedMedusa(tiny_medusa(verifier, **head), adapter, together)

    return build


def merged_states(base: Any, verifier: Verifier, ids: Tensor) -> Tensor:
    """Final states [B, T, d] of the base model with W + alpha / rank * B A in every adapted layer, as functions of A and B."""
    weights = dict(base.named_parameters())
    for name, up in verifier.adapter.weights.items():
        if ".lora_B." in name:
            down = verifier.adapter.weights[name.replace("lora_B", "lora_A")]
            place = name.partition(".lora_B")[0] + ".weight"
            weights[place] = weights[place] + ALPHA / RANK * up @ down
    out = functional_call(base, weights, kwargs={"input_ids": ids, "output_hidden_states": True, "use_cache": False})
    return out.hidden_states[-1]


def naive_loss(head: AdaptedMedusa, batch: Batch, original: Tensor, last: Tensor, table: Tensor, weight: float) -> Tensor:
    own_terms, head_terms = [], [[] for _ in range(head.config.heads)]
    ids = head.target_ids.tolist()
    for b, length in enumerate(batch.lengths.tolist()):
        for t in range(length):
            if t + 1 < length and batch.mask[b, t + 1]:
                log_q = torch.log_softmax(table @ last[b, t], 0)
                if head.together.own == "ce":
                    own_terms.append(-log_q[batch.ids[b, t + 1]])
                else:
                    p = torch.softmax(table @ original[b, t], 0)
                    own_terms.append((p * (p.log() - log_q)).sum())
            for i in range(head.config.heads):
                label = t + 2 + i
                if label >= length or not batch.mask[b, label]:
                    continue
                soft = head.config.targets == "soft"
                if (int((table @ original[b, label - 1]).argmax()) if soft else int(batch.ids[b, label])) not in ids:
                    continue
                z = last[b, t]
                for block in head.blocks[i]:
                    inner = block.linear.weight @ z + block.linear.bias
                    z = z + inner * torch.sigmoid(inner)
                rows = head.lm_heads[i].weight if head.config.lm_head == "own" else table[ids]
                log_q = torch.log_softmax(rows @ z, 0)
                if not soft:
                    head_terms[i].append(-log_q[ids.index(int(batch.ids[b, label]))])
                    continue
                # the adapted verifier is the teacher, and no gradient goes to a teacher
                p = torch.softmax(table[ids] @ last[b, label - 1], 0).detach()
                overlap = torch.minimum(p, log_q.exp()).sum()
                ce = -(p * log_q).sum()
                kinds = {"ce": ce, "kl": ce + (p * p.log()).sum(), "tv": 1 - overlap, "lk": -overlap.log()}
                head_terms[i].append(kinds[head.config.loss])
    heads = sum(head.config.decay**i * torch.stack(terms).mean() for i, terms in enumerate(head_terms))
    return torch.stack(own_terms).mean() + weight * heads


HALF = torch.arange(0, 96, 2)
PLAIN = [(own, targets, lm_head, {}) for own in ("kl", "ce") for targets in ("hard", "soft") for lm_head in ("own", "shared")]


@pytest.mark.usefixtures("keep_double")
@pytest.mark.parametrize(("own", "targets", "lm_head", "more"), [
    *PLAIN,
    ("kl", "soft", "own", {"loss": "kl", "ramp": "sine"}),
    ("kl", "soft", "shared", {"loss": "tv"}),
    ("ce", "soft", "own", {"loss": "lk"}),
    ("kl", "hard", "own", {"target_ids": HALF}),
    ("ce", "soft", "shared", {"target_ids": HALF, "ramp": "sine"}),
])  # fmt: skip
def test_the_joint_loss_and_its_gradients_are_the_naive_ones(
    own: str, targets: str, lm_head: str, more: dict[str, Any], make: Build, batch: Batch, tiny: Build
) -> None:
    """In the middle of the run, where the sine has brought the weight of the heads to a share of √½."""
    verifier, head = make(own=own, targets=targets, lm_head=lm_head, **more)
    weight = 0.3 * (math.sqrt(0.5) if "ramp" in more else 1.0)
    base = tiny("llama", initializer_range=0.2).model.double().requires_grad_(False)
    verifier.model.double()
    head.double()
    original = base(input_ids=batch.ids, output_hidden_states=True).hidden_states[-1]
    last = merged_states(base, verifier, batch.ids)
    assert (last - original).abs().max() > 0.01
    expected, of_adapter = (naive_loss(head, batch, original, last, base.lm_head.weight, share) for share in (1.0, weight))
    parameters = dict(head.named_parameters())
    gradients = [torch.autograd.grad(loss, list(parameters.values()), retain_graph=True) for loss in (expected, of_adapter)]
    wanted = [its if "lora" in name else own for name, own, its in zip(parameters, *gradients, strict=True)]

    head.begin_step(0.5)
    with verifier.adapter.off():
        choice = torch.where(batch.mask.roll(-1, 1), (original @ base.lm_head.weight.T).argmax(-1), -1)
        features = Features(verifier.features(batch.ids).last, torch.empty(3, 12, 0), choice)
    found = head.loss(batch, features, verifier)
    assert found.total().item() == pytest.approx(expected.item(), abs=1e-6)
    assert found.weights.tolist() == pytest.approx([1.0, 0.8, 0.64, 1.0])
    assert found.counts[-1].item() == sum(end - start for spans in SPANS for start, end in spans)
    found.total().backward()
    for (name, parameter), gradient in zip(head.named_parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=0, atol=1e-6), name
    learned = [gradient for (name, _), gradient in zip(head.named_parameters(), wanted, strict=True) if "lora" in name]
    assert len(learned) == 2 * 7 * 4
    assert max(gradient.abs().max() for gradient in learned) > 1e-3
    assert all(p.grad is None for name, p in verifier.model.named_parameters() if "lora_" not in name)


def test_heads_go_on_learning_when_the_second_stage_begins(make: Build, batch: Batch, features_of: Build, tiny: Build) -> None:
    """With the sine at 0 their gradients are those of Medusa-1 on the adapted states, and the adapter's the verifier's own."""
    verifier, head = make(ramp="sine", dropout=0.0)
    features = features_of(tiny("llama", initializer_range=0.2), batch)
    plain = MedusaHead(head.config)
    plain.load_state_dict(head.own_state())
    plain.loss(batch, dataclasses.replace(features, last=verifier.features(batch.ids).last), verifier).total().backward()
    head.begin_step(head.together.heads_only)
    head.loss(batch, features, verifier).total().backward()
    mine = dict(head.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.allclose(mine[name].grad, parameter.grad, rtol=0, atol=1e-6), name
    whole = {name: weight.grad.clone() for name, weight in verifier.adapter.weights.items()}
    assert max(gradient.abs().max() for gradient in whole.values()) > 1e-3
    head.zero_grad()
    last = verifier.features(batch.ids, learning=True).last
    *_, following = supervised = head.supervised(batch, features)
    own, _ = head.own_loss(batch, features.last, last, following, verifier)
    (own.sum() / following.sum()).backward()
    for name, weight in verifier.adapter.weights.items():
        assert torch.allclose(whole[name], weight.grad, rtol=0, atol=1e-6), name
    assert len(supervised) == head.config.heads + 1


def test_stage_one_is_medusa_1(make: Build, batch: Batch, features_of: Build, tiny: Build) -> None:
    verifier, head = make(heads_only=0.5)
    features = features_of(tiny("llama", initializer_range=0.2), batch)
    plain = MedusaHead(head.config)
    plain.load_state_dict(head.own_state())
    for share, same in ((0.0, True), (0.49, True), (0.5, False)):
        head.begin_step(share)
        ours, theirs = (one.loss(batch, features, verifier).total().item() for one in (head, plain))
        assert (ours == theirs) is same
        assert (
            head.loss(batch, features, verifier).counts.tolist() == head.supervised(batch, features).flatten(1).sum(1).tolist()
        )
    assert all(weight.requires_grad for weight in verifier.adapter.weights.values())
    head.begin_step(0.0)
    assert not any(weight.requires_grad for weight in verifier.adapter.weights.values())
    found = head.loss(batch, features, verifier)
    assert (found.sums[-1].item(), found.counts[-1].item()) == (0, 0)
    found.total().backward()
    assert all(weight.grad is None for weight in verifier.adapter.weights.values())


@pytest.mark.parametrize(
    ("ramp", "shares"), [("constant", {0.2: 0.3, 1.0: 0.3}), ("sine", {0.2: 0.0, 0.6: 0.3 * math.sqrt(0.5), 1.0: 0.3})]
)
def test_the_weight_of_the_heads(ramp: str, shares: dict[float, float], make: Build) -> None:
    _, head = make(heads_only=0.2, ramp=ramp)
    for share, weight in shares.items():
        assert head.together.weight_at(share) == pytest.approx(weight)


def test_dropout_is_for_the_adapter_in_training_alone(make: Build, batch: Batch, features_of: Build, tiny: Build) -> None:
    features = features_of(tiny("llama", initializer_range=0.2), batch)
    verifier, head = make(dropout=0.5)
    assert torch.equal(verifier.features(batch.ids).last, verifier.features(batch.ids).last)
    losses = {head.loss(batch, features, verifier).total().item() for _ in range(4)}
    assert len(losses) == 4
    assert not any(module.training for module in verifier.model.modules())
    verifier, head = make(dropout=0.0)
    assert len({head.loss(batch, features, verifier).total().item() for _ in range(2)}) == 1


def test_the_fingerprint_is_that_of_the_original(make: Build, tiny: Build) -> None:
    verifier, _ = make()
    assert verifier.fingerprint == tiny("llama", initializer_range=0.2).fingerprint


def test_the_work_of_a_label_is_that_of_the_heads(make: Build, batch: Batch, features_of: Build, tiny: Build) -> None:
    """Neither the adapter's weights nor the verifier's own labels are the heads'."""
    verifier, head = make()
    plain = MedusaHead(head.config)
    assert flops_a_label(head) == flops_a_label(plain) == 6 * sum(p.numel() for p in plain.parameters()) / 3
    window, features = Window(0.0), features_of(tiny("llama", initializer_range=0.2), batch)
    for one, terms in ((head, 4), (plain, 3)):
        loss = one.loss(batch, features, verifier)
        assert len(loss.counts) == terms
        window.add([loss], 1.0, 10)
    assert window.labels() == 2 * int(plain.supervised(batch, features).sum())


def test_what_is_saved_is_a_medusa_head_and_a_peft_adapter(make: Build, batch: Batch, tiny: Build, tmp_path: Path) -> None:
    import peft

    verifier, head = make()
    save_head(head, tmp_path / "head")
    saved = load_head(tmp_path / "head")
    assert type(saved) is MedusaHead
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors.keys() == saved.state_dict().keys()
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in tensors.items())
    base = tiny("llama", initializer_range=0.2).model
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "head" / "adapter"))
    with torch.no_grad():
        states = theirs(input_ids=batch.ids, output_hidden_states=True).hidden_states[-1]
    assert torch.allclose(states, verifier.features(batch.ids).last, atol=1e-5)


def test_features_are_those_of_the_verifier_without_its_adapter(make: Build, batch: Batch, tiny: Build) -> None:
    verifier, _ = make()

    class Now:
        def load(self, indices: Any) -> tuple[Batch, Features]:
            return batch, verifier.features(batch.ids)

    _, features = OriginalFeatures(Now(), verifier.adapter).load([0])
    assert torch.equal(features.last, tiny("llama", initializer_range=0.2).features(batch.ids).last)
    assert not torch.equal(features.last, verifier.features(batch.ids).last)
    assert all(weight.requires_grad for weight in verifier.adapter.weights.values())


@pytest.mark.usefixtures("keep_double")
@pytest.mark.parametrize("own", ["kl", "ce"])
def test_packed_samples_teach_what_they_teach_alone(own: str, make: Build, ids_of: Build) -> None:
    """Loss and gradients, the adapter's among them; answers begin and end with their samples."""
    verifier, head = make(own=own)
    verifier.model.double()
    head.double()
    samples = [
        Sample(ids_of(seed, length), [t >= start for t in range(length)])
        for seed, length, start in [(1, 12, 5), (2, 5, 0), (3, 7, 0)]
    ]
    found = []
    for rows in (None, [[0], [1, 2]]):
        batch = collate(samples, torch.device("cpu"), rows)
        with verifier.adapter.off():
            features = compute(verifier, batch, ())
        loss = head.loss(batch, features, verifier)
        found.append((loss, torch.autograd.grad(loss.total(), list(head.parameters()))))
    (alone, gradients), (packed, packed_gradients) = found
    assert packed.counts.tolist() == alone.counts.tolist()
    assert (packed.sums - alone.sums).abs().max() < 1e-6
    for mine, its in zip(packed_gradients, gradients, strict=True):
        assert its.abs().max() > 0
        assert (mine - its).abs().max() < 1e-6 * max(1.0, its.abs().max().item())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_adapter_learns_at_a_rate_of_its_own(optimizer: str, make: Build) -> None:
    """A quarter of the heads' in every step, and by AdamW whatever the heads have."""
    verifier, head = make()
    settings: Any = SimpleNamespace(optimizer=optimizer, learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.95))
    optimizers = make_optimizers(head, settings, rate_of=head.rate_of)
    set_learning_rate(optimizers, 8e-4)
    rates = {id(p): group["lr"] for one in optimizers for group in one.param_groups for p in group["params"]}
    adapter = {id(weight) for weight in verifier.adapter.weights.values()}
    assert len(adapter) == 56
    for parameter in head.parameters():
        assert rates[id(parameter)] == pytest.approx(2e-4 if id(parameter) in adapter else 8e-4)
    assert not any(id(p) in adapter for one in optimizers if isinstance(one, Muon) for p in one.param_groups[0]["params"])
    assert sum(isinstance(one, Muon) for one in optimizers) == (optimizer == "muon")
