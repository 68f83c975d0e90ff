"""Greedy verification: which path of a draft tree the verifier itself would have written.

Shapes: B rows, N nodes, D depth of the tree.
"""

import torch
from torch import Tensor

from .tree import Tree


def greedy_path(tree: Tree, choice: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root to the child that equals the verifier's choice, as far as there is one.

    choice: [B, N], the verifier's argmax after every node. Returns path [B, D + 1] of node indices (the last accepted one
    repeated), accepted [B], the drafted tokens on it, and bonus [B], the verifier's choice after the last of them.
    """
    batch = len(choice)
    parents = tree.parents.expand(batch, -1)
    node = torch.zeros(batch, 1, dtype=torch.long, device=choice.device)
    path, accepted = [node], torch.zeros(batch, dtype=torch.long, device=choice.device)
    for _ in range(depth):
        match = (parents == node) & (tree.ids == choice.gather(1, node))
        found = match.any(1)
        node = torch.where(found[:, None], match.int().argmax(1, keepdim=True), node)
        accepted += found  # once nothing matches at a node, nothing matches there again
        path.append(node)
    return torch.cat(path, 1), accepted, choice.gather(1, node)[:, 0]
