"""Verification: which path of a draft tree is accepted, and the verifier's own token after it.

Greedy walks to the child that equals the verifier's choice. Sampling walks by the law of a node: the probability of following
each child, and of emitting each token with no child followed. Summed over both, a lossless law is the verifier's distribution.

Shapes: B rows, N nodes, D depth of the tree, k children of a node, V verifier ids, Q columns of a head's vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .sampling import Dice, Sampling, draft_probabilities, draw_children, probabilities, remaining
from .tree import AnyTree, Drawn, Tree

EPSILON, DELTA = 0.09, 0.3  # typical acceptance: p(x) > min(EPSILON, DELTA * exp(-H(p)))


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


def candidates_law(p: Tensor, children: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from p and follow the child that was drawn. p: [B, V]; children: [B, k] ids, -1 where there is none.

    Returns follow [B, k] and emit [B, V], probabilities that add up to one. Lossless however the children were chosen, as long
    as that does not depend on this draw.
    """
    real = children >= 0
    follow = p.gather(1, children.clamp(min=0)) * real
    marked = torch.zeros(len(p), p.shape[1] + 1, dtype=torch.bool, device=p.device)
    marked.scatter_(1, torch.where(real, children, p.shape[1]), True)
    return follow, p.masked_fill(marked[:, :-1], 0.0)


