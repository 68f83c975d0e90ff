"""The speculative decoding loop, for many prompts at once, each at its own pace.

A round starts with a cache of committed tokens and a next token already decided (the root). A drafter grows a tree below
the root, the verifier runs it in one pass, the accepted path is committed and the verifier's choice after it is the next root.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import UserError
from ..heads.batch import sent, take_rows
from ..heads.cache import RaggedCache
from ..heads.drafter import Beside, Drafter, DraftSession
from ..heads.verifier import Features, Verifier
from .sampling import GREEDY, Dice, Sampling, dice
from .tree import AnyTree, Draw, DynamicTree, StaticTree, Tree, chain, unfillable
from .verify import Judge

Source = Literal["prefill", "drafted", "bonus"]


@dataclass
class Round:
    """context: tokens before the round's root; emitted: tokens it gave to the answer; drafted: nodes proposed."""

    context: int
    emitted: int
    drafted: int


@dataclass
class Decoded:
    """The answer to one prompt. sources: where each token came from; rounds: the verifier passes after the prefill."""

    tokens: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    def extend(self, tokens: Sequence[int], sources: Sequence[Source], budget: int, stop_ids: Sequence[int]) -> int:
        """Append up to the first stop token and the budget; returns how many were taken."""
        before = len(self.tokens)
        for token, source in zip(tokens, sources, strict=True):
            if self.finished(budget, stop_ids):
                break
            self.tokens.append(token)
            self.sources.append(source)
        return len(self.tokens) - before

    def finished(self, budget: int, stop_ids: Sequence[int]) -> bool:
        return len(self.tokens) >= budget or (bool(self.tokens) and self.tokens[-1] in stop_ids)


