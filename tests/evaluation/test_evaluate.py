"""The evaluator: every number of a result against a loop of its own, on tiny models."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.evaluation.decode import Decoded, speculate
from headstart.evaluation.evaluate import Evaluator, Prompt, pieces
from headstart.evaluation.look import look
from headstart.evaluation.sampling import GREEDY, Sampling
from headstart.evaluation.tree import AnyTree, DynamicTree, StaticTree, chain
from headstart.heads.base import DraftHead
from headstart.heads.batch import Batch
from headstart.heads.generate import generate
from headstart.heads.verifier import Features, Verifier

TREES: list[AnyTree] = [chain(3), StaticTree([[0], [1], [0, 0], [1, 0]]), DynamicTree(depth=2, top_k=2, nodes=5)]
BUDGET = 14
KINDS = ["medusa", "eagle3"]


class Words:
    """A tokenizer that only writes."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {i}" for i in ids)


def some_prompts(count: int = 6) -> list[Prompt]:
    rng = random.Random(0)
    ids = [[rng.randrange(1, 95) for _ in range(rng.randrange(2, 12))] for _ in range(count)]
    return [Prompt(row, f"p-{i}", ("maths", "chat", None)[i % 3], f"question {i}") for i, row in enumerate(ids)]


@pytest.fixture
def verifier(tiny: Callable[..., Verifier]) -> Verifier:
    verifier = tiny("llama")
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
    return verifier


@pytest.fixture(params=KINDS)
def head(request: pytest.FixtureRequest, verifier: Verifier) -> DraftHead:
    return request.getfixturevalue(f"tiny_{request.param}")(verifier)


def test_a_result_has_the_keys_of_evaluation_json(verifier: Verifier, head: DraftHead) -> None:
    results = Evaluator(verifier, some_prompts(), BUDGET, batch=4).evaluate(head, TREES)
    assert [result["tree"]["kind"] for result in results] == ["chain", "static", "dynamic"]
    for result, tree in zip(results, TREES, strict=True):
        assert result["tree"] == tree.describe()
        assert {"kind", "depth", "nodes"} <= set(result["tree"])
        assert {
            "tree", "temperature", "rounds", "emitted", "drafted", "accepted", "tau", "survival", "conditional",
            "draft_acceptance_rate", "alpha", "identical_to_greedy", "speedup", "overhead", "seconds", "by_category",
            "by_context",
        } <= set(result)  # fmt: skip
        assert {"draft", "verify", "other", "plain"} <= set(result["seconds"])
        assert (result["temperature"], result["identical_to_greedy"], result["divergences"]) == (0.0, True, [])
        assert (result["speedup"], result["overhead"], result["seconds"]["plain"]) == (None, None, None)  # nobody asked
        assert len(result["survival"]) == tree.depth
        assert result["emitted"] == 6 * (BUDGET - 1)
        assert result["tau"] == result["emitted"] / result["rounds"] == pytest.approx(1 + sum(result["survival"]))
        assert result["accepted"] == result["emitted"] - result["rounds"]
        assert result["drafted"] == result["rounds"] * (tree.nodes - 1)
        assert set(result["by_category"]) == {"maths", "chat"}
        assert sum(part["rounds"] for part in result["by_context"].values()) == result["rounds"]
    assert results[0]["conditional"][0] == results[0]["survival"][0]
    assert results[1]["conditional"] is None  # of a chain only
    assert len({result["alpha"] for result in results}) == 1


def test_results_by_temperature(verifier: Verifier, head: DraftHead) -> None:
    """Temperature by temperature, tree by tree; what each result says of its rule, and only greedy text is compared."""
    samplings = [
        GREEDY,
        Sampling(0.7, "typical", seed=3),
        Sampling(1.0, "without_replacement", seed=3),
        Sampling(repetition_penalty=1.5),
    ]
    results = Evaluator(verifier, some_prompts(), BUDGET, batch=4).evaluate(head, TREES[:2], samplings)
    told = [(r["temperature"], r["rule"], r["lossless"], r["identical_to_greedy"], r["divergences"]) for r in results[::2]]
    assert told == [
        (0.0, "greedy", True, True, []),
        (0.7, "typical", False, None, []),
        (1.0, "without_replacement", True, None, []),
        (0.0, "greedy", True, True, []),
    ]
    assert [r["tree"]["kind"] for r in results] == ["chain", "static"] * 4
    assert all(r["emitted"] == 6 * (BUDGET - 1) for r in results)


