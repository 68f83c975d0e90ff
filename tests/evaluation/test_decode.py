"""The decoding loop with random heads: budgets, traces, accounts and heads that are broken."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.evaluation.decode import Clock, Decoded, Round, record, speculate
from headstart.evaluation.tree import AnyTree, DynamicTree, StaticTree, chain
from headstart.heads.base import DraftHead
from headstart.heads.generate import generate
from headstart.heads.verifier import Verifier

PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
TREES: dict[str, AnyTree] = {
    "chain": chain(3),
    "static": StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
    "dynamic": DynamicTree(depth=3, top_k=2, nodes=8),
}
KINDS = ["medusa", "eagle3"]


@pytest.fixture
def verifier(tiny: Callable[..., Verifier]) -> Verifier:
    """A llama that never stops by itself."""
    verifier = tiny("llama")
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
    return verifier


@pytest.fixture(params=KINDS)
def head(request: pytest.FixtureRequest, verifier: Verifier) -> DraftHead:
    return request.getfixturevalue(f"tiny_{request.param}")(verifier)


@pytest.mark.parametrize(("tree", "told"), [
    (chain(4), "a chain tree of depth 4 is deeper than its drafter, which has 3"),
    (StaticTree([[0], [47]]), None),
    (DynamicTree(1, 48, 9), None),
    (StaticTree([[0], [48]]), "a static tree asks for 49 children of a node; its drafter knows 48 tokens"),
    (DynamicTree(1, 49, 9), "a dynamic tree asks for 49 children of a node; its drafter knows 48 tokens"),
])  # fmt: skip
def test_a_tree_that_the_drafter_cannot_fill_is_refused(
    tree: AnyTree, told: str | None, verifier: Verifier, tiny_medusa: Callable[..., DraftHead], half_vocabulary: Tensor
) -> None:
    head = tiny_medusa(verifier, target_ids=half_vocabulary)
    if told is None:  # the widest that it can
        assert tokens_of(speculate(verifier, head, tree, PROMPTS, 4)[0]) == generate(verifier, PROMPTS, 4)
        return
    with pytest.raises(UserError) as caught:
        speculate(verifier, head, tree, PROMPTS, 4)
    assert str(caught.value) == told


def tokens_of(decoded: list[Decoded]) -> list[list[int]]:
    return [answer.tokens for answer in decoded]


@pytest.mark.parametrize("budget", [1, 2, 3, 7])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_an_answer_has_exactly_the_tokens_asked_for(budget: int, tree: AnyTree, verifier: Verifier, head: DraftHead) -> None:
    decoded, _ = speculate(verifier, head, tree, PROMPTS, budget)
    assert tokens_of(decoded) == generate(verifier, PROMPTS, budget)
    assert [len(answer.tokens) for answer in decoded] == [budget] * 3
    assert [sum(r.emitted for r in answer.rounds) for answer in decoded] == [budget - 1] * 3


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_the_account_of_rounds_and_sources(tree: AnyTree, verifier: Verifier, head: DraftHead) -> None:
    """Each round tells its context and gives accepted drafts, then one token of the verifier's own."""
    decoded, _ = speculate(verifier, head, tree, PROMPTS, 40)
    for prompt, answer in zip(PROMPTS, decoded, strict=True):
        context, sources = len(prompt), ["prefill"]
        for r in answer.rounds:
            assert (r.context, r.drafted) == (context, tree.nodes - 1)
            assert 1 <= r.emitted <= tree.depth + 1
            context += r.emitted
            sources += ["drafted"] * (r.emitted - 1) + ["bonus"]
        clipped = answer.sources[-1] == "drafted"  # the budget ended on a draft
        assert answer.sources == [*sources[:-1], "drafted"] if clipped else sources
        assert len(answer.tokens) == len(answer.sources) == 40


def test_without_a_head_it_is_plain_decoding(verifier: Verifier) -> None:
    decoded, seconds = speculate(verifier, None, chain(3), PROMPTS, 12)
    assert tokens_of(decoded) == generate(verifier, PROMPTS, 12)
    assert [answer.rounds for answer in decoded] == [[Round(len(p) + i, 1, 0) for i in range(11)] for p in PROMPTS]
    assert set(seconds) == {"prefill", "draft", "verify", "other"}


