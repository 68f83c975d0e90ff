"""The proof itself: it holds, it would fail where it must, and its tools say what they are said to say."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.evaluation import controls, enumeration, goodness, lossless, tiny, verify
from headstart.evaluation.decode import speculate
from headstart.evaluation.enumeration import Tables, every_outcome, one_round, round_law, total_variation
from headstart.evaluation.evaluate import Evaluator, Prompt
from headstart.evaluation.hierarchical import Hierarchical
from headstart.evaluation.ngrams import PromptLookup
from headstart.evaluation.sampling import Sampling, dice
from headstart.evaluation.tree import AnyTree, DynamicTree, StaticTree, chain
from headstart.heads.base import DraftHead
from headstart.heads.verifier import Verifier


def test_every_outcome_of_nested_draws() -> None:
    def run(draw: Callable[[Tensor], Tensor]) -> tuple[int, ...]:
        first = int(draw(torch.tensor([2.0, 0.0, 6.0])))
        return (first, *draw(torch.tensor([[1.0, 1.0], [1.0, 3.0]])).tolist()) if first else (first,)

    found = {text: weight for weight, text in every_outcome(run)}
    assert found == {(0,): 0.25, (2, 0, 0): 0.09375, (2, 0, 1): 0.28125, (2, 1, 0): 0.09375, (2, 1, 1): 0.28125}


def test_a_round_has_the_law_of_plain_sampling_by_other_sums() -> None:
    """The joint law of plain sampling from the tables alone, and the round's first token by the law of one node."""
    generator = torch.Generator().manual_seed(0)
    target, drafter = Tables(4, 3, 1.0, generator), Tables(4, 3, 1.5, generator)
    sampling = Sampling(1.0, "without_replacement")
    found, outcomes = round_law(target, drafter, StaticTree([[0], [1], [0, 0]]), sampling)
    expected = torch.zeros(4, 4, 4, dtype=torch.float64)
    for a, b, c in itertools.product(range(4), repeat=3):
        expected[a, b, c] = (
            target.rows[()].softmax(-1)[a] * target.rows[(a,)].softmax(-1)[b] * target.rows[(a, b)].softmax(-1)[c]
        )
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)
    assert outcomes > 4 * 3 * 4  # every ordered draw of two children and a grandchild


@pytest.mark.parametrize("tree", [DynamicTree(2, 2, 6), StaticTree([[0], [1], [0, 0], [1, 0]])])
def test_a_drafter_that_breaks_below_the_root_is_lossless(tree: AnyTree) -> None:
    """NaN sorts before every number: such nodes must not outlive their parents and become the root's children, some of them the
    same token as a child that is there (then two of these eight texts would be up to .17 from the verifier's)."""
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        target, drafter = Tables(4, 3, 1.0, generator), Tables(4, 3, 1.5, generator)
        for text, row in drafter.rows.items():
            if text:
                row.fill_(float("nan"))
        for sampling in (Sampling(), Sampling(1.0)):
            found, _ = round_law(target, drafter, tree, sampling)
            assert total_variation(found, target.joint((), 3, sampling, (0, 1))) < 1e-12


def test_the_joint_law_of_a_penalty_is_that_of_its_texts() -> None:
    target = Tables(3, 2, 1.0, torch.Generator().manual_seed(1))
    sampling = Sampling(0.8, repetition_penalty=1.5)
    joint = target.joint((), 2, sampling, (0, 1))
    for a, b in itertools.product(range(3), repeat=2):
        wanted = 1.0
        for text, token in (((), a), ((a,), b)):
            x = target.rows[text].clone()
            for v in {0, 1, *text}:
                x[v] = x[v] / 1.5 if x[v] > 0 else x[v] * 1.5
            wanted *= (x / 0.8).softmax(-1)[token].item()
        assert joint[a, b].item() == pytest.approx(wanted, abs=1e-14)


@pytest.fixture(scope="module")
def gates() -> list[lossless.Gate]:
    return list(lossless.proof(seed=1))


def test_the_proof_holds(gates: list[lossless.Gate]) -> None:
    assert [gate.name for gate in gates if not gate.passed] == []
    assert [gate.part for gate in gates].count("exact rounds") == 2 + 2 * 5 + 1
    assert {gate.part for gate in gates} == {"exact rounds", "one node", "wrong rules", "tiny model"}
    assert max(gate.value for gate in gates if gate.needed == "< 1e-12") < 1e-13