def test_sampled_decoding_is_timed_against_sampled_decoding(
    verifier: Verifier, head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = Evaluator(verifier, some_prompts(2), 6, timing_prompts=1)
    honest, asked = evaluator.decode, []

    def decode(head: DraftHead | None, *given: Any) -> Any:
        asked.append((head is None, given[-1].temperature if isinstance(given[-1], Sampling) else None))
        return honest(head, *given)

    monkeypatch.setattr(evaluator, "decode", decode)
    assert evaluator.time(head, TREES[:1], Sampling(0.9))[0]["speedup"] > 0
    assert asked == [(True, 0.9), (False, 0.9)] * 4


def test_a_seed_decides_sampled_text_and_nothing_else(verifier: Verifier, head: DraftHead) -> None:
    evaluator = Evaluator(verifier, some_prompts(), BUDGET, batch=4)

    def texts(seed: int) -> list[list[int]]:
        sampling = Sampling(1.0, "without_replacement", seed=seed)
        return [answer.tokens for answer in evaluator.decode(head, TREES[1], evaluator.prompts, 4, sampling)[0]]

    assert texts(1) == texts(1) != texts(2)


def test_the_penalised_text_is_that_of_penalised_full_passes(verifier: Verifier, head: DraftHead) -> None:
    prompts = some_prompts(3)
    sampling = Sampling(repetition_penalty=1.4)
    decoded, _ = Evaluator(verifier, prompts, BUDGET).decode(head, TREES[2], prompts, 3, sampling)
    for prompt, answer in zip(prompts, decoded, strict=True):
        ids = list(prompt.ids)
        for _ in range(BUDGET):
            with torch.no_grad():
                x = verifier.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].tolist()
            x = [(v / 1.4 if v > 0 else v * 1.4) if i in ids else v for i, v in enumerate(x)]
            ids.append(x.index(max(x)))
        assert answer.tokens == ids[len(prompt.ids) :]


def test_the_numbers_do_not_depend_on_the_batch(verifier: Verifier, head: DraftHead) -> None:
    def numbers(batch: int) -> list[dict[str, Any]]:
        results = Evaluator(verifier, some_prompts(3), 12, batch).evaluate(head, TREES)
        return [{k: v for k, v in result.items() if k != "seconds"} for result in results]

    assert numbers(1) == numbers(2)


def test_answers_come_in_the_order_of_the_prompts(verifier: Verifier) -> None:
    prompts = some_prompts()
    told: list[int] = []
    evaluator = Evaluator(verifier, prompts, BUDGET, batch=4, on_prompts=told.append)
    assert [answer.tokens for answer in evaluator.plain] == [generate(verifier, [p.ids], BUDGET)[0] for p in prompts]
    assert told == [4, 2]


def test_a_look_is_the_full_result_in_short(verifier: Verifier, head: DraftHead) -> None:
    evaluator = Evaluator(verifier, some_prompts(), BUDGET, batch=4)
    full = evaluator.evaluate(head, TREES[1:2])[0]
    brief = look(evaluator, head, TREES[1])
    names = ("tau", "survival", "rounds", "emitted", "alpha")
    assert {name: brief[name] for name in names} == {name: full[name] for name in names}
    assert "conditional" not in brief  # of a tree
    chain = look(evaluator, head, TREES[0])
    assert chain["conditional"] == evaluator.evaluate(head, TREES[:1])[0]["conditional"]


def test_another_text_than_the_verifiers_is_reported(verifier: Verifier, head: DraftHead) -> None:
    """A wrong token planted in the plain text: where it stands, and the gap of the verifier's two first choices there."""
    prompts = some_prompts()
    evaluator = Evaluator(verifier, prompts, BUDGET, batch=6)
    true = [list(answer.tokens) for answer in evaluator.plain]
    evaluator.plain[3].tokens[7] = (true[3][7] + 1) % 96
    evaluator.plain[5].tokens[12:] = []  # a text that ends too early
    result = evaluator.evaluate(head, TREES[:1])[0]
    assert result["identical_to_greedy"] is False
    assert [(d["prompt"], d["position"]) for d in result["divergences"]] == [("p-3", 7), ("p-5", 12)]
    for row, at, divergence in zip((3, 5), (7, 12), result["divergences"], strict=True):
        with torch.no_grad():
            logits = verifier.model(input_ids=torch.tensor([prompts[row].ids + true[row][:at]])).logits[0, -1]
        top, second = sorted(logits.tolist(), reverse=True)[:2]
        assert divergence["gap"] == pytest.approx(top - second, abs=1e-4)


