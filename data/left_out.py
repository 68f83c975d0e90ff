"""What a head with a vocabulary of its own cannot learn."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ..heads.base import DraftHead
from .features import FeatureSource


def left_out(head: DraftHead, source: FeatureSource, batches: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Labels of the first draft that the head's vocabulary has not, and all of them, over batches of sample indices."""
    missing = there = 0
    for indices in batches:
        batch, features = source.load(indices)
        assert features.choice is not None
        known = int(head.target_ids[0])  # as if every label were this one
        whole = replace(batch, ids=torch.full_like(batch.ids, known))
        chosen = replace(features, choice=features.choice.where(features.choice < 0, known))
        labels = int(head.supervised(whole, chosen)[0].sum())
        there += labels
        missing += labels - int(head.supervised(batch, features)[0].sum())
    return missing, there
