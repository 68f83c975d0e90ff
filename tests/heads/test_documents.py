"""Several samples in one row: states, losses and gradients are those that each sample has alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_rotary import ExactRotary

from headstart.data.chat import Sample
from headstart.data.packing import collate
from headstart.heads.base import DraftHead
from headstart.heads.batch import Batch
from headstart.heads.cache import within_documents
from headstart.heads.losses import HeadLoss
from headstart.heads.verifier import Features, Verifier

Build = Callable[..., Any]
FAMILIES = ["llama", "llama3rope", "qwen2", "qwen2_hybrid", "qwen3", "gpt2", "gemma2", "gemma3", "mistral", "granite",
            "cohere", "cohere2", "olmo2", "olmo3", "phi", "phi3", "stablelm", "gpt_neox", "mixtral", "qwen3_moe", "gpt_oss",
            "deepseek_v3"]  # fmt: skip
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("tiny_medusa", {}),
    "medusa_soft": ("tiny_medusa", {"targets": "soft", "lm_head": "shared"}),
    "eagle1": ("tiny_eagle1", {}),
    "hass": ("tiny_eagle1", {"depth": 3, "top_tokens": 10}),
    "eagle3": ("tiny_eagle3", {}),
    "parallel": ("tiny_mtp", {"form": "parallel"}),
    "sequential": ("tiny_mtp", {"form": "sequential"}),
    "recursive": ("tiny_mtp", {"form": "recursive"}),
}
# answers that begin with a document and that end with one: a shift across the border would find a label
LENGTHS = [9, 4, 5, 13, 8, 7]
ANSWERS = [(4, 9), (0, 4), (0, 5), (6, 13), (1, 8), (0, 7)]
ROWS = [[0, 1, 2], [3], [4, 5]]  # a row of three documents, one of one with padding, one of two


@pytest.fixture
def samples(ids_of: Build) -> list[Sample]:
    return [
        Sample(ids_of(60 + i, length), [start <= t < end for t in range(length)])
        for i, (length, (start, end)) in enumerate(zip(LENGTHS, ANSWERS, strict=True))
    ]


def read(verifier: Verifier, batch: Batch, layers: tuple[int, ...]) -> Features:
    """Features with the verifier's choice at every position, as training reads them."""
    features = verifier.features(batch.ids, layers, batch.positions)
    choice = torch.where(batch.ahead(batch.mask, 1, False), verifier.logits(features.last).argmax(-1), -1)
    return Features(features.last, features.layers, choice)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_verifier_reads_each_document_alone(family: str, tiny: Build, samples: list[Sample]) -> None:
    """Windows of six are shorter than the documents, positions begin anew, and nothing is seen of the document before."""
    verifier = tiny(family)
    packed = collate(samples, torch.device("cpu"), ROWS)
    features = verifier.features(packed.ids, (1, 3), packed.positions)
    for row, its in enumerate(ROWS):
        start = 0
        for i in its:
            with torch.no_grad():
                own = verifier.model(input_ids=torch.tensor([samples[i].ids]), output_hidden_states=True, use_cache=False)
            here = slice(start, start + LENGTHS[i])
            layers = torch.cat([own.hidden_states[1], own.hidden_states[3]], -1)[0]
            scale = max(1.0, layers.abs().max().item())
            assert (features.last[row, here] - own.hidden_states[-1][0]).abs().max() < 1e-5 * scale
            assert (features.layers[row, here] - layers).abs().max() < 1e-5 * scale
            start += LENGTHS[i]
    assert torch.isfinite(features.last).all()


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_who_sees_whom_by_hand(window: int | None) -> None:
    """Documents of 4 and 2 tokens and two of padding."""
    positions, documents = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 0]]), [0, 0, 0, 0, 1, 1, 2, 3]
    seen = within_documents(positions, window)
    assert seen.shape == (1, 8, 8)
    for t in range(8):
        for u in range(8):
            near = window is None or t - u < window
            assert bool(seen[0, t, u]) == (u <= t and documents[t] == documents[u] and near), (t, u)