def test_the_gap_of_a_penalised_text_is_one_of_penalised_logits(verifier: Verifier, head: DraftHead) -> None:
    sampling, (prompt,) = Sampling(repetition_penalty=1.4), some_prompts(1)
    evaluator = Evaluator(verifier, [prompt], BUDGET)
    text = evaluator.greedy(sampling)[0].tokens
    true = text[:6]
    text[6] = (text[6] + 1) % 96
    (divergence,) = evaluator.evaluate(head, TREES[:1], [sampling])[0]["divergences"]
    ids = prompt.ids + true
    with torch.no_grad():
        x = verifier.model(input_ids=torch.tensor([ids])).logits[0, -1].tolist()
    top, second = sorted(((v / 1.4 if v > 0 else v * 1.4) if i in ids else v for i, v in enumerate(x)), reverse=True)[:2]
    assert divergence["position"] == 6
    assert divergence["gap"] == pytest.approx(top - second, abs=1e-4)
    assert divergence["best"] == pytest.approx(top, abs=1e-4)


def naive_alpha(verifier: Verifier, head: DraftHead, prompts: list[Prompt]) -> float:
    """Σ_v min(p, q) at every answer token but the first (the prefill's): q from a session that has seen the tokens before
    it, p from the model's own logits; the mean over all of them."""
    total, count = 0.0, 0
    for prompt in prompts:
        text = generate(verifier, [prompt.ids], BUDGET)[0]
        sequence = prompt.ids + text
        with torch.no_grad():
            logits = verifier.model(input_ids=torch.tensor([sequence])).logits[0].float()
        states = verifier.features(torch.tensor([sequence]), head.needs)
        for at in range(len(prompt.ids) + 1, len(sequence)):  # the token at this place is drafted
            p = logits[at - 1].softmax(-1).tolist()
            seen = Features(states.last[:, : at - 1], states.layers[:, : at - 1])
            session = head.begin(verifier, 1, len(sequence))
            log_q = session.observe(seen, torch.tensor([sequence[1:at]]), [at - 1])[0]
            total += sum(min(p[token], log_q[column].exp().item()) for column, token in enumerate(head.target_ids.tolist()))
            count += 1
    return total / count


def test_alpha_is_the_overlap_of_head_and_verifier(verifier: Verifier, head: DraftHead) -> None:
    prompts = some_prompts(3)
    found = Evaluator(verifier, prompts, BUDGET).alpha(head)
    assert found == pytest.approx(naive_alpha(verifier, head, prompts), rel=1e-4)
    assert 0 < found < 1


def test_alpha_of_a_head_that_knows_the_verifier_is_one(verifier: Verifier, tiny_medusa: Callable[..., DraftHead]) -> None:
    head = tiny_medusa(verifier)

    def all_knowing(batch: Batch, features: Features, verifier: Verifier, where: torch.Tensor) -> torch.Tensor:
        after = torch.roll(features.last, -1, 1)[where]
        return verifier.logits(after).log_softmax(-1)

    head.first_draft = all_knowing  # type: ignore[method-assign]
    assert Evaluator(verifier, some_prompts(3), BUDGET).alpha(head) == pytest.approx(1.0)


def test_answers_too_short_to_draft_have_no_alpha(verifier: Verifier, head: DraftHead) -> None:
    (result,) = Evaluator(verifier, some_prompts(2), 1).evaluate(head, TREES[:1])
    assert (result["alpha"], result["tau"], result["rounds"], result["identical_to_greedy"]) == (None, None, 0, True)


