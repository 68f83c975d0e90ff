"""The same predictions twice: as training makes them, in one pass, and as decoding makes them, a token at a time.

Both read texts that the verifier wrote. At a position t of an answer the head has seen states up to t and token t + 1, the
root; depth k is its prediction of token t + 2 + k after the true tokens between.

Shapes: B texts, T tokens, K depths, N positions drafted from, Q columns of the head's vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.chat import Sample
from ..data.features import compute
from ..data.packing import collate
from ..heads.base import DraftHead
from ..heads.batch import Batch, shifted, take_rows
from ..heads.generate import generate_with_features
from ..heads.verifier import Features, Verifier

STRIDES = ((1,), (1, 2, 3))  # tokens committed a round, in turns: every position, then ragged rounds as acceptance makes them


@dataclass(frozen=True)
class Texts:
    """What the verifier wrote. starts: tokens of each prompt; trained: states of one plain pass, as training reads them;
    decoded: [B, T - 1, ..], those that decoding left behind (the last token is never fed)."""

    batch: Batch
    starts: list[int]
    trained: Features
    decoded: Features

    @property
    def drafted_from(self) -> Tensor:
        """bool [B, T]: positions whose root and first draft are both the answer's."""
        return shifted(self.batch.mask, 1, False) & shifted(self.batch.mask, 2, False)


@torch.no_grad()
def write_texts(head: DraftHead, verifier: Verifier, prompts: Sequence[Sequence[int]], tokens: int) -> Texts:
    """Let the verifier answer greedily, at most `tokens` tokens a prompt."""
    answers, states = generate_with_features(verifier, prompts, tokens, head.needs)
    samples = [
        Sample([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    batch = collate(samples, verifier.device)
    last, layers = (pad_sequence(part, batch_first=True) for part in ([f.last for f in states], [f.layers for f in states]))
    decoded = Features(last.to(verifier.device), layers.to(verifier.device))
    return Texts(batch, [len(prompt) for prompt in prompts], compute(verifier, batch, head.needs), decoded)


@dataclass(frozen=True)
class Step:
    """One call of a session. rows: the texts still going; at: their positions t; log_q: [rows, Q]."""

    rows: list[int]
    at: list[int]
    depth: int
    log_q: Tensor


def trace(head: DraftHead, verifier: Verifier, texts: Texts, depths: int, strides: Sequence[int]) -> Iterator[Step]:
    """Run the drafting session over the texts as decoding would: a prompt, then `strides` tokens at a time in turns."""
    ids, ends = texts.batch.ids, [int(n) - 2 for n in texts.batch.lengths]  # states shown at most, so that a label is left
    rows = [row for row, end in enumerate(ends) if end >= texts.starts[row]]
    widest = max([*strides, *(texts.starts[row] for row in rows)], default=0)
    session = head.begin(verifier, len(rows), ids.shape[1] + widest + depths)
    shown = [0] * len(ends)
    for turn in count():
        if not rows:
            return
        steps = [strides[(turn + row) % len(strides)] if turn else texts.starts[row] for row in rows]
        counts = [min(step, ends[row] - shown[row]) for row, step in zip(rows, steps, strict=True)]
        index = torch.tensor([[min(shown[row] + i, ends[row]) for i in range(max(counts))] for row in rows], device=ids.device)
        features = Features(take_rows(texts.decoded.last[rows], index), take_rows(texts.decoded.layers[rows], index))
        log_q = session.observe(features, ids[rows].gather(1, index + 1), counts)
        for row, number in zip(rows, counts, strict=True):
            shown[row] += number
        at = torch.tensor([shown[row] - 1 for row in rows], device=ids.device)
        yield Step(rows, at.tolist(), 0, log_q)
        for k in range(1, min(depths, max(ends[row] + 1 - shown[row] for row in rows))):
            node = ids[rows].gather(1, (at + 1 + k).clamp(max=ids.shape[1] - 1)[:, None])
            log_q = session.expand(node, torch.full_like(node, k - 2))[:, 0]
            yield Step(rows, at.tolist(), k, log_q)
        going = [i for i, row in enumerate(rows) if shown[row] < ends[row]]
        if len(going) < len(rows):
            session.keep_rows(going)
            rows = [rows[i] for i in going]


@dataclass(frozen=True)
class Parting:
    """Where two log q [Q] that should be one are not. by: their largest difference."""

    depth: int
    row: int
    at: int
    trained: Tensor
    decoded: Tensor
    by: float


@dataclass
class Comparison:
    """By depth: labels met by decoding, and how many of them were the first choice on either side. parting: the shallowest
    depth that parts, at its first position."""

    labels: list[int]
    trained: list[int]
    decoded: list[int]
    parting: Parting | None = None


@torch.no_grad()
def compare(head: DraftHead, verifier: Verifier, texts: Texts, depths: int, tolerance: float) -> Comparison:
    where = texts.drafted_from
    predicted = head.predictions(texts.batch, texts.trained, verifier, where, depths)
    number = torch.full_like(texts.batch.ids, -1)
    number[where] = torch.arange(int(where.sum()), device=number.device)
    found = Comparison([0] * depths, [0] * depths, [0] * depths)
    lengths = texts.batch.lengths.tolist()
    for strides in STRIDES:
        for step in trace(head, verifier, texts, depths, strides):
            pairs = zip(step.rows, step.at, strict=True)
            labelled = [i for i, (row, t) in enumerate(pairs) if t + 2 + step.depth < lengths[row]]
            rows = torch.tensor([step.rows[i] for i in labelled], device=number.device)
            at = torch.tensor([step.at[i] for i in labelled], device=number.device)
            trained, decoded = predicted[step.depth][number[rows, at]], step.log_q[labelled]
            if strides == STRIDES[0]:  # the others are the same positions again
                label = texts.batch.ids[rows, at + 2 + step.depth]
                found.labels[step.depth] += len(labelled)
                found.trained[step.depth] += int((head.target_ids[trained.argmax(-1)] == label).sum())
                found.decoded[step.depth] += int((head.target_ids[decoded.argmax(-1)] == label).sum())
            for i in torch.nonzero(apart(trained, decoded, tolerance))[:, 0].tolist():
                by = (trained[i] - decoded[i]).abs().max().item()
                mine = Parting(step.depth, int(rows[i]), int(at[i]), trained[i], decoded[i], by)
                if found.parting is None or order(mine) < order(found.parting):
                    found.parting = mine
    return found


def order(parting: Parting) -> tuple[int, int, int]:
    return parting.depth, parting.at, parting.row


def apart(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """bool [..]: whether the largest difference over the last dimension is more than a share of the largest value."""
    return ~((a - b).abs().amax(-1) <= tolerance * a.abs().amax(-1).clamp(min=1e-6))
