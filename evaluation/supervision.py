"""Does the training loss learn, and count as hits, what decoding will draft?

Shapes: B texts, T tokens, K depths.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..heads.base import DraftHead, columns_of
from ..heads.batch import shifted
from ..heads.verifier import Verifier
from .diagnosis import Check
from .parity import Texts


def of_mask(head: DraftHead, texts: Texts, supervised: Tensor, names: Sequence[str]) -> Check:
    """Training must learn every label that decoding drafts and no label outside an answer."""
    batch, trained = texts.batch, texts.trained
    assert trained.choice is not None
    columns = columns_of(head.target_ids, head.config.vocab_size)
    known = (columns[batch.ids] >= 0) & shifted_back((trained.choice >= 0) & (columns[trained.choice.clamp(min=0)] >= 0))
    inside, must, may = shifted(batch.mask, 1, False), [], []
    for k in range(len(supervised)):
        may.append(shifted(batch.mask, 2 + k, False))
        inside = inside & may[-1]
        must.append(inside & shifted(known, 2 + k, False))
    least, most = torch.stack(must), torch.stack(may)
    wrong = (supervised & ~most) | (least & ~supervised)
    if not bool(wrong.any()):
        return Check("mask", True, f"{int(supervised.sum())} labels learned, all of them the answers'")
    k, row, at = (int(i) for i in min(torch.nonzero(wrong).tolist(), key=lambda found: (found[0], found[2])))
    outside = {by: (supervised & ~moved(most, by)) | (moved(least, by) & ~supervised) for by in (-2, -1, 1, 2)}
    moves = [by for by, its in outside.items() if not bool(its.any())]
    over = bool(supervised[k, row, at])
    note = f"token {at + 2 + k} is {'not of an answer, but learned' if over else 'of an answer, but not learned'}"
    if moves:
        note += f": the mask is read {abs(moves[0])} too {'early' if moves[0] < 0 else 'late'}"
        return Check("mask", False, note, "mask shift", k + 1, names[row], at)
    cause = "mask shift" if over or len(head.target_ids) == head.config.vocab_size else "vocabulary map"
    return Check("mask", False, note, cause, k + 1, names[row], at)


def moved(x_KBT: Tensor, by: int) -> Tensor:
    """x[..., t + by] at every t, false past the ends."""
    out = torch.zeros_like(x_KBT)
    if by > 0:
        out[..., :-by] = x_KBT[..., by:]
    else:
        out[..., -by:] = x_KBT[..., :by]
    return out


def shifted_back(x_BT: Tensor) -> Tensor:
    return moved(x_BT, -1)


@torch.no_grad()
def of_loss(
    head: DraftHead, verifier: Verifier, texts: Texts, supervised: Tensor, slack: float
) -> tuple[Check, dict[str, list[int]]]:  # fmt: skip
    """Whether the hits that the training loss counts are first choices that decoding would see accepted.

    slack: share of the labels that ties may decide otherwise.
    """
    loss = head.loss(texts.batch, texts.trained, verifier)
    logged = {"labels": loss.counts.tolist(), "correct": loss.correct.tolist()}
    where = supervised.any(0)
    predicted = head.predictions(texts.batch, texts.trained, verifier, where, len(supervised))
    columns = [log_q.argmax(-1) for log_q in predicted]

    def hits(label: Tensor, by_id: bool) -> list[int]:
        """label: [B, T]; by_id: as decoding reads a column, else as if columns were ids."""
        found = []
        for k, column in enumerate(columns):
            its = supervised[k][where]
            chosen = head.target_ids[column] if by_id else column
            found.append(int(((chosen == shifted(label, 2 + k, -1)[where]) & its).sum()))
        return found

    def near(found: list[int]) -> bool:
        triples = zip(found, logged["correct"], logged["labels"], strict=True)
        return all(abs(ours - its) <= max(1.0, n * slack) for ours, its, n in triples)

    right = hits(texts.batch.ids, True)
    if logged["labels"] == supervised.flatten(1).sum(1).tolist() and near(right):
        return Check("labels", True, f"{sum(right)} of {sum(logged['labels'])} labels hit, as the loss counts them"), logged
    note = f"the loss counts {sum(logged['correct'])} hits of {sum(logged['labels'])} labels, decoding would see {sum(right)}"
    k = next((k for k, pair in enumerate(zip(right, logged["correct"], strict=True)) if pair[0] != pair[1]), 0)
    for by in (-1, 1):
        if near(hits(moved(texts.batch.ids, by), True)):
            note += f": its labels are those {'before' if by < 0 else 'behind'} the tokens drafted"
            return Check("labels", False, note, "mask shift", k + 1), logged
    if near(hits(texts.batch.ids, False)):
        return Check("labels", False, note + ": it takes columns for token ids", "vocabulary map", k + 1), logged
    pruned = len(head.target_ids) < head.config.vocab_size
    return Check("labels", False, note, "vocabulary map" if pruned else "unknown", k + 1), logged