def test_the_speed_up_is_a_ratio_of_medians(verifier: Verifier, head: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding, then each tree, a warm-up and three turns; seconds and lengths are made up. Per token, since sampled
    answers differ in length: 2 seconds a plain one, of 3 tokens in 6."""
    lengths = {None: 3, "chain": 3, "static": 5}
    seconds = {None: [9.0, 6.0, 5.0, 90.0], "chain": [9.0, 2.0, 40.0, 3.0], "static": [9.0, 1.0, 1.0, 1.0]}
    calls: list[tuple[str | None, int, int]] = []
    evaluator = Evaluator(verifier, some_prompts(6), BUDGET, timing_prompts=2, timing_repeats=3)

    def decode(head: DraftHead | None, tree: AnyTree, prompts: list[Prompt], batch: int, sampling: Sampling) -> Any:
        name = None if head is None else tree.kind
        took = seconds[name][sum(call[0] == name for call in calls)]
        calls.append((name, len(prompts), batch))
        spent = {"prefill": 0.25 * took, "draft": 0.0, "verify": 0.75 * took, "other": 0.0}
        return [Decoded([7] * lengths[name]), Decoded()], spent

    monkeypatch.setattr(evaluator, "decode", decode)
    chain_time, static_time = evaluator.time(head, TREES[:2])
    assert calls == [(name, 1, 1) for name in seconds] + [(name, 2, 1) for name in seconds] * 3
    assert (chain_time["speedup"], static_time["speedup"]) == (6.0 / 3.0, 2.0 / (1.0 / 5))
    assert static_time["seconds"]["plain"] == 10.0
    assert chain_time["seconds"] == {"prefill": 0.75, "draft": 0.0, "verify": 2.25, "other": 0.0, "plain": 6.0}
    assert chain_time["timing"] == {"prompts": 2, "repeats": 3, "batch": 1}


def test_a_timed_result_has_speed_up_and_overhead(verifier: Verifier, head: DraftHead) -> None:
    (result,) = Evaluator(verifier, some_prompts(4), 6, batch=4, timing_prompts=1, timing_repeats=3).evaluate(head, TREES[:1])
    spent = sum(value for name, value in result["seconds"].items() if name != "plain")
    assert spent > 0
    # medians of parts need not add up to the median of sums, yet they are of one order
    assert result["speedup"] == pytest.approx(result["seconds"]["plain"] / spent, rel=0.5)
    assert result["overhead"] == pytest.approx(result["tau"] / result["speedup"])
    assert result["timing"]["repeats"] == 3


def test_no_tokenizer_gives_no_example(verifier: Verifier, head: DraftHead) -> None:
    assert verifier.tokenizer is None
    assert Evaluator(verifier, some_prompts(2), BUDGET).evaluate(head, TREES[:1])[0]["example"] is None


def test_the_example_is_the_answer_in_the_middle(verifier: Verifier, head: DraftHead) -> None:
    verifier.tokenizer = Words()  # type: ignore[assignment]
    prompts = some_prompts(5)
    evaluator = Evaluator(verifier, prompts, 24, batch=5)
    decoded, _ = speculate(verifier, head, TREES[0], [p.ids for p in prompts], 24)
    example = evaluator.evaluate(head, TREES[:1])[0]["example"]
    at = [p.id for p in prompts].index(example["id"])
    rates = sorted(24 / len(answer.rounds) for answer in decoded)
    assert 24 / len(decoded[at].rounds) == rates[2]
    assert (example["prompt"], example["category"]) == (prompts[at].text, prompts[at].category)
    tokens = example["tokens"]
    assert [t["text"] for t in tokens] == [f" {i}" for i in decoded[at].tokens]
    assert [t["source"] for t in tokens] == decoded[at].sources
    assert tokens[0]["round"] == 0
    for number, r in enumerate(decoded[at].rounds, start=1):
        assert sum(t["round"] == number for t in tokens) == r.emitted


def test_no_example_of_a_few_rounds(verifier: Verifier, head: DraftHead) -> None:
    verifier.tokenizer = Words()  # type: ignore[assignment]
    assert Evaluator(verifier, some_prompts(2), 5).evaluate(head, TREES[:1])[0]["example"] is None


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("text", ["plain words", "naïve café", "日本語 and 😀!", "e\u0301", " a  b\n", "👩‍👧"])
def test_pieces_show_a_character_with_its_last_token(text: str, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = byte_tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    expected = [piece for char in text for piece in ["", "", "", char][-len(char.encode()) :]]
    assert pieces(byte_tokenizer, ids) == expected


def test_pieces_of_a_text_that_is_cut_inside_a_character(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = byte_tokenizer("ab日")["input_ids"][:-1]
    assert pieces(byte_tokenizer, ids) == ["a", "b", "", "\ufffd"]
    assert pieces(byte_tokenizer, []) == []


@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_any_bytes_join_to_the_text(seed: int, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Verifiers write broken characters too."""
    rng = random.Random(seed)
    ids = [rng.randrange(256) for _ in range(60)]
    found = pieces(byte_tokenizer, ids)
    assert len(found) == 60
    assert "".join(found) == byte_tokenizer.decode(ids)
