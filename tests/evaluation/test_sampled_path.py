"""Verification at temperatures above 0: laws of a node against their definition, and the walk against the laws."""

import random
from fractions import Fraction
from typing import Any

import pytest
import torch

from headstart.evaluation.controls import in_turn
from headstart.evaluation.sampling import Sampling, dice, draw_children
from headstart.evaluation.tree import StaticTree, Tree, ancestry
from headstart.evaluation.verify import Judge, candidates_law, drawn_law, sampled_path, typical_path

Law = tuple[list[Fraction], list[Fraction]]


def recursive_rejection(p: list[Fraction], children: list[tuple[int, list[Fraction]]]) -> Law:
    """The rule, in fractions: r = p; accept x with probability min(1, r[x] / q[x]), else r = norm((r - q)+)."""
    r, reached, follow = p, Fraction(1), []
    for x, q in children:
        accept = min(Fraction(1), r[x] / q[x])
        follow.append(reached * accept)
        reached *= 1 - accept
        rest = [max(Fraction(0), a - b) for a, b in zip(r, q, strict=True)]
        r = [v / sum(rest) for v in rest] if sum(rest) else r
    return follow, [reached * v for v in r]


def shares(rng: random.Random, size: int) -> list[Fraction]:
    weights = [Fraction(rng.randrange(1, 20)) for _ in range(size)]
    return [w / sum(weights) for w in weights]


