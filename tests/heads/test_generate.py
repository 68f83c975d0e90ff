"""Batched greedy decoding against a loop that runs the whole sequence through transformers for every token."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from headstart.heads.generate import generate
from headstart.heads.verifier import Verifier

Build = Callable[..., Any]
FAMILIES = ["llama", "llama3rope", "qwen2", "qwen2_hybrid", "qwen3", "gpt2", "gemma2", "gemma3", "mistral", "granite",
            "cohere", "olmo2", "phi3", "stablelm", "gpt_neox", "mixtral", "qwen3_moe"]  # fmt: skip


def naive(verifier: Verifier, prompt: Sequence[int], budget: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + budget:
        with torch.no_grad():
            ids.append(int(verifier.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in verifier.facts.stop_ids:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_case_30_a_batch_equals_the_full_forward_loop(family: str, tiny: Build, ids_of: Build) -> None:
    verifier = tiny(family)
    prompts = [ids_of(seed, length) for seed, length in ((1, 2), (2, 9), (4, 1))]
    answers = generate(verifier, prompts, 14)
    assert answers == [naive(verifier, prompt, 14) for prompt in prompts]
    assert len({token for answer in answers for token in answer}) > 5  # the text varies, or this would prove little


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_case_30_twenty_prompts_of_64_tokens(family: str, tiny: Build, ids_of: Build) -> None:
    verifier = tiny(family)
    prompts = [ids_of(100 + i, 1 + i % 13) for i in range(20)]
    assert generate(verifier, prompts, 64) == [naive(verifier, prompt, 64) for prompt in prompts]


def test_every_id_of_the_stop_list_ends_an_answer_and_is_kept_once(tiny: Build, ids_of: Build) -> None:
    free = generate(tiny("llama", eos_token_id=None), [ids_of(5, 4), ids_of(6, 6)], 16)
    stops = [free[0][5], free[1][9]]
    answers = generate(tiny("llama", eos_token_id=stops), [ids_of(5, 4), ids_of(6, 6)], 16)
    for answer, whole in zip(answers, free, strict=True):
        first = next(i for i, token in enumerate(whole) if token in stops)
        assert answer == whole[: first + 1]
    assert len(answers[0]) <= 6


@pytest.mark.parametrize("budget", [1, 2, 7])
def test_the_budget_is_exact(budget: int, tiny: Build, ids_of: Build) -> None:
    verifier = tiny("qwen3", eos_token_id=None)
    assert [len(answer) for answer in generate(verifier, [ids_of(7, 3), ids_of(8, 8)], budget)] == [budget, budget]


def test_rows_that_stop_early_leave_the_others_as_they_are(tiny: Build, ids_of: Build) -> None:
    """Row 1 stops at its first token, row 0 in the middle, row 2 at the budget."""
    prompts = [ids_of(9, 3), ids_of(10, 7), ids_of(11, 5)]
    free = generate(tiny("mistral", eos_token_id=None), prompts, 14)
    stops = [free[1][0], free[0][6]]
    verifier = tiny("mistral", eos_token_id=stops)
    answers = generate(verifier, prompts, 14)
    assert answers == [naive(verifier, prompt, 14) for prompt in prompts]
    assert len(answers[1]) == 1


def test_progress_counts_every_new_token_once(tiny: Build, ids_of: Build) -> None:
    told: list[int] = []
    answers = generate(tiny("llama"), [ids_of(12, 3), ids_of(13, 4)], 12, on_tokens=told.append)
    assert sum(told) == sum(map(len, answers))


def test_the_last_position_of_the_model_can_be_reached(tiny: Build, ids_of: Build) -> None:
    for family in ("llama", "gpt2"):
        verifier = tiny(family, max_position_embeddings=16, eos_token_id=None)
        assert generate(verifier, [ids_of(14, 12)], 4) == [naive(verifier, ids_of(14, 12), 4)]
