"""Tree shapes against a queue and a walk; growing trees against a plain-Python reading of the definition."""

import itertools
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.evaluation.tree import DynamicTree, StaticTree, Tree, ancestry, chain

Path = tuple[int, ...]


class Drafter:
    """A drafting session that knows log q after every path of tokens: rows[b](path) -> list of Q float32 values."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows
        self.paths: list[list[Path]] = [[] for _ in rows]  # of the expanded nodes, in the order they were expanded

    def start(self) -> Tensor:
        return torch.tensor([row(()) for row in self.rows])

    def observe(self, features: Any, next_ids: Tensor, counts: list[int]) -> Tensor:
        raise AssertionError("growing a tree commits nothing")

    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        out = []
        for row, paths, tokens, above in zip(self.rows, self.paths, ids.tolist(), parents.tolist(), strict=True):
            known = len(paths)
            assert all(parent < known for parent in above)
            paths += [((*paths[p], token) if p >= 0 else (token,)) for token, p in zip(tokens, above, strict=True)]
            out.append([row(path) for path in paths[known:]])
        return torch.tensor(out)

    def keep_rows(self, rows: list[int]) -> None:
        raise AssertionError("growing a tree drops nobody")


def random_rows(seed: int, columns: int, grid: bool) -> Any:
    """log q after any path. A grid makes sums of several paths equal, never two columns of one row."""

    def row(path: Path) -> list[float]:
        rng = random.Random(f"{seed}-{path}")
        if grid:
            return [-0.25 * place for place in rng.sample(range(1, columns + 1), columns)]
        return torch.tensor([rng.gauss(0, 2) for _ in range(columns)]).log_softmax(-1).tolist()

    return row


def breadth_first(paths: Sequence[Sequence[int]]) -> list[Path]:
    """All nodes, the root first, by a queue; children by rank."""
    there = {tuple(path) for path in paths}
    order, queue = [], deque([()])
    while queue:
        node = queue.popleft()
        order.append(node)
        queue.extend(sorted(path for path in there if path[:-1] == node))
    return order


def line_up(parents: Sequence[int], node: int) -> list[int]:
    """The node and its ancestors."""
    up = []
    while node >= 0:
        up.append(node)
        node = parents[node]
    return up


def cartesian(widths: Sequence[int]) -> list[Path]:
    """Every combination of ranks, level by level."""
    return [path for depth in range(1, len(widths) + 1) for path in itertools.product(*map(range, widths[:depth]))]


SHAPES = {
    "one": [[0]],
    "fan": [[0], [1], [2]],
    "shuffled": [[0, 0, 0], [1, 0], [0], [0, 1], [1], [0, 0], [2], [0, 1, 1]],
    "twice": [[0], [0], [0, 0]],
    "gaps": [[1], [4], [1, 2], [4, 0], [1, 2, 3]],
    "lopsided": [[0], [1], [2], [2, 0], [2, 0, 0], [2, 0, 0, 0], [2, 0, 0, 1]],
    "cartesian": cartesian([3, 2, 2]),
}


@pytest.mark.parametrize("paths", SHAPES.values(), ids=SHAPES.keys())
def test_a_static_tree_is_in_breadth_first_order(paths: list[list[int]]) -> None:
    order = breadth_first(paths)
    tree = StaticTree(paths)
    parents = [order.index(path[:-1]) if path else -1 for path in order]
    assert tree.paths == order[1:]
    assert (tree.nodes, tree.depth) == (len(order), max(map(len, order)))
    assert tree.parents.tolist() == [parents]
    assert tree.depths.tolist() == [[len(path) for path in order]]
    assert tree.seen.tolist() == [[[j in line_up(parents, i) for j in range(len(order))] for i in range(len(order))]]
    assert tree.describe() == {
        "kind": "static",
        "depth": max(map(len, order)),
        "nodes": len(order),
        "paths": [list(path) for path in order[1:]],
    }


def test_the_size_of_a_cartesian_tree() -> None:
    tree = StaticTree(cartesian([4, 3, 2]))
    assert (tree.nodes, tree.depth) == (1 + 4 + 12 + 24, 3)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_chain_is_a_tree_of_width_one(depth: int) -> None:
    tree = chain(depth)
    assert tree.parents.tolist() == [list(range(-1, depth))]
    assert tree.depths.tolist() == [list(range(depth + 1))]
    assert tree.seen[0].equal(torch.ones(depth + 1, depth + 1, dtype=torch.bool).tril())
    assert tree.describe() == {"kind": "chain", "depth": depth, "nodes": depth + 1}


def test_a_tree_of_depth_0_is_the_root_alone() -> None:
    tree = chain(0)
    assert (tree.nodes, tree.depth, tree.levels) == (1, 0, [])
    grown = tree.grow(Drafter([None]), torch.tensor([7]), torch.zeros(1, 5), torch.arange(5))
    assert [x.tolist() for x in (grown.ids, grown.parents, grown.depth, grown.seen)] == [[[7]], [[-1]], [[0]], [[[True]]]]


def test_an_orphan_is_refused() -> None:
    with pytest.raises(UserError, match=r"^static tree: path \[0, 1\] has no parent \[0\] among the paths$"):
        StaticTree([[1], [0, 1]])


@pytest.mark.parametrize("paths", SHAPES.values(), ids=SHAPES.keys())
def test_a_static_tree_is_filled_by_rank(paths: list[list[int]]) -> None:
    """Node [.., r] is the r-th likeliest token of the draft vocabulary after its parent's tokens."""
    columns = 9
    target_ids = torch.tensor(sorted(random.Random(1).sample(range(50), columns)))
    rows = [random_rows(seed, columns, grid=False) for seed in range(3)]
    drafter = Drafter(rows)
    grown = StaticTree(paths).grow(drafter, torch.tensor([3, 4, 5]), drafter.start(), target_ids)
    order = breadth_first(paths)
    for b, row in enumerate(rows):
        tokens: dict[Path, Path] = {(): ()}
        for path in order[1:]:
            log_q = row(tokens[path[:-1]])
            ranked = sorted(range(columns), key=lambda column, log_q=log_q: -log_q[column])
            tokens[path] = (*tokens[path[:-1]], int(target_ids[ranked[path[-1]]]))
        assert grown.ids[b].tolist() == [3 + b] + [tokens[path][-1] for path in order[1:]]


