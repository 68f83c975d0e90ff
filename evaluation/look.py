"""A look at a head during training: real decoding of held-out prompts, as many as fit into a time budget."""

import time
from typing import Any

from ..data.conversations import spread
from ..heads.base import DraftHead
from .decode import speculate
from .evaluate import Evaluator
from .metrics import acceptance
from .overlap import Overlap, overlap
from .tree import AnyTree


def look(
    evaluator: Evaluator, head: DraftHead, tree: AnyTree, limit: int | None = None, seconds: float | None = None
) -> dict[str, Any]:
    """Acceptance, alpha and kl of one tree, on at most `limit` of the evaluator's prompts.

    Prompts are decoded in a fixed order, a batch at a time, until the next batch would probably pass `seconds`; the first batch
    always is. prompts: how many were judged, of how many; by_prompt: [emitted, rounds] of each, so that two looks can be
    compared on what both saw.
    """
    asked = spread(evaluator.prompts, limit)
    rounds, by_prompt, near = [], [], Overlap()
    start = time.perf_counter()
    for first in range(0, len(asked), evaluator.batch):
        spent = time.perf_counter() - start
        if seconds is not None and first and spent * (1 + evaluator.batch / first) > seconds:
            break
        part = asked[first : first + evaluator.batch]
        answers, _ = speculate(evaluator.verifier, head, tree, [prompt.ids for prompt in part], evaluator.max_new_tokens)
        for prompt, answer in zip(part, answers, strict=True):
            near += overlap(evaluator.verifier, head, prompt.ids, answer.tokens)
            rounds += answer.rounds
            by_prompt.append([sum(r.emitted for r in answer.rounds), len(answer.rounds)])
    metrics = acceptance(rounds, tree.depth)
    names = ("tau", "survival", "conditional", "rounds", "emitted")
    found = {name: metrics[name] for name in names if name != "conditional" or tree.kind == "chain"}
    return found | {"alpha": near.alpha, "kl": near.kl, "prompts": len(by_prompt), "of": len(asked), "by_prompt": by_prompt}
