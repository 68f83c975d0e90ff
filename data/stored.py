"""Training features from a folder: the verifier runs for what is not there, and not at all once everything is."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import UserError
from ..heads.batch import Batch
from ..heads.verifier import Features, Verifier
from .chat import Sample
from .encoding import decode, encode
from .features import FeatureSource, compute
from .packing import collate, lay_out, split_by_tokens
from .store import FeatureStore, Rows
from .survey import HEADER, Layout

Heard = Callable[[int], None]


class StoredFeatures(FeatureSource):
    """States of `samples` out of a store. What it lacks is computed, stored and served as it was stored."""

    def __init__(
        self, verifier: Verifier, samples: Sequence[Sample], store: FeatureStore, batch_tokens: int = 2048,
        row_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.verifier, self.samples, self.store = verifier, samples, store
        self.batch_tokens, self.row_tokens = batch_tokens, row_tokens
        self.layout: Layout = store.survey.layout

    def fill(self, on_tokens: Heard = lambda count: None) -> None:
        """Write what is missing, as far as `keep` goes. Processes that fill the same folder share the work."""
        chunks = self._chunks()
        for wait in (False, True):  # first what nobody is at, then what somebody may have died over
            for number, chunk in enumerate(chunks):
                if not self.store.missing(chunk):
                    continue
                with self.store.claim(number, wait) as mine:
                    if mine:
                        self.store.scan()
                        self.make(self.store.missing(chunk), on_tokens)

    def tokens_to_fill(self) -> int:
        return int(sum(self.store.survey.tokens[self.store.missing(chunk)].sum() for chunk in self._chunks()))

    def _chunks(self) -> list[range]:
        """What makes a shard each, as far as `keep` goes."""
        sizes, room = self.store.survey.sample_bytes(), self.store.keep
        chunks = []
        for chunk in self.store.survey.chunks():
            room = None if room is None else room - int(sizes[chunk].sum()) - HEADER
            if room is None or room >= 0:
                chunks.append(chunk)
        return chunks

    def make(self, indices: Sequence[int], on_tokens: Heard = lambda count: None) -> dict[int, Rows]:
        """Run the verifier over these samples and add them to the store as a shard."""
        lengths = self.store.survey.tokens.tolist()
        made: dict[int, Rows] = {}
        order = sorted(indices, key=lambda i: lengths[i])
        for part in split_by_tokens(order, lengths, self.batch_tokens) if order else ():
            batch = collate([self.samples[i] for i in part], self.verifier.device)
            features = compute(self.verifier, batch, self.layout.layers)
            for row, i in enumerate(part):
                made[i] = self._encoded(i, batch, features, row, lengths[i])
            on_tokens(int(batch.lengths.sum()))
        if made:
            self.store.write({i: made[i] for i in indices})
        return made

    def _encoded(self, i: int, batch: Batch, features: Features, row: int, length: int) -> Rows:
        assert features.choice is not None
        last, layers = features.last[row, :length], features.layers[row, :length]
        if not (last.isfinite().all() and layers.isfinite().all()):
            raise UserError(f"sample {i} ({self.samples[i].source or 'no source'}): the verifier's states are not finite; "
                            "use another verifier.dtype, or leave the row out")  # fmt: skip
        if not self.layout.everywhere:
            last = last[before_supervised(batch.mask[row, :length])]
        parts = {"last": last}
        if self.layout.layers:
            parts["layers"] = layers.unflatten(-1, (len(self.layout.layers), self.layout.width))
        rows: Rows = {"choice": features.choice[row, :length].int().cpu()}
        for name, states in parts.items():
            values, scale = encode(states, self.layout.dtype)
            rows[name] = values.to("cpu", copy=True)  # a view would keep the whole batch alive
            if scale is not None:
                rows[f"{name}_scale"] = scale.cpu()
        return rows

    def load(self, indices: Sequence[int]) -> tuple[Batch, Features]:
        samples = [self.samples[i] for i in indices]
        packed = self.rows(samples)
        batch = collate(samples, self.verifier.device, packed)
        rows = self.store.read_all(indices)
        if any(found is None for found in rows.values()):
            self.store.scan()  # another process may have been here
            rows |= self.store.read_all([i for i, found in rows.items() if found is None])
            torn = [i for i, found in rows.items() if found is None]
            if torn and self.verifier.sharded:  # its other owners are at something else
                raise UserError(f"{self.store.folder} lacks sample {torn[0]}; run again to make it")
            rows |= self.make(torn)
        decoded = [self._decoded(rows[i], sample) for i, sample in zip(indices, samples, strict=True)]
        return batch, Features(
            lay_out([f.last for f in decoded], 0.0, packed),
            lay_out([f.layers for f in decoded], 0.0, packed),
            lay_out([f.choice for f in decoded if f.choice is not None], -1, packed),
        )

    def _decoded(self, rows: Rows | None, sample: Sample) -> Features:
        """One sample as the verifier gave it, [T, ...]; zeros where the last state was not stored."""
        assert rows is not None
        at = {name: tensor.to(self.verifier.device) for name, tensor in rows.items()}
        dtype = self.verifier.dtype
        last = decode(at["last"], at.get("last_scale"), dtype)
        if not self.layout.everywhere:
            known, last = last, last.new_zeros(len(sample.ids), self.layout.width)
            last[before_supervised(torch.tensor(sample.mask))] = known
        layers = last[:, :0]
        if self.layout.layers:
            layers = decode(at["layers"], at.get("layers_scale"), dtype).flatten(1)
        return Features(last, layers, at["choice"].long())


def before_supervised(mask: Tensor) -> Tensor:
    """bool [T]: the positions whose next token is supervised."""
    return torch.cat([mask[1:], mask.new_zeros(1)])
