"""Tree search against trying every tree, ranks against full forward passes, and advice against its formula."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from headstart.evaluation.advise import Latency, advise, measure_latency, measured
from headstart.evaluation.decode import speculate
from headstart.evaluation.evaluate import Evaluator, Prompt
from headstart.evaluation.tree import StaticTree, chain
from headstart.evaluation.tree_search import RankCounts, best_tree, chain_tau, count_ranks
from headstart.heads.base import DraftHead
from headstart.heads.verifier import Verifier

Path = tuple[int, ...]


def every_tree(depth: int, ranks: int, nodes: int) -> Iterator[tuple[Path, ...]]:
    """All sets of `nodes` - 1 paths that hold the parent of each."""
    paths = [path for size in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=size)]
    for chosen in itertools.combinations(paths, nodes - 1):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            yield chosen


def worth(shares: list[list[float]], paths: Any) -> float:
    total = 1.0
    for path in paths:
        product = 1.0
        for depth, rank in enumerate(path):
            product *= shares[depth][rank]
        total += product
    return total


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_tree_is_the_best_of_all_trees(seed: int, nodes: int) -> None:
    """Shares need not fall with the rank."""
    rng = random.Random(seed)
    shares = []
    for _ in range(3):
        cuts = sorted(rng.random() for _ in range(2))
        shares.append([cuts[0], cuts[1] - cuts[0]])
    found = best_tree(shares, nodes)
    best = max(worth(shares, paths) for paths in every_tree(3, 2, nodes))
    assert found.tau == pytest.approx(best, abs=1e-12) == worth(shares, found.paths)
    assert (found.tree.nodes, len(set(found.paths))) == (nodes, nodes - 1)


def test_choices_that_are_never_right_are_no_nodes() -> None:
    found = best_tree([[0.5, 0.0, 0.25], [0.0, 0.5]], 32)
    assert sorted(found.paths) == [(0,), (0, 1), (2,), (2, 1)]
    assert found.tau == 1 + 0.5 + 0.25 + 0.25 + 0.125
    assert chain_tau([[0.5, 0.1], [0.25, 0.1]], 2) == 1 + 0.5 + 0.125


@pytest.fixture
def verifier(tiny: Callable[..., Verifier]) -> Verifier:
    verifier = tiny("llama", initializer_range=0.3)
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
    return verifier


@pytest.fixture(params=["medusa", "eagle3"])
def head(request: pytest.FixtureRequest, verifier: Verifier) -> DraftHead:
    return request.getfixturevalue(f"tiny_{request.param}")(verifier)


def some_prompts() -> list[Prompt]:
    rng = random.Random(0)
    return [Prompt([rng.randrange(1, 95) for _ in range(n)], f"p-{n}", None, "") for n in (2, 7, 4)]


def counted_alone(verifier: Verifier, head: DraftHead, prompts: list[Prompt], budget: int, depth: int, ranks: int) -> Any:
    """Position by position in a session of its own: what the head would choose along the true tokens."""
    reached, hits = [0] * depth, [[0] * ranks for _ in range(depth)]
    for prompt in prompts:
        (answer,), _ = speculate(verifier, None, chain(0), [prompt.ids], budget)
        text = prompt.ids + answer.tokens
        for root in range(len(prompt.ids), len(text) - 1):
            session = head.begin(verifier, 1, len(text) + depth)
            ids = torch.tensor([text])
            features = verifier.features(ids[:, :root], head.needs)
            log_q = session.observe(features, ids[:, 1 : root + 1], [root])[0]
            for d in range(depth):
                if root + 1 + d >= len(text):
                    break
                reached[d] += 1
                order = head.target_ids[log_q.argsort(descending=True)].tolist()
                token = text[root + 1 + d]
                if token not in order[:ranks]:
                    break
                hits[d][order.index(token)] += 1
                if d + 1 < depth:
                    log_q = session.expand(torch.tensor([[token]]), torch.tensor([[d - 1]]))[0, 0]
    return reached, hits


def test_ranks_are_those_along_the_verifiers_text(verifier: Verifier, head: DraftHead) -> None:
    """Prompts of three lengths in batches of two, an answer that stops early among them."""
    prompts, budget = some_prompts(), 16
    texts = [speculate(verifier, None, chain(0), [p.ids], budget)[0][0].tokens for p in prompts]
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=(texts[1][5],))
    evaluator = Evaluator(verifier, prompts, budget, batch=2)
    assert len({len(answer.tokens) for answer in evaluator.plain}) > 1
    found = count_ranks(evaluator, head, 3, 12)
    reached, hits = counted_alone(verifier, head, prompts, budget, 3, 12)
    assert (found.reached, found.hits) == (reached, hits)
    assert sum(hits[0]) > 0


def test_the_predicted_tau_of_a_chain_is_that_of_decoding_where_every_position_is_alike(
    verifier: Verifier, tiny_medusa: Any
) -> None:
    """A head that is right half of the time at every position, whatever was accepted before."""
    counts = RankCounts([1000, 500], [[500, 250], [250, 125]])
    assert counts.shares == [[0.5, 0.25], [0.5, 0.25]]
    assert chain_tau(counts.shares, 2) == 1.75
    assert best_tree(counts.shares, 4).tau == 1 + 0.5 + 0.25 + 0.25


def test_advice_is_the_fastest_by_the_formula() -> None:
    """Hand-made latencies: a pass costs 1 up to four nodes and then grows by .1 a node; a level costs .05."""
    latency = Latency({1: 1.0, 4: 1.0, 14: 2.0}, 0.05, {1: 0.05, 16: 0.05}, 0.01)
    ranks = RankCounts([100, 60, 40], [[60, 15, 5], [36, 10, 4], [20, 5, 5]])
    shares = [[0.6, 0.15, 0.05], [0.6, 10 / 60, 4 / 60], [0.5, 0.125, 0.125]]
    rated = {}
    for depth in (1, 2, 3):
        trees = [[(0,) * n for n in range(1, depth + 1)], *(best_tree(shares[:depth], size).paths for size in (4, 14))]
        for paths in trees:
            tree = StaticTree(paths)
            passed = 1.0 if tree.nodes <= 4 else 1.0 + 0.1 * (tree.nodes - 4)
            rated[tuple(tree.paths)] = worth(shares, paths) / (passed + 0.05 * tree.depth + 0.01)
    best = sorted(rated.values(), reverse=True)[:3]
    found = advise(latency, ranks, 2, 14)
    assert [one.speedup for one in found] == pytest.approx(best)
    assert found[0].tau == pytest.approx(worth(shares, found[0].tree.paths))
    assert rated[tuple(found[0].tree.paths)] == pytest.approx(best[0])
    assert {one.batch for one in found} == {2}
    # where verifying is almost free the largest tree is right, where it is dear the smallest
    free, dear = (advise(dataclasses.replace(latency, verify={1: 1.0, 4: v, 14: v}), ranks, 1, 14)[0] for v in (1.0, 9.0))
    assert (free.tree.nodes, dear.tree.nodes) == (14, 2)


def test_latencies_are_measured_and_trees_decoded(verifier: Verifier, head: DraftHead) -> None:
    """Positive seconds for every size, and the measured tau is the one of decoding."""
    prompts = some_prompts()
    evaluator = Evaluator(verifier, prompts, 12)
    latency = measure_latency(evaluator, head, 2, 12, 3)
    assert list(latency.verify) == [1, 2, 4, 8, 12]
    assert min(latency.verify.values()) > 0
    assert min(latency.expand.values()) >= 0
    assert min(latency.observe, latency.other) > 0
    counts = RankCounts([9, 6], [[6, 1], [3, 1]])
    advice = advise(latency, counts, 2, 12)
    for one in measured(evaluator, head, advice, 2):
        decoded, _ = speculate(verifier, head, one.tree, [p.ids for p in prompts], 12)
        rounds = [r.emitted for answer in decoded for r in answer.rounds]
        assert one.measured is not None
        assert one.measured["tau"] == sum(rounds) / len(rounds)
        assert one.measured["speedup"] > 0  # type: ignore[operator]
