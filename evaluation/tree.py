"""Draft trees: which nodes a round proposes, in breadth-first order, parents first; node 0 is the token already decided.

Shapes: B rows, N nodes (the root included), M nodes of one level, k children a node, Q columns of the head's vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from ..heads.drafter import DraftSession


@dataclass(frozen=True)
class Drawn:
    """How the tokens of a tree were drawn. log_q: [B, E, Q] of the E nodes that have children; slots: [N], which of them a
    node is; columns: [B, N], what was drawn at each node (0 for the root); target_ids: [Q]."""

    log_q: Tensor
    slots: Tensor
    columns: Tensor
    target_ids: Tensor


@dataclass(frozen=True)
class Tree:
    """One tree a row. ids: [B, N] verifier ids; parents: [B, N], -1 for the root and for nodes that are no drafts and can never
    be accepted; depth: [B, N]; seen: bool [B, N, N]; drawn: None where the children are the likeliest ones instead of drawn
    ones."""

    ids: Tensor
    parents: Tensor
    depth: Tensor
    seen: Tensor
    drawn: Drawn | None = None

    @property
    def drafted(self) -> Tensor:
        """Nodes that are drafts: [B]."""
        return (self.parents >= 0).sum(1).expand(len(self.ids))


Draw = Callable[[Tensor, int], Tensor]  # (log q [B, M, Q], k) -> k columns drawn without replacement [B, M, k], in draw order


@dataclass(frozen=True)
class Level:
    """The nodes of one depth of a static tree. slots, ranks: which expanded node of the level above, and the child's rank;
    turns: its number among the siblings that are there; expand: which of these nodes have children; parents: of those, the
    parent among all expanded nodes (-1: root)."""

    slots: list[int]
    ranks: list[int]
    turns: list[int]
    expand: list[int]
    parents: list[int]


@dataclass(frozen=True)
class Placed:
    """A static tree's numbers on the device that drafts. levels: of each its width, and
    slots, ranks, turns, expand and parents."""

    parents: Tensor
    depths: Tensor
    seen: Tensor
    slots: Tensor
    levels: list[tuple[int, list[Tensor]]]


class StaticTree:
    """A fixed shape, given as paths of child ranks: [0] is the root's likeliest child, [0, 1] its second likeliest child."""

    def __init__(self, paths: Sequence[Sequence[int]], kind: str = "static") -> None:
        self.kind = kind
        self.paths = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        index = {(): 0} | {path: i + 1 for i, path in enumerate(self.paths)}
        for path in self.paths:
            if path[:-1] not in index:
                raise UserError(f"static tree: path {list(path)} has no parent {list(path[:-1])} among the paths")
        self.depth = max((len(path) for path in self.paths), default=0)
        self.nodes = len(self.paths) + 1
        self.parents = torch.tensor([-1] + [index[path[:-1]] for path in self.paths])[None]
        self.depths = torch.tensor([0] + [len(path) for path in self.paths])[None]
        self.seen = ancestry(self.parents, self.depth)
        self.levels = self._levels()
        self.width = max((turn + 1 for level in self.levels for turn in level.turns), default=0)
        self.choices = max((path[-1] + 1 for path in self.paths), default=0)  # of a node that are asked for
        self.expanded = sum(len(level.expand) for level in self.levels)  # nodes that the head runs through while drafting
        inner = [path for path in [(), *self.paths] if any(path == child[:-1] for child in self.paths)]
        self.slots = torch.tensor([inner.index(path) if path in inner else 0 for path in index])
        self._placed: dict[torch.device, Placed] = {}
        self._cut: dict[int, StaticTree] = {}

    def cut(self, depth: int, nodes: int) -> "StaticTree":
        """The tree without what lies deeper. (How many nodes are wanted changes no fixed shape.)"""
        if depth >= self.depth:
            return self
        if depth not in self._cut:
            self._cut[depth] = StaticTree([path for path in self.paths if len(path) <= depth], self.kind)
        return self._cut[depth]

    def on(self, device: torch.device) -> Placed:
        """The shape as tensors, copied to a device once."""
        if device not in self._placed:
            levels = []
            for level in self.levels:
                parts = level.slots, level.ranks, level.turns, level.expand, level.parents
                levels.append((max(level.ranks) + 1, [torch.tensor(part, dtype=torch.long, device=device) for part in parts]))
            parents, depths, seen, slots = (part.to(device) for part in (self.parents, self.depths, self.seen, self.slots))
            self._placed[device] = Placed(parents, depths, seen, slots, levels)
        return self._placed[device]

    def _levels(self) -> list[Level]:
        inner = {path[:-1] for path in self.paths}
        expanded = {path: i for i, path in enumerate(path for path in self.paths if path in inner)}
        above: list[tuple[int, ...]] = [()]
        levels = []
        for depth in range(1, self.depth + 1):
            here = [path for path in self.paths if len(path) == depth]
            slots = [above.index(path[:-1]) for path in here]
            above = [path for path in here if path in inner]
            parents = [expanded.get(path[:-1], -1) for path in above]
            turns = [slots[:i].count(slot) for i, slot in enumerate(slots)]
            levels.append(Level(slots, [path[-1] for path in here], turns, [here.index(path) for path in above], parents))
        return levels

    def describe(self) -> dict[str, object]:
        base = {"kind": self.kind, "depth": self.depth, "nodes": self.nodes}
        return base if self.kind == "chain" else base | {"paths": [list(path) for path in self.paths]}

    def grow(self, session: DraftSession, root: Tensor, log_q: Tensor, target_ids: Tensor, draw: Draw | None = None) -> Tree:
        """Fill the shape with the likeliest children, or with drawn ones. root: [B] ids; log_q: [B, Q] of its children."""
        shape, batch = self.on(root.device), len(root)
        ids, there = [root[:, None]], [torch.zeros_like(root[:, None], dtype=torch.bool)]
        choices = log_q[:, None]
        asked, columns = [], [torch.zeros_like(ids[0])]
        for level, (width, (slots, ranks, turns, expand, parents)) in zip(self.levels, shape.levels, strict=True):
            if draw is None:
                scores, likely = likeliest(choices, width)  # [B, M, k]
                picked = likely[:, slots, ranks]
                there.append(scores[:, slots, ranks] != float("-inf"))
            else:
                picked = draw(choices, max(level.turns) + 1)[:, slots, turns]
                asked.append(choices)
                columns.append(picked)
            ids.append(target_ids[picked])
            if level.expand:
                choices = session.expand(ids[-1][:, expand], parents.expand(batch, -1))
        if draw is None:
            parents = torch.where(torch.cat(there, 1), shape.parents, -1)
            return Tree(torch.cat(ids, 1), parents, shape.depths, shape.seen)
        drawn = Drawn(torch.cat(asked, 1), shape.slots, torch.cat(columns, 1), target_ids) if asked else None
        return Tree(torch.cat(ids, 1), shape.parents, shape.depths, shape.seen, drawn)


