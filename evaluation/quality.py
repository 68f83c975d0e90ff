"""What a trained adapter did to the verifier itself: perplexity of held-out answers, and the distance from what it was."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..data.chat import Sample
from ..heads.verifier import Verifier

ROWS = 64  # distributions over the whole vocabulary in memory at once, twice


@torch.no_grad()
def quality(verifier: Verifier, samples: Sequence[Sample]) -> dict[str, Any]:
    """Over the supervised tokens of the samples: exp of the mean -log p, and the mean KL(p without the adapter || p).

    Keys: tokens; before and after, each {"perplexity", "kl"}, where kl is in nats a token and 0 before.
    """
    assert verifier.adapter is not None
    tokens, before, after, divergence = 0, 0.0, 0.0, 0.0
    for sample in samples:
        ids = torch.tensor([sample.ids], device=verifier.device)
        where = torch.tensor(sample.mask[1:], device=verifier.device)
        labels = ids[0, 1:][where]
        adapted = verifier.features(ids).last[0, :-1][where]
        with verifier.adapter.off():
            original = verifier.features(ids).last[0, :-1][where]
        for label, old, new in zip(labels.split(ROWS), original.split(ROWS), adapted.split(ROWS), strict=True):
            log_p, log_q = (verifier.logits(states).double().log_softmax(-1) for states in (old, new))
            before -= log_p.gather(1, label[:, None]).sum().item()
            after -= log_q.gather(1, label[:, None]).sum().item()
            divergence += (log_p.exp() * (log_p - log_q)).sum().item()
        tokens += len(labels)
    return {
        "tokens": tokens,
        "before": {"perplexity": math.exp(before / tokens), "kl": 0.0},
        "after": {"perplexity": math.exp(after / tokens), "kl": divergence / tokens},
    }