def floats(rows: Any) -> torch.Tensor:
    return torch.tensor([[float(v) for v in row] for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("seed", range(6))
def test_the_law_of_drawn_children_is_recursive_rejection(seed: int) -> None:
    """Rows with three, two, one and no children, in one batch."""
    rng = random.Random(seed)
    ps, laws, ids, qs = [], [], [], []
    for count in (3, 2, 1, 0):
        p, q = shares(rng, 5), shares(rng, 5)
        drawn = rng.sample(range(5), count)
        children = []
        for i, x in enumerate(drawn):
            left = [Fraction(0) if v in drawn[:i] else w for v, w in enumerate(q)]
            children.append((x, [w / sum(left) for w in left]))
        ps.append(p)
        laws.append(recursive_rejection(p, children))
        ids.append(drawn + [-1] * (3 - count))
        qs.append([*(its for _, its in children), *[[Fraction(0)] * 5] * (3 - count)])
    follow, emit = drawn_law(floats(ps), torch.tensor(ids), torch.stack([floats(q) for q in qs]))
    for row, (wanted_follow, wanted_emit) in enumerate(laws):
        count = len(wanted_follow)
        torch.testing.assert_close(follow[row : row + 1, :count], floats([wanted_follow]), atol=1e-15, rtol=1e-14)
        assert follow[row, count:].tolist() == [0.0] * (3 - count)
        torch.testing.assert_close(emit[row : row + 1], floats([wanted_emit]), atol=1e-15, rtol=1e-14)


def test_the_law_of_candidates_is_a_draw_from_p() -> None:
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    follow, emit = candidates_law(p, torch.tensor([[3, 0], [1, -1], [-1, -1]]))
    assert follow.tolist() == [[0.4, 0.1], [0.3, 0.0], [0.0, 0.0]]
    assert emit.tolist() == [[0.0, 0.2, 0.3, 0.0], [0.4, 0.0, 0.2, 0.1], [0.25] * 4]


def test_candidates_are_children_drawn_from_a_certainty() -> None:
    p = torch.rand(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p /= p.sum(1, keepdim=True)
    children = torch.tensor([[0, 1, 2], [5, 3, 1], [4, 2, 0], [1, 5, 4]])
    certain = torch.nn.functional.one_hot(children, 6).double()
    for ours, theirs in zip(candidates_law(p, children), drawn_law(p, children, certain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-15, rtol=0)


def test_case_29_a_likeliest_draft_judged_with_q_shifts_the_distribution() -> None:
    """p = [.6, .4], q = [.8, .2] and the likeliest draft: the rule for drawn children would give [.75, .25]; candidates, p."""
    p, q = torch.tensor([[0.6, 0.4]], dtype=torch.float64), torch.tensor([[[0.8, 0.2]]], dtype=torch.float64)
    child = torch.tensor([[0]])
    follow, emit = drawn_law(p, child, q)
    assert [(follow[0, 0] + emit[0, 0]).item(), emit[0, 1].item()] == pytest.approx([0.75, 0.25])
    follow, emit = candidates_law(p, child)
    assert [(follow[0, 0] + emit[0, 0]).item(), emit[0, 1].item()] == pytest.approx([0.6, 0.4])


def chi_square(counts: dict[Any, int], law: dict[Any, float]) -> float:
    total = sum(counts.values())
    assert {key for key, count in counts.items() if count} <= {key for key, p in law.items() if p > 0}
    return sum((counts.get(key, 0) - total * p) ** 2 / (total * p) for key, p in law.items() if p > 0)


@pytest.mark.parametrize("rule", ["candidates", "without_replacement"])
def test_the_walk_follows_the_laws(rule: Any) -> None:
    """30,000 rows at once over a tree of two levels: how often each end of the walk comes, against the product of the laws."""
    shape = StaticTree([[0], [1], [0, 0]])
    rows, vocab = 30_000, 4
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, vocab, generator=generator, dtype=torch.float64)
    p = logits.softmax(-1)
    log_q = torch.randn(2, vocab, generator=generator, dtype=torch.float64).log_softmax(
        -1
    )  # after the root, after its first child
    sampling = Sampling(1.0, rule)
    draw = dice(9)

    class Session:
        def expand(self, ids: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
            return log_q[1].expand(rows, 1, -1)

    judge = Judge(sampling, draw, shape, [[0]] * rows, vocab, torch.device("cpu"))
    root = torch.zeros(rows, dtype=torch.long)
    tree = shape.grow(Session(), root, log_q[0].expand(rows, -1), torch.arange(vocab), judge.draw)  # type: ignore[arg-type]
    path, accepted, bonus = judge.path(tree, judge.read(logits.expand(rows, -1, -1)))
    assert torch.equal((path[:, 1:] != path[:, :-1]).sum(1), accepted)

    tokens = tree.ids.gather(1, path)
    counts: dict[Any, int] = {}
    for a, first, second, last in zip(accepted.tolist(), *tokens[:, 1:].T.tolist(), bonus.tolist(), strict=True):
        text = (*(first, second)[:a], last)
        counts[text[:2]] = counts.get(text[:2], 0) + 1
    # whatever the round's length, its first token has p[0]; a second one has p after the child it follows
    firsts = {v: sum(n for text, n in counts.items() if text[0] == v) for v in range(vocab)}
    assert chi_square(firsts, dict(enumerate(p[0].tolist()))) < 16.3  # three degrees of freedom: one seed in a thousand
    ends = path[:, -1]
    for node in (1, 2, 3):
        here = bonus[ends == node].bincount(minlength=vocab)
        # at node 1 the walk ends only where its child was not taken: the bonus has the law of `emit`
        q1 = log_q[1].exp()
        if node == 1 and rule == "without_replacement":
            emit = (p[1] - q1).clamp(min=0)
        elif node == 1:
            emit = p[1].clone()
            emit[tree.ids[0, 3]] = 0
        else:
            emit = p[node]
        emit = emit / emit.sum()
        assert chi_square(dict(enumerate(here.tolist())), dict(enumerate(emit.tolist()))) < 16.3


def test_rows_with_other_trees_and_lengths_walk_by_themselves() -> None:
    """At top-k 1 the walk is greedy: each row follows its own argmax in its own tree."""
    parents = torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0]])
    seen = ancestry(parents, 4)
    tree = Tree(torch.tensor([[9, 1, 2, 3, 4], [9, 5, 6, 7, 8], [9, 1, 2, 3, 4]]), parents, seen.sum(-1) - 1, seen)
    choice = torch.tensor([[2, 0, 4, 0, 6], [5, 6, 0, 0, 0], [7, 0, 0, 0, 0]])
    logits = torch.nn.functional.one_hot(choice, 10).double()
    path, accepted, bonus = sampled_path(tree, logits, 4, 4, Sampling(1.0, top_k=1), dice(0))
    assert path.tolist() == [[0, 2, 4, 4, 4], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]
    assert accepted.tolist() == [2, 2, 0]
    assert bonus.tolist() == [6, 0, 7]


def test_the_penalty_knows_the_prompt_and_the_path() -> None:
    """The likeliest token everywhere is 3, then 2, then 1; a penalty of 100 forbids what the text has already."""
    parents = torch.tensor([[-1, 0, 1]])
    seen = ancestry(parents, 2)
    tree = Tree(torch.tensor([[3, 2, 1]]), parents, seen.sum(-1) - 1, seen)
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0, 3.5]).expand(1, 3, -1)
    judge = Judge(Sampling(repetition_penalty=100.0), dice(0), StaticTree([[0], [0, 0]]), [[4, 4]], 5, torch.device("cpu"))
    path, accepted, bonus = judge.path(tree, judge.read(logits))
    assert (path.tolist(), accepted.tolist(), bonus.tolist()) == ([[0, 1, 2]], [2], [0])
    assert judge.present is not None
    assert judge.present.tolist() == [[False, True, True, True, True]]


