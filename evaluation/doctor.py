"""Train/serve parity: does decoding ask the head what training taught it, and if not, where do they part and why?

The checks go from what a head was made with to what it says, so the first that fails names the fault. Depth 1 is a round's
first draft; a position is an index into a text, prompt included, of the last state the head has seen.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UserError
from ..heads.base import DraftHead
from ..heads.verifier import Verifier
from . import causes
from .diagnosis import Check, Diagnosis
from .parity import Comparison, Texts, apart, compare, write_texts
from .provenance_file import Provenance
from .record import by_record
from .shown import shown
from .supervision import of_loss, of_mask

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # share of the largest value by which equal things may differ
COARSE = 0.1  # in half precision
TIES = 0.01  # share of the labels that ties may decide one way or the other
NOT_COUNTED: dict[str, list[int]] = {"labels": [], "correct": []}


def examine(
    head: DraftHead, verifier: Verifier, prompts: Sequence[Sequence[int]], names: Sequence[str], tokens: int,
    record: Provenance | None, adapted: bool = False,
) -> Diagnosis:  # fmt: skip
    """Let the verifier answer the prompts (`names` are their ids) and compare training and decoding on what it wrote.

    record: the run's provenance, None where there is none; adapted: whether the verifier's adapter was learned beside the head,
    so that the record is of the verifier without it. Raises UserError when no answer is long enough.
    """
    checks = list(by_record(head, verifier, record, adapted))
    if checks[-1].healthy is False:  # columns without tokens: nothing can be drafted
        return Diagnosis(checks, accuracy(Comparison([], [], []), NOT_COUNTED))
    texts = write_texts(head, verifier, prompts, tokens)
    if not bool(texts.drafted_from.any()):
        raise UserError(f"doctor: none of the {len(prompts)} answers has two tokens, so nothing is drafted; ask other prompts")
    tolerance = TOLERANCE.get(verifier.dtype, COARSE)
    checks += [of_states(head, verifier, texts, names, tolerance), of_rounds(head, verifier, texts, names, tolerance)]
    supervised = head.supervised(texts.batch, texts.trained)
    depths = head.depth or max(len(supervised), 3)  # a head that goes on for ever is served deeper than it is trained
    found = compare(head, verifier, texts, depths, tolerance)
    checks.append(of_drafts(head, verifier, texts, found, names, tolerance))
    checks.append(masked := of_mask(head, texts, supervised, names))
    if masked.healthy is False:
        return Diagnosis([*checks, Check("labels", None, "not counted under a wrong mask")], accuracy(found, NOT_COUNTED))
    check, logged = of_loss(head, verifier, texts, supervised, TIES if verifier.dtype in TOLERANCE else COARSE)
    return Diagnosis([*checks, check], accuracy(found, logged))


def accuracy(found: Comparison, loss: dict[str, list[int]]) -> dict[str, list[Any]]:
    """By depth. labels: tokens of the answers that decoding would draft; training, decoding: the share of them that is the
    head's first choice on each side; loss_labels, loss: those the training loss counts, and its share."""

    def shares(hits: Sequence[int], labels: Sequence[int]) -> list[float | None]:
        return [hit / all_ if all_ else None for hit, all_ in zip(hits, labels, strict=True)]

    return {
        "labels": found.labels,
        "training": shares(found.trained, found.labels),
        "decoding": shares(found.decoded, found.labels),
        "loss_labels": loss["labels"],
        "loss": shares(loss["correct"], loss["labels"]),
    }


def of_rounds(head: DraftHead, verifier: Verifier, texts: Texts, names: Sequence[str], tolerance: float) -> Check:
    """The verifier's states in one pass and as rounds of the decoding loop hand them to the head, accepted drafts' included."""
    count = 0
    for row, states in enumerate(shown(verifier, texts, head.needs)):
        size = len(states.last)
        pairs = [(texts.trained.last[row, :size], states.last)]
        if head.needs:
            pairs += zip(texts.trained.layers[row, :size].chunk(len(head.needs), -1),
                         states.layers.chunk(len(head.needs), -1), strict=True)  # fmt: skip
        wrong = torch.stack([apart(a.float(), b.float(), tolerance) for a, b in pairs]).any(0)
        if bool(wrong.any()):
            at = int(wrong.int().argmax())
            return Check("rounds", False, f"rounds over a tree show the head another state of token {at} than one pass has",
                         causes.UNKNOWN[0], None, names[row], at)  # fmt: skip
        count += size
    return Check("rounds", True, f"{count} states handed on by rounds over a tree within {tolerance:g}")


def of_states(head: DraftHead, verifier: Verifier, texts: Texts, names: Sequence[str], tolerance: float) -> Check:
    """The verifier's states in one pass and as decoding finds them, each by its own size."""
    size = texts.decoded.last.shape[1]
    pairs = [(texts.trained.last[:, :size], texts.decoded.last)]
    if head.needs:
        pairs += zip(texts.trained.layers[:, :size].chunk(len(head.needs), -1),
                     texts.decoded.layers.chunk(len(head.needs), -1), strict=True)  # fmt: skip
    real = torch.arange(size, device=texts.batch.ids.device) < texts.batch.lengths[:, None] - 1
    wrong = torch.stack([apart(a.float(), b.float(), tolerance) for a, b in pairs]).any(0) & real
    if not bool(wrong.any()):
        return Check("states", True, f"{int(real.sum())} states of {len(names)} texts within {tolerance:g}")
    row = int(wrong.any(1).int().argmax())
    at = int(wrong[row].int().argmax())
    cause, note = causes.of_states(verifier, texts, row, at, head.needs, tolerance)
    return Check("states", False, note, cause, None, names[row], at)


def of_drafts(
    head: DraftHead, verifier: Verifier, texts: Texts, found: Comparison, names: Sequence[str], tolerance: float
) -> Check:  # fmt: skip
    parting = found.parting
    if parting is None:
        return Check("drafts", True, f"{sum(found.labels)} predictions of {len(found.labels)} depths within {tolerance:g}")
    cause, note = causes.of_drafts(head, verifier, texts, parting, tolerance)
    first = [int(head.target_ids[side.argmax()]) for side in (parting.trained, parting.decoded)]
    note += f"; log q differs by {parting.by:.3g}, first choices {first[0]} in training and {first[1]} in decoding"
    return Check("drafts", False, note, cause, parting.depth + 1, names[parting.row], parting.at)
