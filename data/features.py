"""The verifier's hidden states for training: computed anew for every batch, or once and kept in memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from ..heads.adapters import Adapter
from ..heads.batch import Batch
from ..heads.verifier import Features, Verifier
from .chat import Sample
from .packing import collate, lay_out, packed_rows, split_by_tokens


class FeatureSource(ABC):
    """Batches with the verifier states a head needs.

    row_tokens: the size of rows to pack samples into, None packs none. lap: is told what the time since it was last called went
    into.
    """

    row_tokens: int | None = None
    lap: Callable[[str], None] = staticmethod(lambda part: None)

    @abstractmethod
    def load(self, indices: Sequence[int]) -> tuple[Batch, Features]:
        """The batch of these samples and its features."""

    def rows(self, samples: Sequence[Sample]) -> list[list[int]] | None:
        """Which of a batch's samples each of its rows holds; None where each has a row of its own."""
        return None if self.row_tokens is None else packed_rows([len(sample.ids) for sample in samples], self.row_tokens)


class OnlineFeatures(FeatureSource):
    """Run the verifier for every batch: no memory, no disk, the verifier's time every epoch."""

    def __init__(
        self, verifier: Verifier, samples: Sequence[Sample], layers: Sequence[int], row_tokens: int | None = None
    ) -> None:
        self.verifier, self.samples, self.layers, self.row_tokens = verifier, samples, layers, row_tokens

    def load(self, indices: Sequence[int]) -> tuple[Batch, Features]:
        samples = [self.samples[i] for i in indices]
        batch = collate(samples, self.verifier.device, self.rows(samples))
        self.lap("data")
        features = compute(self.verifier, batch, self.layers)
        self.lap("verifier")
        return batch, features


class OriginalFeatures(FeatureSource):
    """Of a verifier whose adapter is being trained, the features without the adapter: what it must not lose."""

    def __init__(self, source: FeatureSource, adapter: Adapter) -> None:
        self.source, self.adapter = source, adapter

    def load(self, indices: Sequence[int]) -> tuple[Batch, Features]:
        with self.adapter.off():
            return self.source.load(indices)


class MemoryFeatures(FeatureSource):
    """Run the verifier once over all samples and keep its states, unpadded, in main memory."""

    def __init__(
        self,
        verifier: Verifier,
        samples: Sequence[Sample],
        layers: Sequence[int],
        batch_tokens: int,
        known: Sequence[Features | None] | None = None,
        on_tokens: Callable[[int], None] = lambda count: None,
        row_tokens: int | None = None,
    ) -> None:
        """known: features that are there already, an entry a sample; only the others are computed."""
        self.samples, self.layers, self.device, self.row_tokens = samples, tuple(layers), verifier.device, row_tokens
        self.kept: list[Features | None] = list(known) if known is not None else [None] * len(samples)
        lengths = [len(sample.ids) for sample in samples]
        order = sorted((i for i, kept in enumerate(self.kept) if kept is None), key=lambda i: lengths[i])
        if not order:
            return
        for indices in split_by_tokens(order, lengths, batch_tokens):
            batch, features = OnlineFeatures(verifier, samples, layers).load(indices)
            for row, i in enumerate(indices):
                self.kept[i] = crop(features, row, lengths[i])
            on_tokens(int(batch.lengths.sum()))

    def load(self, indices: Sequence[int]) -> tuple[Batch, Features]:
        samples = [self.samples[i] for i in indices]
        rows = self.rows(samples)
        batch = collate(samples, self.device, rows)
        kept = [features for i in indices if (features := self.kept[i]) is not None]
        last = lay_out([f.last for f in kept], 0.0, rows)
        layers = lay_out([f.layers for f in kept], 0.0, rows)
        choice = lay_out([f.choice for f in kept if f.choice is not None], -1, rows)
        return batch, Features(last.to(self.device), layers.to(self.device), choice.to(self.device))


def compute(verifier: Verifier, batch: Batch, layers: Sequence[int]) -> Features:
    """Features of a batch, with the verifier's own choice wherever the next token is an answer's."""
    features = verifier.features(batch.ids, layers, batch.positions)
    wanted = batch.ahead(batch.mask, 1, False)
    choice = torch.full_like(batch.ids, -1)
    rows = [verifier.logits(part).argmax(-1) for part in features.last[wanted].split(512)]
    if rows:
        choice[wanted] = torch.cat(rows)
    return Features(features.last, features.layers, choice)


def crop(features: Features, row: int, length: int) -> Features:
    """One sample's features without padding, in main memory (a copy: a view would keep the whole batch alive)."""
    assert features.choice is not None
    parts = (features.last, features.layers, features.choice)
    last, layers, choice = (part[row, :length].to("cpu", copy=True) for part in parts)
    return Features(last, layers, choice)
