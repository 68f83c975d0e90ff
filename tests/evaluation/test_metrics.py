"""Acceptance metrics against hand-made rounds and loops over them."""

import random

import pytest

from headstart.evaluation.decode import Decoded, Round
from headstart.evaluation.metrics import acceptance, by_category, by_context


def rounds(*accepted: int, drafted: int = 4, context: int = 10) -> list[Round]:
    """Rounds that accepted so many drafts and emitted the verifier's token after them."""
    return [Round(context, count + 1, drafted) for count in accepted]


def test_case_28_the_metrics_of_the_example() -> None:
    found = acceptance(rounds(3, 0, 2), depth=4)
    assert found == {
        "rounds": 3,
        "emitted": 8,
        "drafted": 12,
        "accepted": 5,
        "tau": pytest.approx(2.6667, abs=5e-5),
        "survival": pytest.approx([2 / 3, 2 / 3, 1 / 3, 0]),
        "conditional": pytest.approx([2 / 3, 1, 1 / 2, 0]),
        "draft_acceptance_rate": pytest.approx(5 / 12),
        "accepted_histogram": [1, 0, 1, 1, 0],
    }
    assert found["tau"] - 1 == pytest.approx(1.6667, abs=5e-5)


@pytest.mark.parametrize("seed", range(5))
def test_tau_is_one_plus_the_sum_of_survival_even_when_rounds_are_clipped(seed: int) -> None:
    rng = random.Random(seed)
    depth = 5
    some = [Round(rng.randrange(500), rng.randrange(1, depth + 2), 9) for _ in range(40)]
    found = acceptance(some, depth)
    tau = sum(r.emitted for r in some) / 40
    assert found["tau"] == pytest.approx(tau)
    assert 1 + sum(found["survival"]) == pytest.approx(tau)
    for i, share in enumerate(found["survival"], start=1):
        assert share == sum(r.emitted > i for r in some) / 40
    assert sum(found["accepted_histogram"]) == 40
    assert sum(n * i for i, n in enumerate(found["accepted_histogram"])) == found["accepted"]


def test_conditional_is_none_below_a_depth_nobody_reached() -> None:
    assert acceptance(rounds(1, 0), depth=4)["conditional"] == [0.5, 0.0, None, None]


def test_no_rounds_give_no_numbers() -> None:
    found = acceptance([], depth=2)
    assert found == {
        "rounds": 0, "emitted": 0, "drafted": 0, "accepted": 0, "tau": None, "survival": [None, None],
        "conditional": [None, None], "draft_acceptance_rate": None, "accepted_histogram": [0, 0, 0],
    }  # fmt: skip


def test_plain_decoding_drafts_nothing() -> None:
    found = acceptance(rounds(0, 0, drafted=0), depth=0)
    assert (found["tau"], found["survival"], found["draft_acceptance_rate"]) == (1.0, [], None)


def test_case_28_tau_is_a_micro_average_over_rounds() -> None:
    """One prompt with one round of 5 tokens, one with four rounds of 1: 9 / 5, not the mean of 5 and 1."""
    answers = [Decoded(rounds=rounds(4)), Decoded(rounds=rounds(0, 0, 0, 0))]
    assert acceptance([r for a in answers for r in a.rounds], 4)["tau"] == pytest.approx(1.8)
    assert by_category(answers, ["maths", "maths"]) == {"maths": {"tau": pytest.approx(1.8), "rounds": 5, "emitted": 9}}


def test_by_category_leaves_out_prompts_without_one() -> None:
    answers = [Decoded(rounds=rounds(1, 2)), Decoded(rounds=rounds(3)), Decoded(rounds=rounds(0)), Decoded()]
    assert by_category(answers, ["b", None, "a", "a"]) == {
        "a": {"tau": 1.0, "rounds": 1, "emitted": 1},
        "b": {"tau": 2.5, "rounds": 2, "emitted": 5},
    }
    assert by_category(answers, [None] * 4) == {}
    assert by_category([Decoded()], ["c"]) == {"c": {"tau": None, "rounds": 0, "emitted": 0}}


def test_by_context_sorts_rounds_into_ranges_of_tokens() -> None:
    contexts = [0, 127, 128, 255, 256, 8191, 8192, 100_000]
    answers = [Decoded(rounds=[Round(context, i + 1, 7)]) for i, context in enumerate(contexts)]
    assert by_context(answers) == {
        "0-127": {"tau": 1.5, "rounds": 2, "emitted": 3},
        "128-255": {"tau": 3.5, "rounds": 2, "emitted": 7},
        "256-511": {"tau": 5.0, "rounds": 1, "emitted": 5},
        "4096-8191": {"tau": 6.0, "rounds": 1, "emitted": 6},
        "8192+": {"tau": 7.5, "rounds": 2, "emitted": 15},
    }
    assert by_context([]) == {}
