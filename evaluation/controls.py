"""Rules that look right and are not: what a proof of losslessness must be able to see.

Each is a law of one node with a distribution p and a draft q over V tokens: the token that comes out, in exact arithmetic over
every draw. `lossless` ones stand beside them, by the same sums.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from .enumeration import total_variation
from .sampling import remaining
from .verify import candidates_law, drawn_law

CHILDREN = 3
Draws = tuple[Tensor, Tensor, Tensor]  # weights [n]; children [n, k]; q [n, k, V], what each is tested with


def drawn(q: Tensor) -> Draws:
    """Every draw of CHILDREN tokens without replacement, in draw order, with what each was drawn from."""
    children = torch.tensor(list(itertools.permutations(range(len(q)), CHILDREN)))
    tested = in_turn(q, children)
    return tested.gather(2, children[:, :, None])[:, :, 0].prod(1), children, tested


def in_turn(q: Tensor, children: Tensor) -> Tensor:
    """[n, k, V]: q without the children before each one."""
    taken = torch.zeros(len(children), len(q), dtype=torch.bool)
    rows = []
    for child in children.split(1, 1):
        rows.append(remaining(q.expand(len(children), -1), taken))
        taken = taken.scatter(1, child, True)
    return torch.stack(rows, 1)


def likeliest_as_drawn(q: Tensor) -> Draws:
    """The top three, tested as if they had been drawn from q."""
    return torch.ones(1, dtype=q.dtype), q.topk(CHILDREN).indices[None], q.expand(1, CHILDREN, -1)


def sorted_before_test(q: Tensor) -> Draws:
    """Three drawn, tested in the order of their probability instead of the order of the draws."""
    weights, children, _ = drawn(q)
    children = children.gather(1, q[children].argsort(dim=1, descending=True))
    return weights, children, in_turn(q, children)


def best_two_of_three(q: Tensor) -> Draws:
    """Three drawn, the likelier two kept in draw order: whether a child is there depends on what was drawn."""
    weights, children, tested = drawn(q)
    kept = q[children].argsort(dim=1, descending=True)[:, :2].sort(1).values
    return weights, children.gather(1, kept), tested.gather(1, kept[:, :, None].expand(-1, -1, len(q)))


def merged_duplicates(q: Tensor) -> Draws:
    """Three drawn independently, each tested with q, but a token that was drawn twice only once."""
    children = torch.tensor(list(itertools.product(range(len(q)), repeat=CHILDREN)))
    weights = q[children].prod(1)
    again = torch.tensor([[child in row[:i] for i, child in enumerate(row)] for row in children.tolist()])
    return weights, children.masked_fill(again, -1), q.expand(len(children), CHILDREN, -1)


WRONG: dict[str, Callable[[Tensor], Draws]] = {
    "top-3 tested with softmax q": likeliest_as_drawn,
    "drawn, tested in sorted order": sorted_before_test,
    "draw 3, keep the best 2 by q": best_two_of_three,
    "independent draws, duplicates merged": merged_duplicates,
}


def node(p: Tensor, draws: Draws | Tensor) -> tuple[Tensor, float]:
    """The law of the emitted token [V] and the probability that it is a child. draws: children [k] alone are candidates."""
    if isinstance(draws, Tensor):
        weights, children = torch.ones(1, dtype=p.dtype), draws[None]
        follow, emit = candidates_law(p[None], children)
    else:
        weights, children, q = draws
        follow, emit = drawn_law(p.expand(len(weights), -1), children, q)
    out = torch.cat([emit, emit.new_zeros(len(emit), 1)], 1).scatter_add(1, children % (len(p) + 1), follow)
    return weights @ out[:, :-1], (weights @ follow.sum(1)).item()


def bonus_from_p(p: Tensor, q: Tensor) -> Tensor:
    """Candidates, but after a rejection the token comes from p again, children and all."""
    follow, emit = candidates_law(p[None], q.topk(CHILDREN).indices[None])
    return (emit.sum() * p).scatter_add(0, q.topk(CHILDREN).indices, follow[0])


def random_pair(vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """p and a draft q that resembles it."""
    logits, error = torch.randn(2, vocab, generator=generator, dtype=torch.float64)
    return (1.5 * logits).softmax(-1), (1.5 * logits + 0.8 * error).softmax(-1)


def mean_variation(law: Callable[[Tensor, Tensor], Tensor], vocab: int, pairs: int, seed: int) -> float:
    """Mean total variation between p and what a rule emits, over random pairs of p and q."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(pairs):
        p, q = random_pair(vocab, generator)
        found.append(total_variation(law(p, q), p))
    return sum(found) / len(found)
