"""Processed distributions against a plain-Python reading of their definitions; dice and draws against their laws."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.errors import UserError
from headstart.evaluation.enumeration import every_outcome
from headstart.evaluation.goodness import p_value
from headstart.evaluation.sampling import Sampling, dice, draft_probabilities, draw_children, probabilities, remaining


def by_definition(
    logits: list[float], present: set[int], temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0,
    min_p: float = 0.0, repetition_penalty: float = 1.0,
) -> list[float]:  # fmt: skip
    """Penalty, temperature, top-k, top-p, min-p, one after the other, each renormalised."""
    x = [(v / repetition_penalty if v > 0 else v * repetition_penalty) if i in present else v for i, v in enumerate(logits)]
    weights = [math.exp((v - max(x)) / temperature) for v in x]
    order = sorted(range(len(x)), key=lambda i: (-weights[i], i))

    def keep(kept: list[int]) -> list[float]:
        total = sum(weights[i] for i in kept)
        return [weights[i] / total if i in kept else 0.0 for i in range(len(x))]

    kept = order if top_k is None else order[:top_k]
    if top_p < 1:
        p, nucleus = keep(kept), []
        for i in kept:
            nucleus.append(i)
            if sum(p[j] for j in nucleus) >= top_p:
                break
        kept = nucleus
    p = keep(kept)
    return keep([i for i in kept if p[i] >= min_p * max(p)])


FIELDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 1e-320},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 0.9, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1.7},
    {"temperature": 0.7, "repetition_penalty": 0.6},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.8, "min_p": 0.15, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_the_processed_distribution(fields: dict[str, Any]) -> None:
    rng = random.Random(str(fields))
    rows = [[rng.gauss(0, 2) for _ in range(9)] for _ in range(12)]
    present = [set(rng.sample(range(9), rng.randrange(6))) for _ in rows]
    masks = torch.tensor([[i in row for i in range(9)] for row in present])
    given = None if fields.get("repetition_penalty", 1.0) == 1 else masks
    found = probabilities(torch.tensor(rows, dtype=torch.float64), Sampling(**fields), given)
    expected = [by_definition(row, there, **fields) for row, there in zip(rows, present, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-14, rtol=0)


def test_the_processed_distribution_is_that_of_transformers() -> None:
    """A user who samples with transformers' generate gets the same distribution from the same numbers."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 50, generator=generator, dtype=torch.float64) * 3
    ids = torch.randint(50, (16, 12), generator=generator)
    steps = [
        RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.8), TopKLogitsWarper(20), TopPLogitsWarper(0.85),
        MinPLogitsWarper(0.05),
    ]  # fmt: skip
    scores = logits
    for step in steps:
        scores = step(ids, scores)
    sampling = Sampling(0.8, top_k=20, top_p=0.85, min_p=0.05, repetition_penalty=1.3)
    present = torch.zeros(16, 50, dtype=torch.bool).scatter(1, ids, True)
    found = probabilities(logits, sampling, present)
    torch.testing.assert_close(found, scores.softmax(-1), atol=1e-14, rtol=0)
    assert 2 < (found > 0).sum(1).double().mean() < 18


def test_at_temperature_0_all_is_on_the_likeliest_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [-1.0, -3.0, -2.0]])
    assert probabilities(logits, Sampling()).tolist() == [[0, 1, 0], [1, 0, 0]]
    penalty = Sampling(repetition_penalty=2.0)
    assert probabilities(logits, penalty, torch.tensor([[False, True, False], [True, False, False]])).tolist() == [
        [0, 0, 1],  # 3 / 2 < 2
        [1, 0, 0],  # -1 * 2 = -2, the first of two equal ones
    ]


@pytest.mark.parametrize(
    ("fields", "applied", "lossless"),
    [
        ({}, "greedy", True),
        ({"rule": "typical"}, "greedy", True),
        ({"temperature": 1.0}, "candidates", True),
        ({"temperature": 0.1, "rule": "without_replacement"}, "without_replacement", True),
        ({"temperature": 1.0, "rule": "typical"}, "typical", False),
    ],
)
def test_which_rule_applies_and_what_it_promises(fields: dict[str, Any], applied: str, lossless: bool) -> None:
    sampling = Sampling(**fields)
    assert (sampling.applied, sampling.lossless) == (applied, lossless)


def test_typical_acceptance_refuses_a_repetition_penalty() -> None:
    with pytest.raises(UserError, match=r"^rule typical: it cannot take a repetition_penalty"):
        Sampling(1.0, "typical", repetition_penalty=1.2)