def test_controls_are_caught_as_the_methods_say() -> None:
    """Known values: over 6 tokens, 3 children and 60 pairs .287, .231, .103 and .014; the pairs there are others."""
    stated = {"top-3 tested": 0.287, "drawn, tested": 0.231, "draw 3": 0.103, "independent": 0.014}
    found = {gate.name: gate.value for gate in lossless.one_node(seed=0) if gate.part == "wrong rules"}
    for name, value in stated.items():
        (mine,) = [v for key, v in found.items() if key.startswith(name)]
        assert value / 1.5 < mine < value * 1.5, (name, mine)


def test_children_without_replacement_are_followed_more_often() -> None:
    """Known values: acceptance .836 for the top three, .928 for three drawn ones; the pairs there are others."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(60):
        p, q = controls.random_pair(6, generator)
        shares.append((controls.node(p, q.topk(3).indices)[1], controls.node(p, controls.drawn(q))[1]))
    candidates, drawn = torch.tensor(shares).mean(0).tolist()
    assert candidates == pytest.approx(0.836, abs=0.03)
    assert drawn == pytest.approx(0.928, abs=0.03)


def flat_law(p: Tensor, children: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Rejected: draw from p again."""
    follow, emit = verify_drawn_law(p, children, q)
    return follow, emit.sum(1, keepdim=True) * p


def greedy_children(p: Tensor, children: Tensor) -> tuple[Tensor, Tensor]:
    """A likely child is taken for sure."""
    follow, emit = verify_candidates_law(p, children)
    return torch.where(follow > 0.5, 1.0, follow), torch.where((follow > 0.5).any(1, keepdim=True), 0.0, emit)


verify_drawn_law, verify_candidates_law = verify.drawn_law, verify.candidates_law


@pytest.mark.parametrize(
    ("law", "fault", "rule"),
    [("drawn_law", flat_law, "without_replacement"), ("candidates_law", greedy_children, "candidates")],
)
def test_a_fault_in_a_law_fails_the_gates(law: str, fault: Any, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, law, fault)
    found = {gate.name: gate for gate in lossless.exact_rounds(trees=1)}
    assert not found[f"{rule}, T 1"].passed
    assert found["greedy, T 0"].passed


def test_a_fault_in_the_draws_fails_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children in sorted order, after the draw."""
    honest = verify.draw_children
    monkeypatch.setattr(verify, "draw_children", lambda *given: honest(*given).sort(-1).values)
    assert not {gate.name: gate for gate in lossless.exact_rounds(trees=1)}["without_replacement, T 1"].passed


def test_a_fault_where_the_draft_is_exhausted_fails_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn uniformly from what is left, but tested as if the drafts had been the first tokens left."""
    honest = verify.remaining

    def wrong(q: Tensor, taken: Tensor) -> Tensor:
        exhausted = q.masked_fill(taken, 0.0).sum(-1, keepdim=True) == 0
        first = torch.zeros_like(q).scatter(-1, taken.int().argmin(-1, keepdim=True), 1.0)
        return torch.where(exhausted, (first + 0.1) / (1 + 0.1 * q.shape[-1]), honest(q, taken))

    monkeypatch.setattr(verify, "remaining", wrong)
    found = {gate.name: gate for gate in lossless.exact_rounds()}
    assert not found["without_replacement, T 1"].passed
    assert found["candidates, T 1"].passed


def test_an_unprocessed_bonus_fails_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """top-p at the nodes, but not where the last token is drawn."""
    honest = verify.candidates_law

    def law(p: Tensor, children: Tensor) -> tuple[Tensor, Tensor]:
        follow, emit = honest(p, children)
        return follow, emit if (children >= 0).any() else (p + 0.1) / (p + 0.1).sum()

    monkeypatch.setattr(verify, "candidates_law", law)
    assert not {gate.name: gate for gate in lossless.exact_rounds(trees=1)}["candidates, T 0.7, top-p 0.8"].passed


