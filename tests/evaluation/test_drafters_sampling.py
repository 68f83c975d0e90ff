"""Sampling with drafters that are no trained heads: the law of the first tokens, every outcome of it, and drafters that are as
wrong or as right as one can be."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.evaluation.decode import speculate
from headstart.evaluation.draft_model import ModelDrafter
from headstart.evaluation.enumeration import total_variation
from headstart.evaluation.hierarchical import Hierarchical
from headstart.evaluation.lookahead import Lookahead
from headstart.evaluation.ngrams import LookupSession, PromptLookup
from headstart.evaluation.sampling import Sampling
from headstart.evaluation.tiny import PROMPT, VOCAB, plain_joint, speculative_joint, tiny_heads, tiny_verifier
from headstart.evaluation.tree import AnyTree, DynamicTree, StaticTree, chain
from headstart.heads.drafter import Drafter
from headstart.heads.generate import generate
from headstart.heads.verifier import Verifier

CPU = torch.device("cpu")
PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10, 11, 12]]
TREES: dict[str, AnyTree] = {"chain": chain(2), "static": StaticTree([[0], [1], [0, 0]]), "dynamic": DynamicTree(2, 2, 7)}


def of_tiny(kind: str, verifier: Verifier) -> Drafter:
    lookup = PromptLookup(VOCAB, CPU, longest=1, shortest=1)
    return {
        "prompt_lookup": lookup,
        "lookahead": Lookahead(VOCAB, CPU, window=2, ngram=3),
        "hierarchical": Hierarchical(lookup, tiny_heads(verifier, 0)[0]),
        "model": ModelDrafter(tiny_verifier(7), verifier),
    }[kind]


@pytest.mark.parametrize("rule", ["candidates", "without_replacement"])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("kind", ["prompt_lookup", "lookahead", "hierarchical", "model"])
def test_the_joint_law_of_the_first_tokens_is_plain_samplings(kind: str, tree: AnyTree, rule: Any) -> None:
    """In the prompt 2 0 1 1 a lookup finds 1 behind 1: its drafts are tried from the first round on."""
    verifier = tiny_verifier(0)
    drafter, sampling = of_tiny(kind, verifier), Sampling(0.8, rule, repetition_penalty=1.2)
    if rule == "without_replacement" and isinstance(tree, DynamicTree) and not drafter.certain:
        pytest.skip("refused: its shape depends on what is drawn")
    length = 2 if kind == "model" else 3  # drawn from a model, there are thousands of outcomes
    found, outcomes = speculative_joint(verifier, drafter, tree, length, sampling)
    assert outcomes >= VOCAB**length
    assert total_variation(found, plain_joint(verifier, length, sampling)) < 1e-12


def test_the_first_round_does_draft_by_lookup() -> None:
    """What the law above is about: behind a root of 1, the prompt's own 1 is drafted, and accepted sometimes."""
    verifier = tiny_verifier(0)
    sampling = Sampling(1.0, "without_replacement")
    drafted, accepted = set(), set()
    for seed in range(12):
        (answer,), _ = speculate(
            verifier,
            of_tiny("prompt_lookup", verifier),
            chain(2),
            [PROMPT],
            8,
            sampling=dataclasses.replace(sampling, seed=seed),
        )
        drafted |= {r.drafted for r in answer.rounds}
        accepted |= {r.emitted - 1 for r in answer.rounds}
    assert drafted >= {1, 2}
    assert accepted >= {0, 1}


class Twisted(ModelDrafter):
    """The verifier's own logits, made into something else."""

    def __init__(self, verifier: Verifier, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__(verifier, verifier)
        self.make = make

    def log_q(self, states: Tensor) -> Tensor:
        return self.make(self.model.logits(states).float()).log_softmax(-1)


def equal(logits: Tensor) -> Tensor:
    return logits


def opposite(logits: Tensor) -> Tensor:
    return torch.where(logits == logits.amax(-1, keepdim=True), -1e9, -logits)


def constant(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits)


def broken(logits: Tensor) -> Tensor:
    return logits * float("nan")


@pytest.fixture
def llama(tiny: Callable[..., Verifier]) -> Verifier:
    verifier = tiny("llama", initializer_range=0.3)
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
    return verifier


@pytest.mark.parametrize("make", [equal, opposite, constant, broken])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_greedy_text_of_a_twisted_draft_model_is_the_verifiers(
    tree: AnyTree, make: Callable[[Tensor], Tensor], llama: Verifier
) -> None:
    decoded, _ = speculate(llama, Twisted(llama, make), tree, PROMPTS, 13)
    assert [answer.tokens for answer in decoded] == generate(llama, PROMPTS, 13)
    emitted = {r.emitted for answer in decoded for r in answer.rounds}
    if make is equal:
        assert emitted == {3}
    if make is opposite:
        assert emitted == {1}


def test_a_draft_model_equal_to_the_verifier_is_always_accepted_when_its_drafts_are_drawn(llama: Verifier) -> None:
    for temperature in (0.6, 1.0):
        decoded, _ = speculate(
            llama, ModelDrafter(llama, llama), chain(3), PROMPTS, 13, sampling=Sampling(temperature, "without_replacement")
        )
        assert [[r.emitted for r in answer.rounds] for answer in decoded] == [[4, 4, 4]] * 3


def test_a_draft_model_of_nan_is_refused_where_drafts_are_drawn(llama: Verifier) -> None:
    with pytest.raises(UserError, match=r"draft probabilities are not numbers \(NaN\)"):
        speculate(llama, Twisted(llama, broken), chain(2), PROMPTS, 4, sampling=Sampling(1.0, "without_replacement"))
    lookup = Hierarchical(PromptLookup(96, CPU), Twisted(llama, broken))
    with pytest.raises(UserError, match=r"draft probabilities are not numbers \(NaN\)"):
        speculate(llama, lookup, chain(2), PROMPTS, 4, sampling=Sampling(1.0, "without_replacement"))


class Told(PromptLookup):
    """Continues every text with what it is told."""

    def __init__(self, continuation: Callable[[list[int]], Sequence[int]]) -> None:
        super().__init__(96, CPU)
        self.continuation = continuation

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> LookupSession:
        session = LookupSession(self, batch)
        session.guesses = lambda row: [list(self.continuation(session.texts[row]))]  # type: ignore[method-assign]
        return session


@pytest.mark.parametrize("depth", [1, 3])
def test_n_grams_that_are_always_right_or_always_wrong(depth: int, llama: Verifier) -> None:
    budget = 1 + 3 * (depth + 1)
    texts = [prompt + text for prompt, text in zip(PROMPTS, generate(llama, PROMPTS, budget + depth), strict=True)]

    def right(text: list[int]) -> list[int]:
        (whole,) = (whole for whole in texts if whole[: len(text)] == text)
        return whole[len(text) : len(text) + depth]

    for tree in (
        chain(depth),
        StaticTree([[0] * n for n in range(1, depth + 1)] + [[1], [2]]),
        DynamicTree(depth, 2, depth + 3),
    ):
        for make, tau in ((right, depth + 1), (lambda text: [(token + 1) % 96 for token in right(text)], 1)):
            decoded, _ = speculate(llama, Told(make), tree, PROMPTS, budget)
            assert [prompt + a.tokens for prompt, a in zip(PROMPTS, decoded, strict=True)] == [
                t[: len(t) - depth] for t in texts
            ]
            assert {r.emitted for answer in decoded for r in answer.rounds[:3]} == {tau}
            assert {r.drafted for answer in decoded for r in answer.rounds[:3]} == {depth}