def test_a_tree_of_the_root_alone_is_plain_decoding(verifier: Verifier, head: DraftHead) -> None:
    plain, _ = speculate(verifier, None, chain(0), PROMPTS, 9)
    assert speculate(verifier, head, chain(0), PROMPTS, 9)[0] == plain


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_on_tokens_is_told_of_everything_emitted(tree: AnyTree, verifier: Verifier, head: DraftHead) -> None:
    told: list[int] = []
    decoded, _ = speculate(verifier, head, tree, PROMPTS, 20, told.append)
    assert sum(told) == sum(r.emitted for answer in decoded for r in answer.rounds) == 3 * 19


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_a_broken_head_cannot_change_the_text(value: float, tree: AnyTree, verifier: Verifier, head: DraftHead) -> None:
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(value)
    assert tokens_of(speculate(verifier, head, tree, PROMPTS, 16)[0]) == generate(verifier, PROMPTS, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pruned_vocabulary_without_the_text_is_lossless(
    kind: str, verifier: Verifier, request: pytest.FixtureRequest
) -> None:
    """Columns of the head are not ids of the verifier."""
    expected = generate(verifier, PROMPTS, 16)
    unused = sorted(set(range(96)) - {token for text in expected for token in text})[:20]
    head = request.getfixturevalue(f"tiny_{kind}")(verifier, target_ids=torch.tensor(unused))
    for tree in TREES.values():
        decoded, _ = speculate(verifier, head, tree, PROMPTS, 16)
        assert tokens_of(decoded) == expected
        assert {r.emitted for answer in decoded for r in answer.rounds} == {1}


def test_a_head_of_another_verifier_is_refused(tiny: Callable[..., Verifier], verifier: Verifier, head: DraftHead) -> None:
    with pytest.raises(UserError, match=r"head's hidden size is 32, the verifier's 64$"):
        speculate(tiny("llama", hidden_size=64), head, chain(2), PROMPTS, 4)


@pytest.mark.parametrize("tree", [chain(4), StaticTree([[0], [1], [0, 0], [0, 0, 0], [1, 0]]), DynamicTree(4, 3, 20)])
def test_the_cache_of_the_head_has_room_for_every_expanded_node(tree: AnyTree) -> None:
    class Counting:
        expanded = 0

        def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
            self.expanded += ids.shape[1]
            return torch.zeros(1, ids.shape[1], 9)

    session = Counting()
    tree.grow(session, torch.tensor([0]), torch.zeros(1, 9), torch.arange(9))  # type: ignore[arg-type]
    assert session.expanded == tree.expanded > 0


def test_extend_stops_at_the_first_stop_token_and_at_the_budget() -> None:
    answer = Decoded()
    assert answer.extend([4], ["prefill"], 6, (7, 8)) == 1
    assert answer.extend([5, 8, 9], ["drafted", "drafted", "bonus"], 6, (7, 8)) == 2
    assert (answer.tokens, answer.sources) == ([4, 5, 8], ["prefill", "drafted", "drafted"])
    assert answer.finished(6, (7, 8))
    assert answer.extend([1], ["bonus"], 6, (7, 8)) == 0

    answer = Decoded()
    assert not answer.finished(2, (7,))
    assert answer.extend([1, 2, 3], ["drafted", "drafted", "bonus"], 2, (7,)) == 2
    assert answer.tokens == [1, 2]


def test_record_writes_each_row_into_its_own_answer() -> None:
    done = [Decoded(tokens=[1], sources=["prefill"]) for _ in range(4)]
    told = [[2, 4, 10, 11, 12, 13], [0, 4, 20, 21, 21, 22], [2, 3, 30, 31, 32, 33]]
    assert record(done, [0, 2, 3], [5, 6, 7], told, 50, (31,)) == 3 + 1 + 1
    assert [answer.tokens for answer in done] == [[1, 11, 12, 13], [1], [1, 22], [1, 31]]
    assert done[0].sources == ["prefill", "drafted", "drafted", "bonus"]
    assert [answer.rounds for answer in done] == [[Round(5, 3, 4)], [], [Round(6, 1, 4)], [Round(7, 1, 3)]]


def test_the_clock_charges_every_moment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 11.0, 13.0, 16.0, 20.0])
    monkeypatch.setattr("headstart.evaluation.decode.time.perf_counter", lambda: next(now))
    clock = Clock(torch.device("cpu"))
    for part in ("prefill", "draft", "verify", "draft"):
        clock.charge(part)
    assert clock.seconds == {"prefill": 1.0, "draft": 6.0, "verify": 3.0, "other": 0.0}
