"""The proof that decoding with drafts changes nothing: exact sums, controls that must be caught, and the user's own models."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..heads.drafter import Drafter
from . import controls
from .decode import Decoded, speculate
from .enumeration import BEFORE, Tables, round_law, total_variation
from .evaluate import Evaluator
from .goodness import PLANTED, Places, p_value, places
from .record import dtype_name
from .sampling import Rule, Sampling, dice
from .tiny import plain_joint, speculative_joint, tiny_heads, tiny_verifier
from .tree import AnyTree, DynamicTree, StaticTree, chain

EXACT = 1e-12  # total variation of sums in float64
CAUGHT = 1e-3  # total variation that a wrong rule must show at least
REFUSED = 1e-4  # p-value below which text is not the verifier's
PAIRS = 60  # random (p, q) of a control
ROUND_VOCAB, NODE_VOCAB = 4, 6  # tokens that the models of exact rounds, and of one node, know
RULES: tuple[Rule, ...] = ("candidates", "without_replacement")  # those that are lossless
FIRST = 3  # first tokens of the tiny model's text
ROWS, NODES = 64, 512  # most answers, and most nodes of their trees, sampled at a time: what two cores and 24 GB do well
COPIES, LENGTH = 16, 64  # answers to a prompt in a row, whose prefill they share; tokens of an answer
ULPS = 4  # of the best logit: a gap that the order of additions alone may turn around in low precision

PROCESSING: dict[str, dict[str, Any]] = {
    "T 1": {"temperature": 1.0},
    "T 0.7, top-p 0.8": {"temperature": 0.7, "top_p": 0.8},
    "T 1.3, top-k 2": {"temperature": 1.3, "top_k": 2},
    "T 1, min-p 0.3": {"temperature": 1.0, "min_p": 0.3},
    "T 0.8, repetition penalty 1.5": {"temperature": 0.8, "repetition_penalty": 1.5},
}
LAWS: list[tuple[str, Sampling]] = [
    ("T 0", Sampling()),
    ("T 0, repetition penalty 1.5", Sampling(repetition_penalty=1.5)),
    *((name, Sampling(rule="candidates", **fields)) for name, fields in PROCESSING.items()),
    *((name, Sampling(rule="without_replacement", **fields)) for name, fields in PROCESSING.items()),
    ("T 1", Sampling(1.0, "typical")),
]

Drafters = Sequence[tuple[str, Drafter]]  # with their names


@dataclass(frozen=True)
class Gate:
    """One line of the proof. part: what it belongs to; value: what was measured, as `measure` names it; needed: in words."""

    part: str
    name: str
    measure: str
    value: float
    needed: str
    passed: bool
    note: str = ""


def variation(part: str, name: str, value: float, note: str, lossless: bool) -> Gate:
    """A total variation that must be nothing but rounding, or, of a rule that is not lossless, must be seen."""
    needed, passed = (f"< {EXACT:g}", value < EXACT) if lossless else (f"> {CAUGHT:g}: lossy", value > CAUGHT)
    return Gate(part, name, "total variation", value, needed, passed, note)


def exact_rounds(seed: int = 0, trees: int = 6) -> Iterator[Gate]:
    """Every outcome of drafting and verifying a round, for random models, drafters and trees."""
    for name, sampling in LAWS:
        rule = sampling.applied
        rng = random.Random(f"{seed}-{rule}-{name}")
        shapes = some_trees(rng, trees, sampling.draws_children)
        found = [round_variation(tree, sampling, rng) for tree in shapes]
        worst, outcomes = max(value for value, _ in found), sum(count for _, count in found)
        note = f"worst of {len(shapes)} trees, {outcomes} outcomes"
        yield variation("exact rounds", f"{rule}, {name}", worst, note, sampling.lossless)


def some_trees(rng: random.Random, count: int, fixed: bool) -> list[AnyTree]:
    """Chains and random static trees of two levels, and dynamic trees where the rule takes them."""
    shapes: list[AnyTree] = [chain(1), chain(2)]
    for _ in range(count):
        paths = [[0], [1], *rng.sample([[2], [0, 0], [0, 1], [1, 0], [1, 1]], 1 if fixed else 3)]
        shapes.append(StaticTree(paths))
    if not fixed:
        shapes += [DynamicTree(2, 2, rng.randrange(3, 7)) for _ in range(count)]
    return shapes


def round_variation(tree: AnyTree, sampling: Sampling, rng: random.Random) -> tuple[float, int]:
    """Total variation between a round and plain sampling for a random model and drafter, and the outcomes tried.

    Some drafters know a token or two only: a rule must go on where their distribution is exhausted.
    """
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    target = Tables(ROUND_VOCAB, tree.depth + 1, 1.0, generator)
    drafter = Tables(ROUND_VOCAB, tree.depth + 1, 1.5, generator, known=rng.choice([1, 2, ROUND_VOCAB, ROUND_VOCAB]))
    found, outcomes = round_law(target, drafter, tree, sampling)
    return total_variation(found, target.joint((), tree.depth + 1, sampling, BEFORE)), outcomes


def one_node(seed: int = 0) -> Iterator[Gate]:
    """Laws of one node over random distributions: the lossless ones, and the wrong ones that must be told from them."""
    size = f"{NODE_VOCAB} tokens, {controls.CHILDREN} children, {PAIRS} pairs"
    lossless: dict[str, Callable[[Tensor], Any]] = {
        "candidates (top 3)": lambda q: q.topk(controls.CHILDREN).indices,
        "without_replacement": controls.drawn,
    }

    def law(draws: Callable[[Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda p, q: controls.node(p, draws(q))[0]

    for name, draws in lossless.items():
        yield variation("one node", name, controls.mean_variation(law(draws), NODE_VOCAB, PAIRS, seed), size, True)
    for name, draws in controls.WRONG.items():
        yield variation("wrong rules", name, controls.mean_variation(law(draws), NODE_VOCAB, PAIRS, seed), size, False)
    value = controls.mean_variation(controls.bonus_from_p, NODE_VOCAB, PAIRS, seed)
    yield variation("wrong rules", "after a rejection, a token from p", value, size, False)


def tiny_model(seed: int = 0) -> Iterator[Gate]:
    """The whole decoding loop on a tiny random language model: the joint law of the first tokens, every outcome of it."""
    verifier = tiny_verifier(seed)
    heads = {head.kind: head for head in tiny_heads(verifier, seed)}
    cases: list[tuple[str, AnyTree, Sampling]] = [
        ("medusa", DynamicTree(2, 2, 4), Sampling(1.0, "candidates")),
        ("eagle3", DynamicTree(2, 2, 5), Sampling(1.0, "candidates", top_p=0.95, repetition_penalty=1.3)),
        ("medusa", StaticTree([[0], [1]]), Sampling(1.0, "without_replacement")),
        ("eagle3", chain(2), Sampling(0.7, "without_replacement", repetition_penalty=1.3)),
    ]
    for kind, tree, sampling in cases:
        found, outcomes = speculative_joint(verifier, heads[kind], tree, FIRST, sampling)
        value = total_variation(found, plain_joint(verifier, FIRST, sampling))
        name = f"{kind}, {sampling.rule}, {tree.kind}, T {sampling.temperature:g}"
        note = f"first {FIRST} tokens, {outcomes} outcomes"
        yield variation("tiny model", name, value, note, True)


def own_text(
    evaluator: Evaluator, drafters: Drafters, trees: Sequence[AnyTree], samplings: Sequence[Sampling], tokens: int,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Iterator[Gate]:  # fmt: skip
    """Sampled text of the user's own verifier by each lossless rule, `tokens` drafted or bonus tokens in all.

    A case gets tokens by what they cost, the nodes of its tree, but a tenth of the cheapest one's at least.
    """
    cases = [
        (name, drafter, tree, replace(sampling, rule=rule))
        for name, drafter in drafters for sampling in samplings for tree in trees for rule in RULES
        if rule == "candidates" or not (drafter.certain or isinstance(tree, DynamicTree))
    ]  # fmt: skip
    least = min(tree.nodes for tree in trees)
    weights = [max(least / tree.nodes, 0.1) for _, _, tree, _ in cases]
    every = Places.none()
    for (drafts, drafter, tree, sampling), weight in zip(cases, weights, strict=True):
        share = math.ceil(tokens * weight / sum(weights))
        found = sample(evaluator, drafter, tree, sampling, share, on_tokens)
        every += found
        p = p_value(found.true)
        name = f"{drafts}, {sampling.rule}, {tree.kind} of {tree.nodes} nodes, T {sampling.temperature:g}"
        yield Gate("own model", name, "chi-square p", p, f">= {REFUSED:g}", p >= REFUSED, f"{found.tokens} tokens")
    p, planted = p_value(every.true), p_value(every.planted)
    note = f"{every.tokens} tokens"
    yield Gate("own model", "all of them together", "chi-square p", p, f">= {REFUSED:g}", p >= REFUSED, note)
    name = f"planted bias: {PLANTED:.0%} of tokens the likeliest"
    note += "" if planted < REFUSED else "; too few to show a bias: raise --tokens"
    yield Gate("own model", name, "chi-square p", planted, f"< {REFUSED:g}", planted < REFUSED, note)


def sample(
    evaluator: Evaluator, drafter: Drafter, tree: AnyTree, sampling: Sampling, tokens: int, on_tokens: Callable[[int], None]
) -> Places:
    """Places of at least `tokens` tokens that rounds emitted: short answers to the prompts in turn, many to each at once."""
    verifier, prompts = evaluator.verifier, evaluator.prompts
    draw, generator = dice(sampling.seed), torch.Generator().manual_seed(sampling.seed + 1)  # numbers of their own
    rows, length = max(1, min(ROWS, NODES // tree.nodes)), min(LENGTH, evaluator.max_new_tokens)
    found, start = Places.none(), 0
    while found.tokens < tokens:
        part = [prompts[(start + i // COPIES) % len(prompts)].ids for i in range(rows)]
        start += -(-rows // COPIES)
        answers, _ = speculate(verifier, drafter, tree, part, length, sampling=sampling, draw=draw)
        texts = [(prompt, answer.tokens) for prompt, answer in zip(part, answers, strict=True)]
        new = places(verifier, texts, sampling, 1, generator)
        if not new.tokens:
            raise UserError("lossless: sampled answers end with their first token; nothing is drafted")
        found += new
        on_tokens(new.tokens)
    return found


def own_greedy(evaluator: Evaluator, drafters: Drafters, trees: Sequence[AnyTree]) -> Iterator[Gate]:
    """Greedy answers to the prompts, token by token. In float32 none may differ; in less each must be a near tie."""
    dtype = evaluator.verifier.dtype
    exact = dtype in (torch.float32, torch.float64)
    for (drafts, drafter), tree in itertools.product(drafters, trees):
        decoded: list[Decoded] = evaluator.decode(drafter, tree, evaluator.prompts, evaluator.batch)[0]
        apart = list(evaluator.divergences(decoded))
        name = f"{drafts}, greedy, {tree.kind} of {tree.nodes} nodes, {dtype_name(evaluator.verifier)}"
        note = f"{len(decoded)} prompts, {sum(len(d.tokens) for d in decoded)} tokens, {len(apart)} diverge"
        if exact:
            gaps = "".join(f"; {d['prompt']} at {d['position']}, gap {d['gap']:.3g}" for d in apart[:3])
            yield Gate("own model", name, "answers that differ", len(apart), "0", not apart, note + gaps)
            continue
        worst = max((d["gap"] / (torch.finfo(dtype).eps * max(abs(d["best"]), 1.0)) for d in apart), default=0.0)
        gaps = ", ".join(f"{d['gap']:.3g}" for d in apart[:8])
        note += f"; gaps {gaps}" if apart else ""
        yield Gate("own model", name, "largest gap, in ulps", worst, f"<= {ULPS}", worst <= ULPS, note)


def proof(seed: int = 0) -> Iterator[Gate]:
    """What needs no files: exact rounds, one node and the wrong rules, the tiny model."""
    yield from exact_rounds(seed)
    yield from one_node(seed)
    yield from tiny_model(seed)


def own_proof(
    judges: Sequence[tuple[Evaluator, Drafters]], trees: Sequence[AnyTree], samplings: Sequence[Sampling], tokens: int,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Iterator[Gate]:  # fmt: skip
    """The user's verifier and what drafts for it. judges: in float32 first, then in its own precision where that is lower.

    Text is sampled, and its distributions computed, in its own precision: that is what is served.
    """
    for evaluator, drafters in judges:
        yield from own_greedy(evaluator, drafters, trees)
    yield from own_text(*judges[-1], trees, samplings, tokens, on_tokens)