def naive_place(p: list[float], token: int, v: float) -> float:
    return sum(w for i, w in enumerate(p) if (-w, i) < (-p[token], token)) + v * p[token]


def test_places_are_counted_in_bins() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(200, 7, generator=generator, dtype=torch.float64)
    p[:, 3] = p[:, 5]  # ties
    p /= p.sum(1, keepdim=True)
    token, v = torch.randint(7, (200,), generator=generator), torch.rand(200, generator=generator, dtype=torch.float64)
    expected = [0] * goodness.BINS
    for row, x, share in zip(p.tolist(), token.tolist(), v.tolist(), strict=True):
        expected[int(naive_place(row, x, share) * goodness.BINS)] += 1
    assert goodness.bins(p, token, v).tolist() == expected


@pytest.mark.parametrize(("penalty", "temperature"), [(1.0, 1.0), (1.5, 0.7)])
def test_places_of_many_texts_are_those_of_each(
    penalty: float, temperature: float, tiny: Callable[..., Verifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By transformers' own logits; tokens before `skip` are left out, and answers that are no longer."""
    verifier = tiny("llama")
    texts = [([5, 6], [7, 8, 9, 10]), ([11, 12, 13], [14]), ([3], [20, 21, 22])]
    sampling = Sampling(temperature, repetition_penalty=penalty)
    monkeypatch.setattr(goodness, "PLANTED", 1.0)  # every token the likeliest
    found = goodness.places(verifier, texts, sampling, 1, torch.Generator().manual_seed(0))
    shares = torch.rand(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[1].tolist()
    expected, planted, drawn = [0] * goodness.BINS, [0] * goodness.BINS, iter(shares)
    for prompt, answer in texts:
        with torch.no_grad():
            logits = verifier.model(torch.tensor([prompt + answer])).logits[0].double()
        for i in range(1, len(answer)):
            x = logits[len(prompt) + i - 1].clone()
            for seen in {*prompt, *answer[:i]}:
                x[seen] = x[seen] / penalty if x[seen] > 0 else x[seen] * penalty
            row, share = (x / temperature).softmax(-1).tolist(), next(drawn)
            expected[int(naive_place(row, answer[i], share) * goodness.BINS)] += 1
            planted[int(naive_place(row, row.index(max(row)), share) * goodness.BINS)] += 1
    assert (found.true.tolist(), found.planted.tolist(), found.tokens) == (expected, planted, 5)


def test_costly_trees_get_fewer_tokens(
    verifier: Verifier, tiny_medusa: Callable[..., DraftHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By nodes: a chain of 3 and one of 6 at 2 : 1, two rules each, and a tree of 60 a tenth of the cheapest."""
    asked: list[tuple[int, int]] = []

    def sample(evaluator: Any, head: Any, tree: Any, sampling: Any, tokens: int, on_tokens: Any) -> goodness.Places:
        asked.append((tree.nodes, tokens))
        return goodness.Places.none()

    monkeypatch.setattr(lossless, "sample", sample)
    monkeypatch.setattr(lossless, "p_value", lambda counts: 0.5)
    evaluator = Evaluator(verifier, some_prompts()[:1], 8)
    drafters, trees = [("head", tiny_medusa(verifier))], [chain(2), chain(5), DynamicTree(8, 10, 60)]
    list(lossless.own_text(evaluator, drafters, trees, [Sampling(1.0)], 31_000))
    assert asked == [(3, 10_000), (3, 10_000), (6, 5_000), (6, 5_000), (60, 1_000)]


def test_other_drafters_and_temperatures(verifier: Verifier, tiny_medusa: Callable[..., DraftHead]) -> None:
    """Each is a case of its own; n-grams have no distribution to draw from, so the rule candidates alone."""
    evaluator = Evaluator(verifier, some_prompts(), 40, batch=32)
    lookup = PromptLookup(verifier.facts.vocab_size, verifier.device)
    drafters: lossless.Drafters = [("prompt_lookup", lookup), ("hierarchical", Hierarchical(lookup, tiny_medusa(verifier)))]
    samplings = [Sampling(0.7, top_k=20), Sampling(1.0, repetition_penalty=1.2)]
    gates = list(lossless.own_text(evaluator, drafters, [chain(2)], samplings, 20_000))
    assert [gate.name for gate in gates[:-2]] == [
        f"{drafter}, {rule}, chain of 3 nodes, T {temperature}"
        for drafter, rules in (("prompt_lookup", ["candidates"]), ("hierarchical", ["candidates", "without_replacement"]))
        for temperature in ("0.7", "1") for rule in rules
    ]  # fmt: skip
    assert [gate.passed for gate in gates] == [True] * 8
    greedy = list(lossless.own_greedy(evaluator, drafters, [chain(3)]))
    assert [(gate.name.split(",")[0], gate.passed) for gate in greedy] == [("prompt_lookup", True), ("hierarchical", True)]


def test_text_of_another_temperature_is_refused(
    verifier: Verifier, tiny_medusa: Callable[..., DraftHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temperature that the loop forgets: what it writes at 0.7 is text of temperature 1."""
    evaluator = Evaluator(verifier, some_prompts(), 40, batch=32)
    honest = verify.probabilities
    forgetful = lambda logits, sampling, present=None: honest(logits, dataclasses.replace(sampling, temperature=1.0), present)  # noqa: E731
    monkeypatch.setattr(verify, "probabilities", forgetful)
    gates = list(lossless.own_text(evaluator, [("head", tiny_medusa(verifier))], [chain(2)], [Sampling(0.7)], 8_000))
    assert [gate.passed for gate in gates[:3]] == [False] * 3


@pytest.fixture
def verifier(tiny: Callable[..., Verifier]) -> Verifier:
    verifier = tiny("llama", initializer_range=0.25)
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
    return verifier


def some_prompts() -> list[Prompt]:
    return [Prompt([3 + i, 7, 11 + i], f"p-{i}", None, "") for i in range(32)]


@pytest.mark.parametrize("kind", ["medusa", "eagle1", "eagle3", "mtp"])
def test_text_of_ones_own_model(kind: str, verifier: Verifier, request: pytest.FixtureRequest) -> None:
    head: DraftHead = request.getfixturevalue(f"tiny_{kind}")(verifier)
    evaluator = Evaluator(verifier, some_prompts(), 40, batch=32)
    trees = [chain(2), StaticTree([[0], [1], [0, 0]]), DynamicTree(2, 2, 5)]
    told: list[int] = []
    gates = list(lossless.own_text(evaluator, [("head", head)], trees, [Sampling(1.0)], 12_000, told.append))
    assert [gate.passed for gate in gates] == [True] * 7
    assert [gate.name.split(", ")[1] for gate in gates[:5]] == [
        "candidates", "without_replacement", "candidates", "without_replacement", "candidates",
    ]  # fmt: skip
    assert sum(told) >= 12_000
    assert gates[5].note == f"{sum(told)} tokens"
    assert gates[-1].value < 1e-6  # the planted bias


def test_text_of_a_wrong_sampler_is_refused(
    verifier: Verifier, tiny_medusa: Callable[..., DraftHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real fault in the loop: after a rejection the token comes from p again."""
    monkeypatch.setattr(verify, "drawn_law", flat_law)
    evaluator = Evaluator(verifier, some_prompts(), 40, batch=32)
    drafters = [("head", tiny_medusa(verifier))]
    gates = lossless.own_text(evaluator, drafters, [chain(2)], [Sampling(1.0)], 16_000)
    assert {gate.name: gate.passed for gate in gates} == {
        "head, candidates, chain of 3 nodes, T 1": True,
        "head, without_replacement, chain of 3 nodes, T 1": False,
        "all of them together": False,
        "planted bias: 5% of tokens the likeliest": True,
    }


def test_greedy_text_in_float32(verifier: Verifier, tiny_medusa: Callable[..., DraftHead]) -> None:
    head = [("head", tiny_medusa(verifier))]
    evaluator = Evaluator(verifier, some_prompts()[:4], 20, batch=4)
    (gate,) = lossless.own_greedy(evaluator, head, [chain(3)])
    assert (gate.passed, gate.value, gate.note) == (True, 0, "4 prompts, 80 tokens, 0 diverge")
    evaluator.plain[2].tokens[5] = (evaluator.plain[2].tokens[5] + 1) % 96
    (gate,) = lossless.own_greedy(evaluator, head, [chain(3)])
    assert (gate.passed, gate.value) == (False, 1)
    assert "p-2 at 5, gap " in gate.note


def test_greedy_text_in_bfloat16_may_part_at_a_near_tie_only(tiny: Callable[..., Verifier]) -> None:
    verifier = tiny("llama")
    verifier.model.to(torch.bfloat16)
    evaluator = Evaluator(verifier, some_prompts()[:2], 12, batch=2)
    for gap, passed in ((0.25, True), (4.0, False)):
        evaluator.divergences = lambda *_, gap=gap: iter(  # type: ignore[method-assign]
            [{"prompt": "p-0", "position": 3, "gap": gap, "best": 20.0}]
        )
        evaluator.__dict__["plain"] = []
        evaluator.decode = lambda *_: ([], {})  # type: ignore[method-assign]
        (gate,) = lossless.own_greedy(evaluator, [("head", None)], [chain(1)])  # type: ignore[list-item]
        assert gate.passed is passed
        assert gate.value == pytest.approx(gap / (2**-7 * 20))
        assert f"gaps {gap:.3g}" in gate.note


@pytest.mark.parametrize("value", [0.0, float("nan")])
@pytest.mark.parametrize("kind", [0, 1])
def test_constant_and_broken_heads_stay_lossless_with_candidates(value: float, kind: int) -> None:
    """Exactly: every outcome of the decoding loop on the tiny model."""
    verifier = tiny.tiny_verifier(3)
    head = tiny.tiny_heads(verifier, 3)[kind]
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(value)
    sampling = Sampling(1.0, "candidates")
    found, _ = tiny.speculative_joint(verifier, head, DynamicTree(2, 2, 4), 3, sampling)
    assert total_variation(found, tiny.plain_joint(verifier, 3, sampling)) < 1e-12


@pytest.mark.parametrize(("kind", "rule"), [(0, "without_replacement"), (1, "candidates")])
def test_rows_of_a_batch_are_sampled_by_themselves(kind: int, rule: Any) -> None:
    """Two prompts of other lengths, every outcome of both: the law of the pair of texts is the product of plain laws."""
    verifier = tiny.tiny_verifier(5)
    head = tiny.tiny_heads(verifier, 5)[kind]
    prompts = [[2, 0, 1, 1], [0, 2]]
    sampling = Sampling(1.0, rule, top_k=2)
    found = torch.zeros(3, 3, 3, 3, dtype=torch.float64)
    for weight, texts in every_outcome(
        lambda draw: [d.tokens for d in speculate(verifier, head, chain(1), prompts, 2, sampling=sampling, draw=draw)[0]]
    ):
        found[tuple(token for text in texts for token in text)] += weight

    def law(ids: list[int]) -> Tensor:
        with torch.no_grad():
            logits = verifier.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        p = logits.softmax(-1)
        p[p.argmin()] = 0  # two of three tokens
        return p / p.sum()

    one, two = (torch.stack([law(ids)[a] * law([*ids, a]) for a in range(3)]) for ids in prompts)
    assert total_variation(found, one[:, :, None, None] * two) < 1e-12


def test_rounds_of_any_rule_emit_at_most_depth_and_one() -> None:
    generator = torch.Generator().manual_seed(2)
    target, drafter = Tables(4, 3, 1.0, generator), Tables(4, 3, 1.0, generator)
    for rule in ("candidates", "without_replacement", "typical"):
        for _, text in every_outcome(lambda draw, r=rule: one_round(target, drafter, chain(2), Sampling(1.0, r), draw)):  # type: ignore[misc]
            assert 1 <= len(text) <= 3


def test_the_tiny_model_is_decoded_by_the_real_loop() -> None:
    """Dice of a seed give one of the texts that the enumeration found."""
    verifier = tiny.tiny_verifier(0)
    head = tiny.tiny_heads(verifier, 0)[0]
    sampling = Sampling(1.0, "without_replacement")
    (answer,), _ = speculate(verifier, head, chain(1), [tiny.PROMPT], 3, sampling=sampling, draw=dice(1))
    joint, _ = tiny.speculative_joint(verifier, head, chain(1), 3, sampling)
    assert joint[tuple(answer.tokens)] > 0
    assert joint.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert enumeration.BEFORE == (0, 1)