class Clock:
    """Seconds by part. On a GPU they are the device's own, between events that nobody waits for before `seconds` is read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[tuple[str, Any, Any]] = []  # name, start and end
        self.start()

    def start(self) -> None:
        self.last = self.now()

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def charge(self, part: str) -> None:
        start, self.last = self.last, self.now()
        self.parts.append((part, start, self.last))

    @property
    def seconds(self) -> dict[str, float]:
        found = {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "other": 0.0}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for part, start, end in self.parts:
            found[part] += start.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - start
        return found


def speculate(
    verifier: Verifier,
    drafter: Drafter | None,
    tree: AnyTree,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_tokens: Callable[[int], None] = lambda count: None,
    sampling: Sampling = GREEDY,
    draw: Dice | None = None,
) -> tuple[list[Decoded], dict[str, float]]:
    """Decode with drafts from `drafter` (None: plain decoding, a tree of the root alone).

    draw: all random choices of the run; None makes dice of the sampling's seed. Returns a Decoded for each prompt and seconds
    by part ("prefill", "draft", "verify", "other"). Raises UserError where the drafter cannot fill the tree, or the rule cannot
    verify the tree or the drafts.
    """
    done, clock = [Decoded() for _ in prompts], Clock(verifier.device)
    for emitted in rounds(verifier, drafter, tree, prompts, max_new_tokens, done, clock, sampling, draw):
        on_tokens(emitted)
    return done, clock.seconds


def rounds(
    verifier: Verifier,
    drafter: Drafter | None,
    tree: AnyTree,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    done: list[Decoded],
    clock: Clock,
    sampling: Sampling = GREEDY,
    draw: Dice | None = None,
) -> Iterator[int]:
    """What `speculate` does, a round at a time: fills `done` and yields the tokens that the round gave."""
    tree = tree if drafter is not None else chain(0)
    sampling = sampling.for_certain_drafts() if drafter is not None and drafter.certain else sampling
    if sampling.draws_children and isinstance(tree, DynamicTree):
        raise UserError("rule without_replacement: a dynamic tree's shape depends on its drafts; use candidates, or a chain or "
                        "a static tree")  # fmt: skip
    if drafter is not None and (reason := unfillable(tree, drafter.depth, len(drafter.target_ids))):
        raise UserError(reason)
    judge = Judge(
        sampling, dice(sampling.seed) if draw is None else draw, tree, prompts, verifier.facts.vocab_size, verifier.device
    )
    layers = () if drafter is None else drafter.needs
    capacity = max(map(len, prompts)) + max_new_tokens + tree.nodes + tree.depth + 1
    beside = 0 if drafter is None else drafter.read_beside
    cache = verifier.new_cache(len(prompts), capacity + beside)
    session = None if drafter is None else drafter.begin(verifier, len(prompts), capacity + tree.expanded)
    if session is not None:
        session.start(prompts)
    clock.start()
    features, ids = verifier.prefill(prompts, cache, layers)
    last = sent(cache.lengths, verifier.device) - 1
    root = judge.first(verifier.logits(features.last[torch.arange(len(last), device=last.device), last]))
    next_ids = torch.cat([ids[:, 1:], ids[:, :1]], 1).scatter(1, last[:, None], root[:, None])
    counts = list(cache.lengths)
    clock.charge("prefill")

    for answer, token in zip(done, root.tolist(), strict=True):
        answer.extend([token], ["prefill"], max_new_tokens, verifier.facts.stop_ids)
    active = list(range(len(prompts)))
    while True:
        going = [i for i, row in enumerate(active) if not done[row].finished(max_new_tokens, verifier.facts.stop_ids)]
        if len(going) < len(active):
            if not going:
                return
            active = [active[i] for i in going]
            counts = [counts[i] for i in going]
            features = Features(features.last[going], features.layers[going])
            root, next_ids = root[going], next_ids[going]
            cache.keep_rows(going)
            judge.keep_rows(going)
            if session is not None:
                session.keep_rows(going)
        clock.charge("other")
        drafted = draft(tree, drafter, session, features, next_ids, counts, root, judge.draw)
        clock.charge("draft")
        features, read = verify(verifier, drafted, session, judge, cache, layers)
        clock.charge("verify")
        path, accepted, root = judge.path(drafted, read)
        path_ids = drafted.ids.gather(1, path)
        # all that the host needs to know of the round, in one transfer
        told = torch.cat([accepted[:, None], drafted.drafted[:, None], path_ids, root[:, None]], 1).tolist()
        emitted = record(done, active, cache.lengths, told, max_new_tokens, verifier.facts.stop_ids)
        counts = [1 + row[0] for row in told]
        if isinstance(tree, StaticTree) and tree.kind == "chain":
            cache.advance(counts)  # a chain's accepted nodes lie in place
        else:
            cache.commit(path[:, : max(counts)], counts)
        path, path_ids = path[:, : max(counts)], path_ids[:, : max(counts)]
        features = Features(take_rows(features.last, path), take_rows(features.layers, path))
        next_ids = torch.cat([path_ids[:, 1:], root[:, None]], 1).scatter(1, accepted[:, None], root[:, None])
        yield emitted


def draft(
    tree: AnyTree, drafter: Drafter | None, session: DraftSession | None, features: Features, next_ids: Tensor,
    counts: list[int], root: Tensor, draw: Draw | None,
) -> Tree:  # fmt: skip
    """Show the drafter what was committed since last time and let it fill the tree, as far as it has something to say."""
    if drafter is None or session is None:
        one = torch.ones(1, 1, 1, dtype=torch.bool, device=root.device)
        zero = torch.zeros(1, 1, dtype=torch.long, device=root.device)
        return Tree(root[:, None], zero - 1, zero, one)
    log_q = session.observe(features, next_ids, counts)
    if session.reach is not None:
        tree = tree.cut(*session.reach)
    if isinstance(tree, DynamicTree):
        return tree.grow(session, root, log_q, drafter.target_ids)
    return tree.grow(session, root, log_q, drafter.target_ids, draw)


def verify(
    verifier: Verifier, tree: Tree, session: DraftSession | None, judge: Judge, cache: RaggedCache, layers: Sequence[int]
) -> tuple[Features, Tensor]:
    """One pass over the tree, and what the drafter wants read besides. Returns its states and what the judge reads of them."""
    nodes, aside = tree.ids.shape[1], None if session is None else session.beside()
    ids, seen, depth = tree.ids, tree.seen, tree.depth
    if session is None or aside is None:
        features = verifier.decode(ids, seen, depth, cache, layers)
        return features, judge.read(verifier.logits(features.last))
    ids, seen, depth = joined(tree, aside)
    features = verifier.decode(ids, seen, depth, cache, layers)
    logits = verifier.logits(torch.cat([features.last[:, :nodes], features.last[:, -aside.asked :]], 1))
    session.learn(logits[:, nodes:].argmax(-1))
    return features, judge.read(logits[:, :nodes])


def joined(tree: Tree, aside: Beside) -> tuple[Tensor, Tensor, Tensor]:
    """ids, seen and depth of the tree's N nodes and the X tokens beside it, which see the root and not the drafts."""
    nodes, count, batch = tree.ids.shape[1], aside.ids.shape[1], len(tree.seen)
    seen = tree.seen.new_zeros(batch, nodes + count, nodes + count)
    seen[:, :nodes, :nodes], seen[:, nodes:, nodes:], seen[:, nodes:, 0] = tree.seen, aside.seen, True
    depth = torch.cat([tree.depth, aside.depth.expand(len(tree.depth), -1)], 1)
    return torch.cat([tree.ids, aside.ids], 1), seen, depth


def record(
    done: list[Decoded], active: list[int], contexts: list[int], told: list[list[int]], budget: int, stop_ids: Sequence[int]
) -> int:  # fmt: skip
    """Write a round into the answers: the accepted drafts, then the verifier's own token. Returns tokens emitted.

    told, a row: how many drafts were accepted, how many there were, the ids on the path from the root on, the bonus token.
    """
    total = 0
    for row, context, (accepted, drafted, *ids, bonus) in zip(active, contexts, told, strict=True):
        sources: list[Source] = ["drafted"] * accepted
        emitted = done[row].extend([*ids[1 : 1 + accepted], bonus], [*sources, "bonus"], budget, stop_ids)
        done[row].rounds.append(Round(context, emitted, drafted))
        total += emitted
    return total
