"""The best static tree for a drafter: how often each of its choices is right, measured on the verifier's own text, and the
nodes that are worth most.

P[d][r] is the probability that the r-th choice after d accepted drafts is accepted. A node's worth is the product along its
path, and a tree emits 1 + the sum of its nodes' worths a round. Worth never grows along a path, so the worthiest nodes are
always a tree, and taking the next worthiest one is optimal for every size.

Shapes: B rows, T tokens, Q columns of the drafter's vocabulary, k ranks.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..heads.base import columns_of
from ..heads.drafter import Drafter
from ..heads.verifier import Features
from .evaluate import Evaluator, Prompt
from .tree import StaticTree, chain

Path = tuple[int, ...]


@dataclass(frozen=True)
class RankCounts:
    """reached[d]: positions whose d first tokens were all among the first k choices; hits[d][r]: of those, where the next token
    was the r-th choice."""

    reached: list[int]
    hits: list[list[int]]

    @property
    def shares(self) -> list[list[float]]:
        """P[d][r]."""
        return [[hit / max(total, 1) for hit in row] for total, row in zip(self.reached, self.hits, strict=True)]


@dataclass(frozen=True)
class Found:
    """paths: in the order they were worth taking; tau: tokens a round that are expected of them."""

    paths: list[Path]
    tau: float

    @property
    def tree(self) -> StaticTree:
        return StaticTree(self.paths)


def best_tree(shares: Sequence[Sequence[float]], nodes: int) -> Found:
    """The `nodes` (root included) that are worth most; fewer where the shares have no more that are ever right."""
    tau, paths = 1.0, list[Path]()
    heap: list[tuple[float, int, Path]] = [(-share, 1, (rank,)) for rank, share in enumerate(shares[0]) if share > 0]
    heapq.heapify(heap)
    while heap and len(paths) < nodes - 1:
        worth, depth, path = heapq.heappop(heap)
        tau -= worth
        paths.append(path)
        if depth < len(shares):
            for rank, share in enumerate(shares[depth]):
                if share > 0:
                    heapq.heappush(heap, (worth * share, depth + 1, (*path, rank)))
    return Found(paths, tau)


def chain_tau(shares: Sequence[Sequence[float]], depth: int) -> float:
    """Tokens a round expected of a chain."""
    tau, worth = 1.0, 1.0
    for row in shares[:depth]:
        worth *= row[0]
        tau += worth
    return tau


@torch.no_grad()
def count_ranks(evaluator: Evaluator, drafter: Drafter, depth: int, ranks: int) -> RankCounts:
    """Follow the verifier's own answers: at every position, draft along the true tokens and note which choice they were."""
    ranks = min(ranks, len(drafter.target_ids))
    answers = [answer.tokens for answer in evaluator.decode(None, chain(0), evaluator.prompts, evaluator.batch)[0]]
    pairs = sorted(zip(evaluator.prompts, answers, strict=True), key=lambda pair: len(pair[1]))
    reached = torch.zeros(depth, dtype=torch.long, device=evaluator.verifier.device)
    hits = torch.zeros(depth, ranks, dtype=torch.long, device=evaluator.verifier.device)
    for start in range(0, len(pairs), evaluator.batch):
        follow(evaluator, drafter, pairs[start : start + evaluator.batch], reached, hits)
    return RankCounts(reached.tolist(), hits.tolist())


def follow(
    evaluator: Evaluator, drafter: Drafter, pairs: Sequence[tuple[Prompt, list[int]]], reached: Tensor, hits: Tensor
) -> None:
    """Add the counts of a batch of answers, shortest first, to `reached` [D] and `hits` [D, k]."""
    verifier, depth = evaluator.verifier, len(reached)
    texts = [prompt.ids + answer for prompt, answer in pairs]
    size = max(map(len, texts))
    ids = torch.tensor([text + [0] * (size + depth + 1 - len(text)) for text in texts], device=verifier.device)
    ends = torch.tensor([len(text) for text in texts], device=verifier.device)
    features = verifier.features(ids[:, :size], drafter.needs)
    columns = columns_of(drafter.target_ids, verifier.facts.vocab_size)
    session = drafter.begin(verifier, len(texts), 2 * size + depth + 1)
    session.start([prompt.ids for prompt, _ in pairs])
    seen, counts = [0] * len(texts), [len(prompt.ids) for prompt, _ in pairs]
    lengths = [len(text) for text in texts]
    while True:
        # rows whose root, after these tokens, has a true token behind it
        going = [i for i, (a, b, end) in enumerate(zip(seen, counts, lengths, strict=True)) if a + b + 1 < end]
        if len(going) < len(seen):
            if not going:
                return
            session.keep_rows(going)
            ids, ends, features = ids[going], ends[going], Features(features.last[going], features.layers[going])
            seen, counts, lengths = ([row[i] for i in going] for row in (seen, counts, lengths))
        starts = torch.tensor(seen, device=ids.device)
        here = starts[:, None] + torch.arange(max(counts), device=ids.device)
        inside = here.clamp(max=size - 1)[:, :, None]
        part = Features(*(x.gather(1, inside.expand(-1, -1, x.shape[2])) for x in (features.last, features.layers)))
        log_q = session.observe(part, ids.gather(1, (here + 1).clamp(max=ids.shape[1] - 1)), counts)[:, None]
        seen, counts = [a + b for a, b in zip(seen, counts, strict=True)], [1] * len(seen)
        root = torch.tensor(seen, device=ids.device)
        right = torch.ones_like(root, dtype=torch.bool)
        for d in range(depth):
            at = root + 1 + d
            token = ids.gather(1, at.clamp(max=ids.shape[1] - 1)[:, None])
            right &= at < ends
            top = log_q[:, 0].topk(hits.shape[1])
            hit = (top.indices == columns[token]) & (top.values != float("-inf")) & right[:, None]
            reached[d] += right.sum()
            hits[d] += hit.sum(0)
            right = hit.any(1)
            if d + 1 < depth:
                log_q = session.expand(token, torch.full_like(token, d - 1))
