"""The speculative decoding loop, for many prompts at once, each at its own pace.

A round starts with a cache of committed tokens and a next token already decided (the root). The head drafts a tree below the
root, the verifier runs it in one pass, the accepted path is committed and the verifier's choice after it is the next root.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..errors import UserError
from ..heads.base import DraftHead, DraftSession
from ..heads.verifier import Features, Verifier
from .sampling import GREEDY, Dice, Sampling, dice
from .tree import AnyTree, Draw, DynamicTree, Tree, chain
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
    """Seconds by part. On a GPU each reading waits for the device, so that a part is charged with its own work."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "other": 0.0}
        self.device = device
        self.start()

    def start(self) -> None:
        self.last = time.perf_counter()

    def charge(self, part: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now


def speculate(
    verifier: Verifier,
    head: DraftHead | None,
    tree: AnyTree,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_tokens: Callable[[int], None] = lambda count: None,
    sampling: Sampling = GREEDY,
    draw: Dice | None = None,
) -> tuple[list[Decoded], dict[str, float]]:
    """Decode with drafts from `head` (None: plain decoding, a tree of the root alone).

    draw: all random choices of the run; None makes dice of the sampling's seed. Returns a Decoded for each prompt and seconds
    by part ("prefill", "draft", "verify", "other"). Raises UserError where the rule cannot verify the tree or the drafts.
    """
    done, clock = [Decoded() for _ in prompts], Clock(verifier.device)
    for emitted in rounds(verifier, head, tree, prompts, max_new_tokens, done, clock, sampling, draw):
        on_tokens(emitted)
    return done, clock.seconds


def rounds(
    verifier: Verifier,
    head: DraftHead | None,
    tree: AnyTree,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    done: list[Decoded],
    clock: Clock,
    sampling: Sampling = GREEDY,
    draw: Dice | None = None,
) -> Iterator[int]:
    """What `speculate` does, a round at a time: fills `done` and yields the tokens that the round gave."""
    tree = tree if head is not None else chain(0)
    if sampling.draws_children and isinstance(tree, DynamicTree):
        raise UserError("rule without_replacement: a dynamic tree's shape depends on its drafts; use candidates, or a chain or "
                        "a static tree")  # fmt: skip
    judge = Judge(
        sampling, dice(sampling.seed) if draw is None else draw, tree, prompts, verifier.facts.vocab_size, verifier.device
    )
    layers = () if head is None else head.needs
    capacity = max(map(len, prompts)) + max_new_tokens + tree.nodes + tree.depth + 1
    cache = verifier.new_cache(len(prompts), capacity)
    session = None if head is None else head.begin(verifier, len(prompts), capacity + tree.expanded)
    clock.start()
    features, ids = verifier.prefill(prompts, cache, layers)
    last = torch.tensor(cache.lengths, device=verifier.device) - 1
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
        drafted = draft(tree, head, session, features, next_ids, counts, root, judge.draw)
        clock.charge("draft")
        features = verifier.decode(drafted.ids, drafted.seen, drafted.depth, cache, layers)
        read = judge.read(verifier.logits(features.last))
        clock.charge("verify")
        path, accepted, root = judge.path(drafted, read)
        path_ids = drafted.ids.gather(1, path)
        emitted = record(done, active, cache.lengths, path_ids, accepted, root, tree.nodes - 1, max_new_tokens, verifier)
        counts = [1 + n for n in accepted.tolist()]
        cache.commit(path, counts)
        features = Features(pick(features.last, path), pick(features.layers, path))
        next_ids = torch.cat([path_ids[:, 1:], root[:, None]], 1).scatter(1, accepted[:, None], root[:, None])
        yield emitted


def draft(
    tree: AnyTree, head: DraftHead | None, session: DraftSession | None, features: Features, next_ids: Tensor,
    counts: list[int], root: Tensor, draw: Draw | None,
) -> Tree:  # fmt: skip
    """Show the head what was committed since last time and let it fill the tree."""
    if head is None or session is None:
        one = torch.ones(1, 1, 1, dtype=torch.bool, device=root.device)
        zero = torch.zeros(1, 1, dtype=torch.long, device=root.device)
        return Tree(root[:, None], zero - 1, zero, one)
    log_q = session.observe(features, next_ids, counts)
    if isinstance(tree, DynamicTree):
        return tree.grow(session, root, log_q, head.target_ids)
    return tree.grow(session, root, log_q, head.target_ids, draw)


def record(
    done: list[Decoded], active: list[int], contexts: list[int], path_ids: Tensor, accepted: Tensor, bonus: Tensor,
    drafted: int, budget: int, verifier: Verifier,
) -> int:  # fmt: skip
    """Write a round into the answers: the accepted drafts, then the verifier's own token. Returns tokens emitted."""
    total = 0
    for i, (row, count, ids, token) in enumerate(
        zip(active, accepted.tolist(), path_ids.tolist(), bonus.tolist(), strict=True)
    ):
        sources: list[Source] = ["drafted"] * count
        emitted = done[row].extend([*ids[1 : 1 + count], token], [*sources, "bonus"], budget, verifier.facts.stop_ids)
        done[row].rounds.append(Round(contexts[i], emitted, drafted))
        total += emitted
    return total


def pick(x_BNd: Tensor, path_BP: Tensor) -> Tensor:
    return x_BNd.gather(1, path_BP[:, :, None].expand(-1, -1, x_BNd.shape[-1]))
