"""What goes wrong between a draft and the text: stop tokens, metrics, parity, positions, scattered caches, batches.

The drafts come from an oracle that knows what the verifier would write, so that acceptance is as deep as a test wants, and
that checks at every round what the decoding loop shows a head.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.evaluation.decode import Decoded, speculate
from headstart.evaluation.metrics import acceptance
from headstart.evaluation.tree import AnyTree, DynamicTree, StaticTree, Tree, ancestry, chain
from headstart.heads.base import DraftHead
from headstart.heads.drafter import DraftSession
from headstart.heads.generate import generate
from headstart.heads.verifier import Features, Verifier

FAMILIES = ["llama", "qwen3", "gpt2", "gemma2", "mistral"]
MORE_FAMILIES = ["llama3rope", "llama_biased", "llama_tied", "llama_wide", "qwen2", "qwen2_hybrid", "qwen3_moe", "mixtral",
                 "gemma", "gemma3", "phi", "phi3", "stablelm", "gpt_neox", "granite", "cohere", "cohere2", "olmo2", "olmo3",
                 "gpt_oss", "deepseek_v3"]  # fmt: skip
TREES: dict[str, AnyTree] = {
    "chain": chain(3),
    "static": StaticTree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 1], [0, 0, 0], [0, 1, 0], [2, 1, 1]]),
    "dynamic": DynamicTree(depth=3, top_k=3, nodes=9),
}
LAYERS = (1, 3)  # the states that the oracle asks for and checks

Rank = Callable[[int, int], int]  # (row, index in the text) -> how-manieth child the true token is


class Oracle(DraftHead):
    """Proposes the verifier's own text; `rank` says as the how-manieth child. A rank of 50 is as good as never."""

    kind = "oracle"

    def __init__(self, verifier: Verifier, prompts: Sequence[list[int]], texts: Sequence[list[int]], rank: Rank) -> None:
        super().__init__()
        self.starts = [len(prompt) for prompt in prompts]
        self.sequences = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        self.states = [verifier.features(torch.tensor([sequence]), LAYERS) for sequence in self.sequences]
        self.rank = rank
        self.register_buffer("target_ids", torch.arange(verifier.facts.vocab_size))

    @property
    def needs(self) -> tuple[int, ...]:
        return LAYERS

    @property
    def depth(self) -> None:
        return None

    def supervised(self, *arguments: Any) -> Tensor:
        raise AssertionError("an oracle does not learn")

    loss = predictions = supervised

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> "OracleSession":
        return OracleSession(self, list(range(batch)))


class OracleSession(DraftSession):
    def __init__(self, head: Oracle, rows: list[int]) -> None:
        self.head, self.rows = head, rows
        self.committed = [0] * len(rows)
        self.depths: list[list[int]] = []

    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        for i, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            here = slice(self.committed[i], self.committed[i] + count)
            following = slice(here.start + 1, here.stop + 1)
            assert next_ids[i, :count].tolist() == self.head.sequences[row][following]
            own = self.head.states[row]
            torch.testing.assert_close(features.last[i, :count], own.last[0, here], atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(features.layers[i, :count], own.layers[0, here], atol=1e-3, rtol=1e-3)
            self.committed[i] += count
        self.depths = [[] for _ in self.rows]
        return torch.stack([self.log_q(i, 0) for i in range(len(self.rows))])

    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        for depths, above in zip(self.depths, parents.tolist(), strict=True):
            depths += [1 + (depths[parent] if parent >= 0 else 0) for parent in above]
        return torch.stack(
            [torch.stack([self.log_q(i, depth) for depth in self.depths[i][-ids.shape[1] :]]) for i in range(len(self.rows))]
        )

    def log_q(self, i: int, depth: int) -> Tensor:
        """After a node at `depth`: the true token at the rank that the oracle was told, other tokens around it."""
        row, vocab = self.rows[i], len(self.head.target_ids)
        index = self.committed[i] + depth + 1
        true = self.head.sequences[row][index]
        order = [(true + 1 + j) % vocab for j in range(vocab - 1)]
        order.insert(self.head.rank(row, index - self.head.starts[row]), true)
        places = torch.empty(vocab)
        places[torch.tensor(order)] = torch.arange(float(vocab))
        return (-places).log_softmax(-1)

    def keep_rows(self, rows: list[int]) -> None:
        self.rows, self.committed = [self.rows[i] for i in rows], [self.committed[i] for i in rows]


def stopping_at(verifier: Verifier, *ids: int) -> Verifier:
    """The same verifier with another list of stop tokens."""
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=ids)
    return verifier