def drawn_law(p: Tensor, children: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Test children in the order in which they were drawn, child i from q[:, i] given the ones before it.

    p: [B, V]; children: [B, k] ids, -1 where there is none; q: [B, k, V]. Child x is accepted with probability
    min(1, r[x] / q[x]), r = p at first and the normalised positive part of r - q after each rejection. Returns follow [B, k]
    and emit [B, V] as candidates_law does.
    """
    r, reached = p, torch.ones_like(p[:, :1])
    follow = []
    for child, its in zip(children.split(1, 1), q.unbind(1), strict=True):
        real, x = child >= 0, child.clamp(min=0)
        accept = torch.where(real, (r.gather(1, x) / its.gather(1, x)).clamp(max=1.0), 0.0)
        follow.append(reached * accept)
        reached = reached * (1 - accept)
        rest = (r - its).clamp(min=0.0)
        total = rest.sum(1, keepdim=True)
        r = torch.where(real & (total > 0), rest / total.clamp(min=torch.finfo(p.dtype).tiny), r)
    return torch.cat([*follow, p[:, :0]], 1), reached * r


def drawn_from(drawn: Drawn, node: Tensor, children: Tensor, temperature: float, vocab_size: int) -> Tensor:
    """q [B, k, V]: what each child of `node` [B] was drawn from. children: [B, k] node indices, -1 behind the last."""
    rows = torch.arange(len(node), device=node.device)
    q = draft_probabilities(drawn.log_q[rows, drawn.slots[node]], temperature)
    taken = torch.zeros_like(q, dtype=torch.bool)
    full = q.new_zeros(len(q), children.shape[1], vocab_size)
    for i, child in enumerate(children.clamp(min=0).split(1, 1)):
        full[:, i, drawn.target_ids] = remaining(q, taken)
        taken = taken.scatter(1, drawn.columns.gather(1, child), True)
    return full


def children_of(tree: Tree, node: Tensor, width: int) -> Tensor:
    """Indices [B, width] of the children of `node` [B], in order, -1 behind the last."""
    parents = tree.parents.expand(len(node), -1)
    size = parents.shape[1]
    index = torch.where(parents == node[:, None], torch.arange(size, device=node.device), size).sort(1).values[:, :width]
    return torch.where(index < size, index, -1)


def sampled_path(
    tree: Tree, logits: Tensor, depth: int, width: int, sampling: Sampling, draw: Dice, present: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk by the law of each node, as greedy_path returns it; one draw a node and row.

    logits: [B, N, V], the verifier's after every node; width: most children of a node; present: bool [B, V], tokens before
    the root, for the repetition penalty; the accepted path is added to it.
    """
    rows = torch.arange(len(logits), device=logits.device)
    node = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    going, accepted, bonus = torch.ones_like(node, dtype=torch.bool), torch.zeros_like(node), torch.zeros_like(node)
    path = [node]
    for level in range(depth + 1):
        if present is not None:
            present.scatter_(1, tree.ids.gather(1, node[:, None]), True)
        p = probabilities(logits[rows, node], sampling, present)
        children = children_of(tree, node, width)
        ids = torch.where(children >= 0, tree.ids.gather(1, children.clamp(min=0)), -1)
        if tree.drawn is None:
            law = candidates_law(p, ids)
        else:
            law = drawn_law(p, ids, drawn_from(tree.drawn, node, children, sampling.temperature, p.shape[1]))
        outcome = draw(torch.cat(law, 1))
        bonus = torch.where(going & (outcome >= children.shape[1]), outcome - children.shape[1], bonus)
        going = going & (outcome < children.shape[1])
        accepted += going
        if level < depth:
            chosen = torch.cat([children, node[:, None]], 1).gather(1, outcome.clamp(max=children.shape[1])[:, None])[:, 0]
            node = torch.where(going, chosen, node)
            path.append(node)
        if not bool(going.any()):
            break
    path += [node] * (depth + 1 - len(path))
    return torch.stack(path, 1), accepted, bonus


def typical_path(tree: Tree, logits: Tensor, depth: int, sampling: Sampling, draw: Dice) -> tuple[Tensor, Tensor, Tensor]:
    """Medusa's lossy rule: the deepest path whose every token is likely enough, then a token sampled after it."""
    p = probabilities(logits, sampling)
    batch, size = p.shape[:2]
    parents = tree.parents.expand(batch, -1).clamp(min=0)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    least = (DELTA * torch.exp(-entropy)).clamp(max=EPSILON)
    after = p.gather(1, parents[:, :, None].expand(-1, -1, p.shape[2])).gather(2, tree.ids[:, :, None])[:, :, 0]
    fine = (after > least.gather(1, parents)) & (tree.parents >= 0)
    fine[:, 0] = True
    seen = tree.seen.expand(batch, -1, -1)
    whole = (fine[:, None] | ~seen).all(-1)  # every node of the path is fine
    best = torch.where(whole, tree.depth.expand(batch, -1), -1).argmax(1)
    rows = torch.arange(batch, device=best.device)
    on_path = torch.where(seen[rows, best], torch.arange(size, device=best.device), size).sort(1).values[:, : depth + 1]
    path = torch.where(on_path < size, on_path, best[:, None])
    return path, tree.depth.expand(batch, -1)[rows, best], draw(p[rows, best])


class Judge:
    """Chooses tokens for one run of the decoding loop: its sampling, its dice, and what the repetition penalty remembers."""

    def __init__(
        self, sampling: Sampling, draw: Dice, tree: AnyTree, prompts: Sequence[Sequence[int]], vocab_size: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.sampling, self.dice, self.tree = sampling, draw, tree
        self.plain = sampling.temperature == 0 and sampling.repetition_penalty == 1  # the argmax is all that counts
        self.present: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.present = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                self.present[row, torch.as_tensor(prompt)] = True
            self.present = self.present.to(device)

    @property
    def draw(self) -> Callable[[Tensor, int], Tensor] | None:
        """How a tree gets its children, where the rule asks for drawn ones."""
        if not self.sampling.draws_children:
            return None
        return lambda log_q, count: draw_children(log_q, count, self.sampling.temperature, self.dice)

    def first(self, logits: Tensor) -> Tensor:
        """The token [B] after the prompts. logits: [B, V]."""
        return logits.argmax(-1) if self.plain else self.dice(probabilities(logits, self.sampling, self.present))

    def read(self, logits: Tensor) -> Tensor:
        """What `path` needs of the logits [B, N, V]."""
        return logits.argmax(-1) if self.plain else logits

    def path(self, tree: Tree, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        depth = self.tree.depth
        if self.plain:
            return greedy_path(tree, read, depth)
        if self.sampling.typical:
            return typical_path(tree, read, depth, self.sampling, self.dice)
        return sampled_path(tree, read, depth, self.tree.width, self.sampling, self.dice, self.present)

    def keep_rows(self, rows: list[int]) -> None:
        if self.present is not None:
            self.present = self.present[rows]