def test_dice_follow_weights_of_any_total() -> None:
    weights = torch.tensor([3.0, 0.0, 1.0, 2.0, 0.0], dtype=torch.float64).expand(60_000, -1)
    counts = dice(0)(weights).bincount(minlength=5)
    assert counts[[1, 4]].tolist() == [0, 0]
    expected = torch.tensor([30_000, 10_000, 20_000])
    statistic = ((counts[[0, 2, 3]] - expected) ** 2 / expected).sum().item()
    assert statistic < 13.8  # two degrees of freedom: one seed in a thousand


def test_dice_of_one_seed_fall_alike_and_rows_fall_by_themselves() -> None:
    weights = torch.ones(2, 5000, 2, dtype=torch.float64)
    throws = dice(3)(weights)
    assert torch.equal(throws, dice(3)(weights))
    assert not torch.equal(throws, dice(4)(weights))
    assert abs((throws[0] == throws[1]).double().mean().item() - 0.5) < 0.03


def test_what_remains_of_q() -> None:
    q = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    assert remaining(q, torch.tensor([[True, False, False, False]])).tolist() == [[0, 0.5, 0.5, 0]]
    assert remaining(q, torch.tensor([[True, True, True, False]])).tolist() == [[0, 0, 0, 1]]
    one = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    third = 1 / 3
    assert remaining(one, torch.tensor([[True, False, False, False]])).tolist() == [[0, third, third, third]]


def test_the_smallest_temperature_draws_the_likeliest() -> None:
    log_q = torch.tensor([[-2.0, -0.5, -1.5], [-3.0, -2.5, -0.5]])
    assert draft_probabilities(log_q, 5e-324).tolist() == [[0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_children_are_drawn_without_replacement(temperature: float) -> None:
    """The law of every ordered draw, and that the dice follow it."""
    log_q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    powers = [math.exp(v / temperature) for v in log_q.tolist()]
    q = [v / sum(powers) for v in powers]
    expected = {
        (a, b, c): q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b]) for a, b, c in itertools.permutations(range(4), 3)
    }
    found: dict[Any, float] = {}
    for weight, drawn in every_outcome(lambda draw: draw_children(log_q[None], 3, temperature, draw)):
        found[tuple(drawn[0].tolist())] = weight
    assert found == pytest.approx(expected, abs=1e-14)
    rows = draw_children(log_q.expand(40_000, -1), 3, temperature, dice(1))
    counts = torch.tensor([int((rows == torch.tensor(key)).all(1).sum()) for key in expected])
    share = torch.tensor(list(expected.values())) * 40_000
    assert counts.sum() == 40_000
    assert ((counts - share) ** 2 / share).sum().item() < 49.7  # 23 degrees of freedom: one seed in a thousand


def test_an_exhausted_draft_goes_on_uniformly() -> None:
    log_q = torch.tensor([[0.0, float("-inf"), float("-inf")]])
    found = {
        tuple(drawn[0].tolist()): weight for weight, drawn in every_outcome(lambda draw: draw_children(log_q, 2, 1.0, draw))
    }
    assert found == pytest.approx({(0, 1): 0.5, (0, 2): 0.5})


@pytest.mark.parametrize("log_q", [[float("nan")] * 3, [0.0, float("nan"), 0.0]])
def test_a_draft_that_is_no_distribution_is_refused(log_q: list[float]) -> None:
    with pytest.raises(UserError, match="NaN"):
        draw_children(torch.tensor([log_q]), 1, 1.0, dice(0))


def test_the_p_value_is_that_of_the_chi_square_table() -> None:
    """19 degrees of freedom: 30.144 has p 0.05, 36.191 has p 0.01 (printed tables)."""
    for statistic, p in ((30.144, 0.05), (36.191, 0.01)):
        counts = torch.full((20,), 1000.0, dtype=torch.float64)
        step = (statistic * 1000 / 20) ** 0.5
        counts[:10] += step
        counts[10:] -= step
        assert p_value(counts) == pytest.approx(p, rel=1e-3)


def test_where_nothing_is_drafted_any_token_is_drawn() -> None:
    log_q = torch.tensor([[float("-inf")] * 4, [0.0] + [float("-inf")] * 3])
    assert draft_probabilities(log_q, 0.5).tolist() == [[0.25] * 4, [1.0, 0.0, 0.0, 0.0]]