def by_full_forward(verifier: Verifier, prompt: list[int], tokens: int) -> list[int]:
    """Greedy text without any cache, from the model's own logits, through stop tokens."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(verifier.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def some_prompts(count: int, longest: int = 14, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 95) for _ in range(rng.randrange(1, longest + 1))] for _ in range(count)]


def first(row: int, index: int) -> int:
    return 0


def never(row: int, index: int) -> int:
    return 50


def scattered(row: int, index: int) -> int:
    """Often the first child, sometimes a later one, now and then none of them."""
    return random.Random(f"{row}-{index}").choice([0, 0, 0, 0, 1, 1, 2, 2, 50])


def tokens_of(decoded: Sequence[Decoded]) -> list[list[int]]:
    return [answer.tokens for answer in decoded]


@pytest.fixture
def llama(tiny: Callable[..., Verifier]) -> Verifier:
    """Never stops by itself."""
    return stopping_at(tiny("llama"))


def make_oracle(verifier: Verifier, prompts: list[list[int]], tokens: int, rank: Rank) -> tuple[Oracle, list[list[int]]]:
    """An oracle that also knows what comes behind the budget, and the verifier's text."""
    texts = [by_full_forward(verifier, prompt, tokens + 8) for prompt in prompts]
    return Oracle(verifier, prompts, texts, rank), texts


def test_case_27_a_stop_token_inside_an_accepted_block_ends_the_answer(llama: Verifier) -> None:
    """Blocks of five: the second holds tokens 6 to 10 of the answer, and both ids of the stop list are new words in it."""
    ended = 0
    for prompt in some_prompts(6):
        oracle, (text,) = make_oracle(stopping_at(llama), [prompt], 40, first)
        new = [at for at in range(6, 10) if text[at] not in text[:at]]
        if len(new) < 2:
            continue
        ended += 1
        at = new[0]
        for stops in ((text[at], text[new[1]]), (text[new[1]], text[at])):
            (answer,), _ = speculate(stopping_at(llama, *stops), oracle, chain(4), [prompt], 40)
            assert answer.tokens == text[: at + 1]
            assert answer.sources == ["prefill", *["drafted"] * 4, "bonus", *["drafted"] * (at - 5)]
            assert [r.emitted for r in answer.rounds] == [5, at - 5]
            assert acceptance(answer.rounds, 4)["emitted"] == at
    assert ended


def test_case_27_every_id_of_the_stop_list_counts(llama: Verifier) -> None:
    prompt = [9, 4]
    oracle, (text,) = make_oracle(llama, [prompt], 24, first)
    for at, stop in enumerate(text[:12]):
        (answer,), _ = speculate(stopping_at(llama, 0, stop, text[0] if at == 0 else 0), oracle, chain(3), [prompt], 24)
        expected = text[: text.index(stop) + 1]
        assert answer.tokens == expected
        assert generate(llama, [prompt], 24) == [expected]