@pytest.mark.parametrize("seed", range(8))
def test_typical_acceptance_takes_the_deepest_likely_path(seed: int) -> None:
    rng = random.Random(seed)
    parents = [-1]
    ids = [0]
    for _ in range(11):
        parents.append(rng.randrange(len(parents)))
        ids.append(rng.randrange(6))
    order = sorted(range(12), key=lambda n: (len(up(parents, n)), n))
    place = {old: new for new, old in enumerate(order)}
    parents, ids = [place.get(parents[old], -1) for old in order], [ids[old] for old in order]
    logits = torch.randn(12, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    p = logits.softmax(-1)

    def fine(node: int) -> bool:
        row = p[parents[node]]
        entropy = -sum(v * torch.log(v) for v in row)
        return bool(row[ids[node]] > min(0.09, 0.3 * torch.exp(-entropy)))

    good = [n for n in range(12) if all(fine(m) for m in up(parents, n)[:-1])]
    best = max(good, key=lambda n: (len(up(parents, n)), -n))
    table = torch.tensor([parents])
    seen = ancestry(table, 11)
    depths = seen.sum(-1) - 1
    tree = Tree(torch.tensor([ids]), table, depths, seen)
    depth = int(depths.max())
    path, accepted, bonus = typical_path(tree, logits[None], depth, Sampling(1.0, "typical"), dice(seed))
    expected = up(parents, best)[::-1]
    assert path[0].tolist() == expected + [best] * (depth + 1 - len(expected))
    assert accepted.tolist() == [len(expected) - 1]
    assert 0 <= int(bonus) < 6


def up(parents: list[int], node: int) -> list[int]:
    """The node and what stands above it."""
    line = [node]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    return line


def test_a_gap_in_the_ranks_does_not_skip_a_draw() -> None:
    """Paths [0] and [2]: two children, the first and the second that are drawn."""
    shape = StaticTree([[0], [2], [2, 1]])
    assert (shape.width, [level.turns for level in shape.levels]) == (2, [[0, 1], [0]])
    asked: list[int] = []

    def draw(log_q: torch.Tensor, count: int) -> torch.Tensor:
        asked.append(count)
        return draw_children(log_q, count, 1.0, dice(0))

    class Session:
        def expand(self, ids: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
            return torch.zeros(1, ids.shape[1], 5)

    tree = shape.grow(Session(), torch.tensor([0]), torch.zeros(1, 5), torch.arange(10, 15), draw)  # type: ignore[arg-type]
    assert asked == [2, 1]
    assert tree.drawn is not None
    assert tree.drawn.log_q.shape == (1, 2, 5)
    assert tree.drawn.slots.tolist() == [0, 0, 1, 0]
    assert torch.equal(tree.drawn.columns[:, 1:] + 10, tree.ids[:, 1:])


def test_in_turn_is_q_without_the_earlier_children() -> None:
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    found = in_turn(q, torch.tensor([[1, 0]]))
    torch.testing.assert_close(found, torch.tensor([[[0.5, 0.3, 0.2], [0.5 / 0.7, 0.0, 0.2 / 0.7]]], dtype=torch.float64))