def losses(head: DraftHead, verifier: Verifier, batch: Batch) -> tuple[HeadLoss, list[torch.Tensor]]:
    loss = head.loss(batch, read(verifier, batch, head.needs), verifier)
    return loss, list(torch.autograd.grad(loss.total(), list(head.parameters())))


def check(head: DraftHead, verifier: Verifier, samples: list[Sample], tolerance: float) -> None:
    alone, gradients = losses(head, verifier, collate(samples, torch.device("cpu")))
    packed, packed_gradients = losses(head, verifier, collate(samples, torch.device("cpu"), ROWS))
    assert alone.counts.min() > 0
    assert packed.counts.tolist() == alone.counts.tolist()
    assert packed.correct.tolist() == alone.correct.tolist()
    scale = alone.sums.abs().max().clamp(min=1.0)
    assert (packed.sums - alone.sums).abs().max() < tolerance * scale
    assert (packed.total() - alone.total()).abs() < tolerance * alone.total().abs().clamp(min=1.0)
    for (name, _), mine, its in zip(head.named_parameters(), packed_gradients, gradients, strict=True):
        assert its.abs().max() > 0, name
        assert (mine - its).abs().max() < tolerance * max(1.0, its.abs().max().item()), name


@pytest.mark.usefixtures("keep_double")
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral", "granite"])
def test_in_float64_losses_and_gradients_are_those_of_samples_alone(
    family: str, kind: str, tiny: Build, samples: list[Sample], request: pytest.FixtureRequest
) -> None:
    verifier = tiny(family)
    verifier.model.double()
    fixture, fields = HEADS[kind]
    head = request.getfixturevalue(fixture)(verifier, **fields).double()
    head.rotary = ExactRotary(verifier.facts.head_dim)
    check(head, verifier, samples, 1e-6)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("family", ["llama3rope", "qwen2_hybrid", "qwen3", "gemma2", "stablelm"])
def test_in_float32_losses_and_gradients_are_those_of_samples_alone(
    family: str, kind: str, tiny: Build, samples: list[Sample], request: pytest.FixtureRequest
) -> None:
    verifier = tiny(family)
    fixture, fields = HEADS[kind]
    check(request.getfixturevalue(fixture)(verifier, **fields), verifier, samples, 1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_nothing_of_another_document_reaches_a_loss(
    kind: str, tiny: Build, samples: list[Sample], request: pytest.FixtureRequest
) -> None:
    """Other tokens in the second document of three change nothing in a loss over the first and the third."""
    verifier = tiny("mistral")
    fixture, fields = HEADS[kind]
    head = request.getfixturevalue(fixture)(verifier, **fields)
    found = []
    for shift in (0, 7):
        middle = Sample([(token + shift) % 94 + 1 for token in samples[1].ids], [False] * 4)
        batch = collate([samples[0], middle, samples[2]], torch.device("cpu"), [[0, 1, 2]])
        found.append(head.loss(batch, read(verifier, batch, head.needs), verifier))
    assert torch.equal(found[0].counts, found[1].counts)
    assert found[0].counts.min() > 0
    assert torch.equal(found[0].sums, found[1].sums)


def test_noise_by_length_is_that_of_the_document(tiny: Build, tiny_eagle1: Build, samples: list[Sample]) -> None:
    verifier = tiny("llama")
    batch = collate(samples, torch.device("cpu"), ROWS)
    features = read(verifier, batch, ())
    noise = (tiny_eagle1(verifier, noise=1.0, noise_by_length=True).noisy(batch, features).last - features.last).abs()
    for row, start, length in ((0, 0, 9), (0, 9, 4), (0, 13, 5), (1, 0, 13), (2, 0, 8), (2, 8, 7)):
        assert 0.9 < noise[row, start : start + length].max().item() * length / 512 <= 1.0001