def test_case_27_an_answer_that_is_a_stop_token_alone_has_no_rounds(llama: Verifier) -> None:
    prompt = [5, 6, 7]
    oracle, (text,) = make_oracle(llama, [prompt], 8, first)
    (answer,), _ = speculate(stopping_at(llama, text[0]), oracle, chain(4), [prompt], 8)
    assert (answer.tokens, answer.sources, answer.rounds) == (text[:1], ["prefill"], [])


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_case_27_a_row_that_stops_at_once_leaves_the_others_alone(kind: str, llama: Verifier, request: Any) -> None:
    """It leaves the batch before any head has seen a token."""
    prompts = [[5, 6, 7], [8], [9, 10]]
    head = request.getfixturevalue(f"tiny_{kind}")(llama)
    stop = by_full_forward(llama, prompts[1], 1)[0]
    expected = generate(stopping_at(llama, stop), prompts, 12)
    assert len(expected[1]) == 1
    assert [len(answer) > 1 for answer in expected] == [True, False, True]
    assert tokens_of(speculate(llama, head, chain(2), prompts, 12)[0]) == expected


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_case_28_a_head_that_is_always_right_gives_depth_plus_one(depth: int, llama: Verifier) -> None:
    rounds = 4
    budget = 1 + rounds * (depth + 1)  # the token of the prefill belongs to no round
    prompts = some_prompts(3)
    oracle, texts = make_oracle(llama, prompts, budget, first)
    for tree in (chain(depth), DynamicTree(depth, 1, depth + 1)):
        decoded, _ = speculate(llama, oracle, tree, prompts, budget)
        assert tokens_of(decoded) == [text[:budget] for text in texts]
        found = acceptance([r for answer in decoded for r in answer.rounds], depth)
        assert (found["tau"], found["rounds"], found["draft_acceptance_rate"]) == (depth + 1, 3 * rounds, 1.0)
        assert found["survival"] == [1.0] * depth
        for prompt, answer in zip(prompts, decoded, strict=True):
            assert [r.context for r in answer.rounds] == [len(prompt) + i * (depth + 1) for i in range(rounds)]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_case_28_a_head_that_is_always_wrong_gives_one(tree: AnyTree, llama: Verifier) -> None:
    prompts = some_prompts(3)
    oracle, texts = make_oracle(llama, prompts, 12, never)
    decoded, _ = speculate(llama, oracle, tree, prompts, 12)
    assert tokens_of(decoded) == [text[:12] for text in texts]
    found = acceptance([r for answer in decoded for r in answer.rounds], tree.depth)
    assert (found["tau"], found["accepted"], found["rounds"]) == (1.0, 0, 3 * 11)
    assert found["drafted"] == 3 * 11 * (tree.nodes - 1)
    assert found["survival"] == [0.0] * tree.depth


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_case_30_greedy_parity(family: str, kind: str, tiny: Callable[..., Verifier], request: Any) -> None:
    """Random heads, 20 prompts, 64 tokens, every kind of tree: token for token what the verifier writes alone."""
    verifier = tiny(family)
    head = request.getfixturevalue(f"tiny_{kind}")(verifier)
    prompts = some_prompts(20)
    expected = generate(verifier, prompts, 64)
    assert sum(map(len, expected)) > 20 * 20  # no easy text
    for prompt, text in zip(prompts[:2], expected, strict=False):
        assert by_full_forward(verifier, prompt, len(text)) == text
    for tree in TREES.values():
        assert tokens_of(speculate(verifier, head, tree, prompts, 64)[0]) == expected


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in MORE_FAMILIES)])
def test_case_30_parity_with_deep_acceptance(family: str, tiny: Callable[..., Verifier]) -> None:
    """The true token is sometimes the first child, sometimes the third, sometimes none."""
    verifier = stopping_at(tiny(family))
    prompts = some_prompts(4, seed=1)
    oracle, texts = make_oracle(verifier, prompts, 28, scattered)
    for name, tree in TREES.items():
        decoded, _ = speculate(verifier, oracle, tree, prompts, 28)
        assert tokens_of(decoded) == [text[:28] for text in texts], name
        found = acceptance([r for answer in decoded for r in answer.rounds], tree.depth)
        assert found["survival"][1] > (0.1 if name == "chain" else 0.2), name
        assert 0 < found["survival"][2] < 1, name


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_case_31_every_node_has_the_logits_of_its_path_alone(family: str, tiny: Callable[..., Verifier]) -> None:
    """A prefix of 8, the root, two children, two grandchildren: positions 8, 9, 9, 10, 10."""
    verifier = tiny(family)
    prefix, nodes, parents = list(range(11, 19)), [20, 21, 22, 23, 24], [-1, 0, 0, 1, 2]
    seen = ancestry(torch.tensor([parents]), 2)
    depth = seen.sum(-1) - 1
    assert depth.tolist() == [[0, 1, 1, 2, 2]]
    cache = verifier.new_cache(1, 20)
    verifier.prefill([prefix], cache)
    logits = verifier.logits(verifier.decode(torch.tensor([nodes]), seen, depth, cache).last)[0]
    for node, path in enumerate([[20], [20, 21], [20, 22], [20, 21, 23], [20, 22, 24]]):
        with torch.no_grad():
            alone = verifier.model(input_ids=torch.tensor([prefix + path]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[node], alone, atol=1e-5 * alone.abs().max().item(), rtol=0)


def test_case_32_scattered_nodes_are_committed_densely(tiny: Callable[..., Verifier]) -> None:
    """Nodes 0, 2 and 4 of five are accepted, three rounds long; then the cache equals a fresh prefill."""
    verifier = stopping_at(tiny("llama"))
    prompt = [7, 8, 9]
    text = by_full_forward(verifier, prompt, 16)
    shape = StaticTree([[0], [1], [0, 0], [1, 0]])
    cache = verifier.new_cache(1, 32)
    verifier.prefill([prompt], cache)
    for number in range(3):
        root, child, grandchild = text[3 * number : 3 * number + 3]
        ids = torch.tensor([[root, (child + 1) % 96, child, (grandchild + 1) % 96, grandchild]])
        tree = Tree(ids, shape.parents, shape.depths, shape.seen)
        features = verifier.decode(ids, tree.seen, tree.depth, cache, LAYERS)
        assert verifier.logits(features.last)[0, [0, 2, 4]].argmax(-1).tolist() == text[3 * number + 1 : 3 * number + 4]
        cache.commit(torch.tensor([[0, 2, 4]]), [3])
    fresh = verifier.new_cache(1, 32)
    verifier.prefill([prompt + text[:9]], fresh)
    assert cache.lengths == fresh.lengths == [12]
    for mine, own in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(mine.keys[:, :, :12], own.keys[:, :, :12], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine.values[:, :, :12], own.values[:, :, :12], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_case_32_after_the_loop_the_cache_is_that_of_a_fresh_prefill(
    tree: AnyTree, llama: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(llama, "new_cache", lambda *sizes: made.append(Verifier.new_cache(llama, *sizes)) or made[-1])
    prompt = [5, 6, 7]
    oracle, (text,) = make_oracle(llama, [prompt], 30, scattered)
    (answer,), _ = speculate(llama, oracle, tree, [prompt], 30)
    (cache,) = made
    (length,) = cache.lengths
    assert {"prefill", "drafted", "bonus"} == set(answer.sources)
    assert 0 <= length - (3 + 29) <= tree.depth  # all but the last token, and drafts accepted beyond the budget
    fresh = Verifier.new_cache(llama, 1, length)
    llama.prefill([(prompt + text)[:length]], fresh)
    for mine, own in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(mine.keys[:, :, :length], own.keys, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(mine.values[:, :, :length], own.values, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_case_34_a_batch_decodes_as_its_rows_alone(family: str, kind: str, tiny: Callable[..., Verifier], request: Any) -> None:
    """Prompts of 2, 5 and 9 tokens: the same tokens, sources and rounds."""
    verifier = tiny(family)
    head = request.getfixturevalue(f"tiny_{kind}")(verifier)
    prompts = [[3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
    for tree in TREES.values():
        together, _ = speculate(verifier, head, tree, prompts, 12)
        alone = [speculate(verifier, head, tree, [prompt], 12)[0][0] for prompt in prompts]
        assert together == alone


def test_case_34_a_batch_with_deep_acceptance_decodes_as_its_rows_alone(llama: Verifier) -> None:
    prompts = some_prompts(4, seed=3)
    texts = [by_full_forward(llama, prompt, 28) for prompt in prompts]
    for tree in TREES.values():
        together, _ = speculate(llama, Oracle(llama, prompts, texts, scattered), tree, prompts, 20)
        alone = [
            speculate(llama, Oracle(llama, [prompt], [text], lambda _, at, row=row: scattered(row, at)), tree, [prompt], 20)
            for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        ]
        assert together == [decoded[0] for decoded, _ in alone]
