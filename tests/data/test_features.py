"""Feature sources against a forward pass of each sample alone."""

import random

import pytest
import torch

from headstart.data.chat import Sample
from headstart.data.features import MemoryFeatures, OnlineFeatures, compute
from headstart.heads.verifier import Features

LENGTHS = [7, 3, 12, 5, 9, 3]
LAYERS = (1, 3)


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    rows = []
    for length in LENGTHS:
        answer = rng.randrange(1, length)
        rows.append(Sample([rng.randrange(96) for _ in range(length)], [i >= answer for i in range(length)]))
    return rows


@pytest.fixture
def verifier(tiny):
    return tiny("llama")


def alone(verifier, sample, layers):
    """States of one sample by the model's own forward pass, and its choice where an answer's token follows."""
    with torch.no_grad():
        out = verifier.model(input_ids=torch.tensor([sample.ids]), output_hidden_states=True)
    states = [out.hidden_states[i][0] for i in layers]
    choice = [
        int(out.logits[0, t].argmax()) if t + 1 < len(sample.ids) and sample.mask[t + 1] else -1 for t in range(len(sample.ids))
    ]
    return out.hidden_states[-1][0], torch.cat(states, -1) if states else torch.zeros(len(sample.ids), 0), choice


def check(verifier, samples, indices, batch, features, layers):
    longest = max(len(samples[i].ids) for i in indices)
    assert (
        batch.ids.shape == batch.mask.shape == features.last.shape[:2] == features.layers.shape[:2] == (len(indices), longest)
    )
    for row, i in enumerate(indices):
        length = len(samples[i].ids)
        last, states, choice = alone(verifier, samples[i], layers)
        assert batch.lengths[row] == length
        assert batch.ids[row, :length].tolist() == samples[i].ids
        assert batch.mask[row].tolist() == samples[i].mask + [False] * (longest - length)
        torch.testing.assert_close(features.last[row, :length], last, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(features.layers[row, :length], states, atol=1e-4, rtol=1e-4)
        assert features.choice[row].tolist() == choice + [-1] * (longest - length)


@pytest.mark.parametrize("layers", [LAYERS, ()], ids=["states", "no states"])
@pytest.mark.parametrize("kind", ["online", "memory"])
def test_case_41_features_belong_to_their_samples_in_any_order(kind, layers, verifier, texts):
    source = (
        OnlineFeatures(verifier, texts, layers)
        if kind == "online"
        else MemoryFeatures(verifier, texts, layers, batch_tokens=24)
    )
    for indices in ([0, 1, 2], [2, 0, 1], [5], [4, 3], [3, 4], [1, 5], [0, 1, 2]):
        check(verifier, texts, indices, *source.load(indices), layers)


def test_memory_runs_the_verifier_once(verifier, texts, monkeypatch):
    read = []
    features = verifier.features
    monkeypatch.setattr(verifier, "features", lambda ids, *more: read.append(ids.shape) or features(ids, *more))
    told = []
    source = MemoryFeatures(verifier, texts, LAYERS, 24, on_tokens=told.append)
    assert sum(told) == sum(LENGTHS)
    assert all(rows * longest <= 24 for rows, longest in read)
    seen = len(read)
    source.load([0, 1])
    source.load([2])
    assert len(read) == seen


def test_known_features_are_taken_as_they_are(verifier, texts):
    """Only the others are computed; what is known is served unchanged."""
    made_up = Features(torch.full((12, 32), 7.0), torch.full((12, 64), 8.0), torch.arange(12))
    known = [None, None, made_up, None, None, None]
    told = []
    source = MemoryFeatures(verifier, texts, LAYERS, 24, known, told.append)
    assert sum(told) == sum(LENGTHS) - 12
    _, features = source.load([1, 2])
    assert features.last[1].equal(made_up.last)
    assert features.layers[1].equal(made_up.layers)
    assert features.choice[1].equal(made_up.choice)
    last, _, choice = alone(verifier, texts[1], LAYERS)
    torch.testing.assert_close(features.last[0, :3], last, atol=1e-5, rtol=1e-4)
    assert features.choice[0].tolist() == choice + [-1] * 9

    everything = MemoryFeatures(verifier, texts[2:3], LAYERS, 24, [made_up], told.append)
    assert everything.load([0])[1].last[0].equal(made_up.last)
    assert sum(told) == sum(LENGTHS) - 12


def test_stored_states_hold_no_batch_alive(verifier, texts):
    source = MemoryFeatures(verifier, texts, LAYERS, 1000)
    for kept, length in zip(source.kept, LENGTHS, strict=True):
        assert kept.last.untyped_storage().nbytes() == length * 32 * 4
        assert kept.layers.untyped_storage().nbytes() == length * 64 * 4


def test_a_batch_without_answers_has_no_choice(verifier):
    samples = [Sample([4, 5, 6], [False] * 3)]
    batch, features = OnlineFeatures(verifier, samples, ()).load([0])
    assert features.choice.tolist() == [[-1, -1, -1]]
    assert compute(verifier, batch, ()).choice.equal(features.choice)


@pytest.mark.parametrize("kind", ["online", "memory"])
def test_packed_features_are_those_of_the_samples_alone(kind, verifier, texts):
    """Rows of twelve tokens: the samples 7 3, then 12, then 5, then 9 3."""
    source = (
        OnlineFeatures(verifier, texts, LAYERS, row_tokens=12)
        if kind == "online"
        else MemoryFeatures(verifier, texts, LAYERS, batch_tokens=24, row_tokens=12)
    )
    batch, features = source.load(range(6))
    assert batch.lengths.tolist() == [10, 12, 5, 12]
    for i, (row, start) in enumerate([(0, 0), (0, 7), (1, 0), (2, 0), (3, 0), (3, 9)]):
        here = slice(start, start + LENGTHS[i])
        last, states, choice = alone(verifier, texts[i], LAYERS)
        assert batch.ids[row, here].tolist() == texts[i].ids
        assert batch.mask[row, here].tolist() == texts[i].mask
        assert batch.positions[row, here].tolist() == list(range(LENGTHS[i]))
        torch.testing.assert_close(features.last[row, here], last, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(features.layers[row, here], states, atol=1e-4, rtol=1e-4)
        assert features.choice[row, here].tolist() == choice
