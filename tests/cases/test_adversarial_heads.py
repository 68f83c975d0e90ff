"""Heads that are as wrong, or as right, as a head can be: under every rule the text is the verifier's, or they are refused."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.evaluation.decode import speculate
from headstart.evaluation.metrics import acceptance
from headstart.evaluation.sampling import Sampling
from headstart.evaluation.tree import AnyTree, DynamicTree, StaticTree, chain
from headstart.heads.base import DraftHead
from headstart.heads.drafter import DraftSession
from headstart.heads.generate import generate
from headstart.heads.verifier import Features, Verifier

PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10, 11, 12]]
TREES: dict[str, AnyTree] = {
    "chain": chain(3),
    "static": StaticTree([[0], [1], [0, 0], [0, 0, 0]]),
    "dynamic": DynamicTree(depth=3, top_k=2, nodes=11),
}
RULES = ["candidates", "without_replacement", "typical"]

LogQ = Callable[[Tensor], Tensor]  # the verifier's logits after a text [V] -> log q [V]


class Knowing(DraftHead):
    """Knows the verifier's own logits after every text, by full forward passes, and makes of them what it is told."""

    kind = "knowing"

    def __init__(self, verifier: Verifier, prompts: Sequence[list[int]], make: LogQ) -> None:
        super().__init__()
        self.verifier, self.prompts, self.make = verifier, prompts, make
        self.register_buffer("target_ids", torch.arange(verifier.facts.vocab_size))

    @property
    def needs(self) -> tuple[int, ...]:
        return ()

    @property
    def depth(self) -> None:
        return None

    def supervised(self, *arguments: Any) -> Tensor:
        raise AssertionError("it does not learn")

    loss = predictions = supervised

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> "KnowingSession":
        return KnowingSession(self)


class KnowingSession(DraftSession):
    def __init__(self, head: Knowing) -> None:
        self.head = head
        self.texts = [prompt[:1] for prompt in head.prompts]
        self.paths: list[list[list[int]]] = []

    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        for text, following, count in zip(self.texts, next_ids.tolist(), counts, strict=True):
            text += following[:count]
        self.paths = [[] for _ in self.texts]
        return torch.stack([self.log_q(text) for text in self.texts])

    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        out = []
        for text, paths, tokens, above in zip(self.texts, self.paths, ids.tolist(), parents.tolist(), strict=True):
            new = [[*(paths[parent] if parent >= 0 else []), token] for token, parent in zip(tokens, above, strict=True)]
            paths += new
            out.append(torch.stack([self.log_q(text + path) for path in new]))
        return torch.stack(out)

    @torch.no_grad()
    def log_q(self, text: list[int]) -> Tensor:
        logits = self.head.verifier.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        return self.head.make(logits.float()).log_softmax(-1)

    def keep_rows(self, rows: list[int]) -> None:
        self.texts = [self.texts[i] for i in rows]


def equal(logits: Tensor) -> Tensor:
    return logits


def opposite(logits: Tensor) -> Tensor:
    """Never the likeliest token."""
    return torch.where(logits == logits.max(), -1e9, -logits)


def constant(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits)


def broken(logits: Tensor) -> Tensor:
    return logits * float("nan")


@pytest.fixture
def verifier(tiny: Callable[..., Verifier]) -> Verifier:
    verifier = tiny("llama", initializer_range=0.3)
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
    return verifier


def decode(verifier: Verifier, make: LogQ, tree: AnyTree, sampling: Sampling, tokens: int) -> tuple[list[list[int]], Any]:
    decoded, _ = speculate(verifier, Knowing(verifier, PROMPTS, make), tree, PROMPTS, tokens, sampling=sampling)
    return [answer.tokens for answer in decoded], acceptance([r for d in decoded for r in d.rounds], tree.depth)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("make", [equal, opposite, constant, broken])
def test_greedy_text_is_the_verifiers(make: LogQ, tree: AnyTree, verifier: Verifier) -> None:
    texts, found = decode(verifier, make, tree, Sampling(), 13)
    assert texts == generate(verifier, PROMPTS, 13)
    if make is equal:
        assert found["tau"] == tree.depth + 1
    if make is opposite:
        assert found["tau"] == 1


@pytest.mark.parametrize("depth", [1, 3])
def test_children_drawn_from_the_verifiers_own_distribution_are_all_accepted(depth: int, verifier: Verifier) -> None:
    for temperature in (0.6, 1.0):
        _, found = decode(
            verifier, equal, chain(depth), Sampling(temperature, "without_replacement", seed=1), 1 + 3 * (depth + 1)
        )
        assert found["tau"] == depth + 1
        assert found["rounds"] == 3 * 3


def test_candidates_of_an_equal_head_are_accepted_as_often_as_they_are_likely(verifier: Verifier) -> None:
    """The rule draws y from p and compares: even an equal head is not always right."""
    _, found = decode(verifier, equal, chain(3), Sampling(1.0, "candidates"), 40)
    assert 1 < found["tau"] < 4


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_at_top_k_1_every_rule_writes_the_greedy_text(rule: Any, tree: AnyTree, verifier: Verifier) -> None:
    """Sampling from one token alone: whatever the head drafts, there is one text. (Typical acceptance: p is a certainty.)"""
    if rule == "without_replacement" and isinstance(tree, DynamicTree):
        pytest.skip("refused, see below")
    expected = generate(verifier, PROMPTS, 12)
    for make in (equal, opposite, constant):
        texts, found = decode(verifier, make, tree, Sampling(1.0, rule, top_k=1), 12)
        assert texts == expected
        if make is opposite:
            assert found["tau"] == 1
    if rule == "typical":
        assert decode(verifier, equal, tree, Sampling(1.0, rule, top_k=1), 13)[1]["tau"] == tree.depth + 1


def test_children_cannot_be_drawn_for_a_dynamic_tree(verifier: Verifier) -> None:
    with pytest.raises(UserError, match=r"^rule without_replacement: a dynamic tree's shape depends on its drafts"):
        decode(verifier, equal, TREES["dynamic"], Sampling(1.0, "without_replacement"), 4)


@pytest.mark.parametrize("tree", [TREES["chain"], TREES["static"]])
def test_children_cannot_be_drawn_from_nan(tree: AnyTree, verifier: Verifier) -> None:
    with pytest.raises(UserError, match=r"^the head's draft probabilities are not numbers \(NaN\)"):
        decode(verifier, broken, tree, Sampling(1.0, "without_replacement"), 4)


@pytest.mark.parametrize("rule", ["candidates", "typical"])
def test_nan_drafts_are_only_bad_candidates(rule: Any, verifier: Verifier) -> None:
    texts, _ = decode(verifier, broken, TREES["static"], Sampling(1.0, rule), 9)
    assert [len(text) for text in texts] == [9, 9, 9]
    assert all(0 <= token < 96 for text in texts for token in text)


def test_a_seed_makes_one_text(verifier: Verifier) -> None:
    one, two, three = (
        decode(verifier, constant, TREES["static"], Sampling(1.0, "without_replacement", seed=s), 20)[0] for s in (1, 1, 2)
    )
    assert one == two != three
    assert one[0] != one[1]