def chain(depth: int) -> StaticTree:
    """A tree of width one; depth 0 is plain decoding."""
    return StaticTree([[0] * length for length in range(1, depth + 1)], kind="chain")


class DynamicTree:
    """EAGLE-2's tree: a beam of `top_k` grows for `depth` levels, then the `nodes` most probable nodes stay (root included)."""

    kind = "dynamic"

    def __init__(self, depth: int, top_k: int, nodes: int) -> None:
        self.depth, self.top_k = depth, top_k
        self.width = self.choices = top_k
        self.nodes = min(nodes, 1 + top_k + (depth - 1) * top_k**2)
        self.expanded = (depth - 1) * top_k  # nodes that the head runs through while drafting

    def cut(self, depth: int, nodes: int) -> "AnyTree":
        """A tree of at most that depth and that many nodes besides the root."""
        if depth == 0:
            return chain(0)
        return DynamicTree(min(self.depth, depth), self.top_k, min(self.nodes, nodes + 1))

    def describe(self) -> dict[str, object]:
        return {"kind": self.kind, "depth": self.depth, "top_k": self.top_k, "nodes": self.nodes}

    def grow(self, session: DraftSession, root: Tensor, log_q: Tensor, target_ids: Tensor) -> Tree:
        """Grow from the root's children. root: [B] ids; log_q: [B, Q]. Scores are cumulative log q in float32."""
        batch, k, device = len(root), self.top_k, root.device
        scores, columns = likeliest(log_q, k)
        pool_ids, pool_scores = [root[:, None], target_ids[columns]], [scores]
        pool_parents = [torch.full((batch, 1), -1, device=device), torch.zeros(batch, k, dtype=torch.long, device=device)]
        beam = torch.arange(1, k + 1, device=device).expand(batch, k)  # indices into the pool
        beam_scores, beam_ids = scores, pool_ids[-1]
        parents = torch.full((batch, k), -1, device=device)  # indices among expanded nodes
        for level in range(1, self.depth):
            step, columns = likeliest(session.expand(beam_ids, parents), k)  # [B, k, k]
            scores = (beam_scores[:, :, None] + step).flatten(1)
            ids = target_ids[columns].flatten(1)
            pool_ids.append(ids)
            pool_scores.append(scores)
            pool_parents.append(beam.repeat_interleave(k, 1))
            best = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
            beam = best + 1 + k + (level - 1) * k * k
            parents = best // k + (level - 1) * k
            beam_scores, beam_ids = scores.gather(1, best), ids.gather(1, best)
        return self._prune(torch.cat(pool_ids, 1), torch.cat(pool_parents, 1), torch.cat(pool_scores, 1))

    def _prune(self, ids: Tensor, parents: Tensor, scores: Tensor) -> Tree:
        """Keep the root and the best nodes. Ties go to the earlier one, so a child never survives its parent."""
        best = scores.argsort(dim=1, descending=True, stable=True)[:, : self.nodes - 1] + 1
        kept = torch.cat([torch.zeros_like(ids[:, :1]), best.sort(1).values], 1)  # insertion order: parents first
        place = torch.zeros_like(ids).scatter_(1, kept, torch.arange(kept.shape[1], device=ids.device).expand_as(kept))
        old = parents.gather(1, kept)
        nothing = torch.cat([scores.new_full((len(scores), 1), float("-inf")), scores], 1).gather(1, kept) == float("-inf")
        parents = torch.where(nothing, -1, place.gather(1, old.clamp(min=0)))
        seen = ancestry(parents, self.depth)
        return Tree(ids.gather(1, kept), parents, seen.sum(-1) - 1, seen)


