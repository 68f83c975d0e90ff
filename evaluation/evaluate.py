"""Judge heads by real decoding: the same prompts, plain and speculative, in one process, compared token by token."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..data.conversations import spread
from ..heads.drafter import Drafter
from ..heads.verifier import Verifier
from .decode import Decoded, speculate
from .metrics import acceptance, by_category, by_context
from .overlap import Overlap, overlap
from .sampling import GREEDY, Sampling, dice, penalised
from .tree import AnyTree, chain


@dataclass(frozen=True)
class Prompt:
    """What is decoded: token ids, and the words for people who read the results."""

    ids: list[int]
    id: str
    category: str | None
    text: str


class Evaluator:
    """Prompts with the verifier's own answers, decoded once, that any number of drafters and trees are compared with."""

    def __init__(
        self,
        verifier: Verifier,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        batch: int = 1,
        timing_prompts: int = 0,
        timing_repeats: int = 3,
        on_prompts: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.verifier, self.max_new_tokens = verifier, max_new_tokens
        self.prompts, self.batch = list(prompts), batch
        self.timing_prompts, self.timing_repeats = timing_prompts, timing_repeats
        self.on_prompts = on_prompts
        self._penalised: dict[float, list[Decoded]] = {}

    def decode(
        self, drafter: Drafter | None, tree: AnyTree, prompts: Sequence[Prompt], batch: int, sampling: Sampling = GREEDY
    ) -> tuple[list[Decoded], dict[str, float]]:
        """Answers in the order of `prompts`, and seconds by part. All of them are drawn by one generator."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        done: dict[int, Decoded] = {}
        seconds: dict[str, float] = {}
        draw = dice(sampling.seed)
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            ids = [prompts[i].ids for i in part]
            decoded, spent = speculate(self.verifier, drafter, tree, ids, self.max_new_tokens, sampling=sampling, draw=draw)
            done |= dict(zip(part, decoded, strict=True))
            seconds = {name: seconds.get(name, 0.0) + value for name, value in spent.items()}
            self.on_prompts(len(part))
        return [done[i] for i in range(len(prompts))], seconds

    @cached_property
    def plain(self) -> list[Decoded]:
        """The verifier alone and greedy, through the same loop and the same kind of cache."""
        return self.decode(None, chain(0), self.prompts, self.batch)[0]

    def greedy(self, sampling: Sampling) -> list[Decoded]:
        """What greedy speculation must equal: a repetition penalty makes a text of its own."""
        if sampling.repetition_penalty == 1:
            return self.plain
        if sampling.repetition_penalty not in self._penalised:
            decoded = self.decode(None, chain(0), self.prompts, self.batch, sampling)[0]
            self._penalised[sampling.repetition_penalty] = decoded
        return self._penalised[sampling.repetition_penalty]

    def evaluate(
        self, drafter: Drafter, trees: Sequence[AnyTree], samplings: Sequence[Sampling] = (GREEDY,)
    ) -> list[dict[str, Any]]:
        """One result of evaluation.json for each sampling and tree."""
        alpha = self.alpha(drafter)
        results = []
        for sampling in (sampling.for_certain_drafts() if drafter.certain else sampling for sampling in samplings):
            timings = self.time(drafter, trees, sampling)
            results += [self._result(drafter, tree, sampling, alpha, t) for tree, t in zip(trees, timings, strict=True)]
        return results

    def _result(
        self, drafter: Drafter, tree: AnyTree, sampling: Sampling, alpha: float | None, timing: dict[str, Any]
    ) -> dict[str, Any]:
        decoded, seconds = self.decode(drafter, tree, self.prompts, self.batch, sampling)
        greedy = sampling.applied == "greedy"
        divergences = list(self.divergences(decoded, sampling)) if greedy else []
        metrics = acceptance([r for answer in decoded for r in answer.rounds], tree.depth)
        if tree.kind != "chain":
            metrics["conditional"] = None  # only on a chain is it a property of one distribution
        timed = timing or {"speedup": None, "seconds": {**seconds, "plain": None}}
        tau, speedup = metrics["tau"], timed["speedup"]
        return {
            "tree": tree.describe(),
            "temperature": sampling.temperature,
            "rule": sampling.applied,
            "lossless": sampling.lossless,
            **metrics,
            "alpha": alpha,
            "identical_to_greedy": not divergences if greedy else None,
            "divergences": divergences,
            "overhead": tau / speedup if tau and speedup else None,
            **timed,
            "by_category": by_category(decoded, [prompt.category for prompt in self.prompts]),
            "by_context": by_context(decoded),
            "example": self._example(decoded),
        }

    def divergences(self, decoded: Sequence[Decoded], sampling: Sampling = GREEDY) -> Iterator[dict[str, Any]]:
        """Where an answer leaves the verifier's own, and by how much the verifier preferred its first choice there."""
        for prompt, mine, plain in zip(self.prompts, decoded, self.greedy(sampling), strict=True):
            if mine.tokens == plain.tokens:
                continue
            pairs = zip(mine.tokens, plain.tokens, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine.tokens), len(plain.tokens)))
            ids = torch.tensor([prompt.ids + plain.tokens[:at]], device=self.verifier.device)
            logits = self.verifier.logits(self.verifier.features(ids).last[:, -1])
            present = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
            top = penalised(logits, sampling, present)[0].topk(2).values
            yield {"prompt": prompt.id, "position": at, "gap": (top[0] - top[1]).item(), "best": top[0].item()}

    def time(self, drafter: Drafter, trees: Sequence[AnyTree], sampling: Sampling = GREEDY) -> list[dict[str, Any]]:
        """Speed-up of each tree: medians over repeats that take turns, one prompt at a time, after a warm-up. Sampled answers
        are as long as it happens: plain decoding's seconds are those of as many tokens."""
        if not self.timing_prompts:
            return [{} for _ in trees]
        prompts = spread(self.prompts, self.timing_prompts)
        contenders: list[tuple[Drafter | None, AnyTree]] = [(None, chain(0)), *((drafter, tree) for tree in trees)]
        for contender in contenders:
            self.decode(*contender, prompts[:1], 1, sampling)
        turns = [
            [self.decode(*contender, prompts, 1, sampling) for contender in contenders] for _ in range(self.timing_repeats)
        ]
        runs = [[spent for _, spent in turn] for turn in turns]
        totals = [statistics.median(sum(run[i].values()) for run in runs) for i in range(len(contenders))]
        tokens = [sum(len(answer.tokens) for answer in decoded) for decoded, _ in turns[0]]  # the same in every turn
        plain = [totals[0] * count / tokens[0] for count in tokens]
        return [
            {
                "speedup": plain[i] / totals[i],
                "seconds": {part: statistics.median(run[i][part] for run in runs) for part in runs[0][i]} | {"plain": plain[i]},
                "timing": {"prompts": len(prompts), "repeats": self.timing_repeats, "batch": 1},
            }
            for i in range(1, len(contenders))
        ]

    def alpha(self, drafter: Drafter) -> float | None:
        """E[Σ_v min(p, q)] of the first draft on the verifier's own answers; None when no answer is long enough, or where
        drafts have no distribution."""
        pairs = zip(self.prompts, self.plain, strict=True)
        near = (overlap(self.verifier, drafter, prompt.ids, answer.tokens) for prompt, answer in pairs)
        return sum(near, Overlap()).alpha

    def _example(self, decoded: Sequence[Decoded]) -> dict[str, Any] | None:
        """The decoded sample to show: the one with the middle number of tokens a round, so it flatters nobody."""
        rated = sorted((len(d.tokens) / len(d.rounds), i) for i, d in enumerate(decoded) if len(d.rounds) >= 8)
        if not rated or self.verifier.tokenizer is None:
            return None
        i = rated[len(rated) // 2][1]
        prompt, answer = self.prompts[i], decoded[i]
        rounds = [0] + [number + 1 for number, r in enumerate(answer.rounds) for _ in range(r.emitted)]
        texts = pieces(self.verifier.tokenizer, answer.tokens)
        tokens = [
            {"text": text, "source": source, "round": number}
            for text, source, number in zip(texts, answer.sources, rounds, strict=True)
        ]
        return {"id": prompt.id, "category": prompt.category, "prompt": prompt.text, "tokens": tokens}


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text each token adds: a character of several tokens appears with its last one."""
    texts = []
    shown = ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        if not text.endswith("\ufffd") or end == len(ids):
            texts.append(text[len(shown) :])
            shown = text
        else:
            texts.append("")
    return texts