def test_a_static_tree_expands_only_nodes_with_children() -> None:
    drafter = Drafter([random_rows(0, 9, grid=False)])
    StaticTree(SHAPES["lopsided"]).grow(drafter, torch.tensor([0]), drafter.start(), torch.arange(9))
    assert [len(path) for path in drafter.paths[0]] == [1, 2, 3]


def dynamic_reference(root: int, row: Any, target_ids: list[int], depth: int, k: int, nodes: int) -> dict[str, Any]:
    """The definition read literally, in float32: feed the beam, take top-k children a node, beam = best k of the level's
    pool, in the end the best of all nodes; ties by insertion order."""

    def add(a: float, b: float) -> float:
        return (torch.tensor(a) + torch.tensor(b)).item()

    def best(indices: list[int], count: int) -> list[int]:
        return sorted(indices, key=lambda i: -scores[i])[:count]  # Python's sort is stable

    ids, parents, scores, paths = [root], [-1], [0.0], [()]
    beam = [0]
    for _ in range(depth):
        pool = []
        for node in beam:
            log_q = row(paths[node])
            for column in sorted(range(len(log_q)), key=lambda c, log_q=log_q: -log_q[c])[:k]:
                pool.append(len(ids))
                ids.append(target_ids[column])
                parents.append(node)
                scores.append(log_q[column] if node == 0 else add(scores[node], log_q[column]))
                paths.append((*paths[node], target_ids[column]))
        beam = best(pool, k)
    kept = [0, *sorted(best(list(range(1, len(ids))), nodes - 1))]
    return {
        "ids": [ids[i] for i in kept],
        "parents": [kept.index(parents[i]) if parents[i] >= 0 else -1 for i in kept],
        "depth": [len(paths[i]) for i in kept],
    }


DYNAMIC = [(1, 1, 2), (1, 4, 3), (2, 3, 13), (3, 2, 7), (3, 4, 10), (4, 3, 12), (5, 2, 9), (5, 4, 30), (6, 1, 7)]