def likeliest(log_q: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best scores [.., k] of log q [.., Q] and their columns. NaN is no draft: torch sorts it first, so that in a tree
    pruned by scores it would outlive its parent."""
    scores, columns = log_q.topk(k)
    return scores.masked_fill(scores.isnan(), float("-inf")), columns


def ancestry(parents: Tensor, depth: int) -> Tensor:
    """seen[b, i, j]: j is i or an ancestor of i. parents: [B, N] -> bool [B, N, N]."""
    own = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device)[None]
    up = parents.clamp(min=0)[:, :, None].expand(-1, -1, parents.shape[1])
    seen = own.expand(len(parents), -1, -1)
    for _ in range(depth):
        seen = own | (seen.gather(1, up) & (parents >= 0)[:, :, None])
    return seen


AnyTree = StaticTree | DynamicTree


def unfillable(tree: AnyTree, depth: int | None, tokens: int) -> str | None:
    """Why a drafter of that depth (None: any) that knows so many tokens cannot fill the tree; None where it can."""
    if depth is not None and tree.depth > depth:
        return f"a {tree.kind} tree of depth {tree.depth} is deeper than its drafter, which has {depth}"
    if tree.choices > tokens:
        return f"a {tree.kind} tree asks for {tree.choices} children of a node; its drafter knows {tokens} tokens"
    return None
