"""The greedy walk against brute force: of all paths that the verifier would have written, the longest."""

import random
from itertools import pairwise

import pytest
import torch

from headstart.evaluation.tree import Tree, ancestry
from headstart.evaluation.verify import greedy_path


def random_tree(rng: random.Random, nodes: int, vocabulary: int) -> tuple[list[int], list[int]]:
    """Parents and tokens; children of one node are different tokens."""
    parents, ids = [-1], [rng.randrange(vocabulary)]
    while len(parents) < nodes:
        parent, token = rng.randrange(len(parents)), rng.randrange(vocabulary)
        if all((parents[i], ids[i]) != (parent, token) for i in range(1, len(parents))):
            parents.append(parent)
            ids.append(token)
    return parents, ids


def to_root(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def brute_force(parents: list[int], ids: list[int], choice: list[int]) -> list[int]:
    """The longest path from the root whose every token is the verifier's choice at the node before."""
    paths = [to_root(parents, node) for node in range(len(parents))]
    agreed = [p for p in paths if all(ids[b] == choice[a] for a, b in pairwise(p))]
    return max(agreed, key=len)


@pytest.mark.parametrize("trial", range(20))
def test_the_walk_is_the_longest_path_that_agrees(trial: int) -> None:
    rng = random.Random(trial)
    nodes, vocabulary = rng.choice([(2, 2), (6, 3), (15, 3), (24, 4)])
    rows = [random_tree(rng, nodes, vocabulary) for _ in range(4)]
    choice = [[rng.randrange(vocabulary) for _ in range(nodes)] for _ in rows]
    parents = torch.tensor([row[0] for row in rows])
    seen = ancestry(parents, nodes)
    depths = seen.sum(-1) - 1
    depth = int(depths.max())
    tree = Tree(torch.tensor([row[1] for row in rows]), parents, depths, seen)
    path, accepted, bonus = greedy_path(tree, torch.tensor(choice), depth)
    assert path.shape == (4, depth + 1)
    for b, (above, ids) in enumerate(rows):
        expected = brute_force(above, ids, choice[b])
        count = len(expected) - 1
        assert accepted[b] == count
        assert path[b].tolist() == expected + expected[-1:] * (depth - count)
        assert bonus[b] == choice[b][expected[-1]]


def test_some_random_trees_are_walked_deep() -> None:
    """The test above would prove nothing if every path ended at the root."""
    rng = random.Random(0)
    counts = []
    for _ in range(50):
        above, ids = random_tree(rng, 24, 4)
        counts.append(len(brute_force(above, ids, [rng.randrange(4) for _ in range(24)])) - 1)
    assert max(counts) >= 3
    assert min(counts) == 0


def test_the_rows_of_a_static_tree_share_its_parents() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 2]])
    ids = torch.tensor([[9, 1, 2, 3, 3], [9, 1, 2, 3, 3], [9, 1, 2, 3, 3]])
    choice = torch.tensor([[1, 3, 0, 7, 0], [2, 0, 3, 0, 8], [5, 3, 3, 0, 0]])
    path, accepted, bonus = greedy_path(Tree(ids, parents, torch.tensor([[0, 1, 1, 2, 2]]), ancestry(parents, 2)), choice, 2)
    assert path.tolist() == [[0, 1, 3], [0, 2, 4], [0, 0, 0]]
    assert accepted.tolist() == [2, 2, 0]
    assert bonus.tolist() == [7, 8, 5]


def test_a_root_alone_gives_the_verifiers_choice() -> None:
    parents = torch.tensor([[-1]])
    tree = Tree(torch.tensor([[4], [5]]), parents, torch.tensor([[0]]), ancestry(parents, 0))
    path, accepted, bonus = greedy_path(tree, torch.tensor([[6], [7]]), 0)
    assert (path.tolist(), accepted.tolist(), bonus.tolist()) == ([[0], [0]], [0, 0], [6, 7])


def test_a_match_that_is_not_a_child_does_not_count() -> None:
    """The grandchild has the token that the verifier chose at the root; only children are asked."""
    parents = torch.tensor([[-1, 0, 1]])
    tree = Tree(torch.tensor([[0, 1, 2]]), parents, torch.tensor([[0, 1, 2]]), ancestry(parents, 2))
    path, accepted, bonus = greedy_path(tree, torch.tensor([[2, 2, 2]]), 2)
    assert (path.tolist(), accepted.tolist(), bonus.tolist()) == ([[0, 0, 0]], [0], [2])