@pytest.mark.parametrize("grid", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize(("depth", "k", "nodes"), DYNAMIC)
def test_a_dynamic_tree_is_the_definition(depth: int, k: int, nodes: int, grid: bool) -> None:
    columns = 7
    target_ids = sorted(random.Random(2).sample(range(60), columns))
    for trial in range(6):
        rows = [random_rows(100 * trial + b, columns, grid) for b in range(2)]
        drafter = Drafter(rows)
        tree = DynamicTree(depth, k, nodes)
        grown = tree.grow(drafter, torch.tensor([1, 2]), drafter.start(), torch.tensor(target_ids))
        for b, row in enumerate(rows):
            expected = dynamic_reference(1 + b, row, target_ids, depth, k, nodes)
            assert {name: getattr(grown, name)[b].tolist() for name in expected} == expected
            check_well_formed(grown, b)


def check_well_formed(tree: Tree, row: int) -> None:
    """Parents first, levels in order, every parent there, and a mask that is the parent's plus the node itself."""
    parents, depths = tree.parents[row].tolist(), tree.depth[row].tolist()
    assert parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert depths == sorted(depths) == [len(line_up(parents, node)) - 1 for node in range(len(parents))]
    assert tree.seen[row].tolist() == [[j in line_up(parents, i) for j in range(len(parents))] for i in range(len(parents))]


def test_equal_tokens_give_the_same_tree_at_every_batch_size() -> None:
    """A head that is sure of nothing: which of the equal tokens are children is open, but not open to the neighbours."""
    row = lambda path: torch.zeros(32).log_softmax(-1).tolist()  # noqa: E731
    grown = []
    for batch in (1, 3):
        drafter = Drafter([row] * batch)
        tree = DynamicTree(2, 3, 13).grow(drafter, torch.ones(batch, dtype=torch.long), drafter.start(), torch.arange(32))
        grown += tree.ids.tolist()
        check_well_formed(tree, 0)
        families = [(parent, token) for parent, token in zip(tree.parents[0].tolist(), tree.ids[0].tolist(), strict=True)]
        assert len(set(families)) == 13
    assert grown == grown[:1] * 4


def test_a_certain_child_never_outlives_its_parent() -> None:
    """log q = 0 gives the child its parent's score exactly: the parent stays first."""
    rows = [lambda path: [0.0, -50.0, -60.0]]
    drafter = Drafter(rows)
    for nodes in range(2, 9):
        grown = DynamicTree(4, 2, nodes).grow(Drafter(rows), torch.tensor([9]), drafter.start(), torch.arange(3))
        expected = dynamic_reference(9, rows[0], [0, 1, 2], 4, 2, nodes)
        assert {name: getattr(grown, name)[0].tolist() for name in expected} == expected
        check_well_formed(grown, 0)


@pytest.mark.parametrize(
    ("depth", "k", "asked", "nodes"), [(1, 4, 99, 5), (2, 3, 99, 13), (3, 2, 99, 11), (3, 2, 6, 6), (3, 2, 2, 2), (3, 2, 1, 1)]
)
def test_nodes_count_the_root_and_never_more_than_there_are(depth: int, k: int, asked: int, nodes: int) -> None:
    tree = DynamicTree(depth, k, asked)
    drafter = Drafter([random_rows(0, 5, grid=False)])
    grown = tree.grow(drafter, torch.tensor([0]), drafter.start(), torch.arange(5))
    assert tree.nodes == nodes == grown.ids.shape[1]
    check_well_formed(grown, 0)
    assert tree.describe() == {"kind": "dynamic", "depth": depth, "top_k": k, "nodes": nodes}


@pytest.mark.parametrize("trial", range(10))
def test_ancestry_of_random_trees(trial: int) -> None:
    rng = random.Random(trial)
    parents = [[-1] + [rng.randrange(i) for i in range(1, 12)] for _ in range(3)]
    seen = ancestry(torch.tensor(parents), depth=11)
    assert seen.tolist() == [[[j in line_up(row, i) for j in range(12)] for i in range(12)] for row in parents]
