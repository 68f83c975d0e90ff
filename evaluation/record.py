"""What a head was made with: kept beside it when it is trained, compared when it is used."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ..heads.base import LEARNING, DraftHead
from ..heads.verifier import Verifier
from .diagnosis import Check
from .provenance_file import MadeWith, Provenance

CAUSES = {
    "layers": "layer ids", "fc_norm": "norm order", "norm_output": "norm order", "rms_norm_eps": "norm order",
    "rope_parameters": "positions", "max_position_embeddings": "positions", "draft_vocab_size": "vocabulary map",
}  # fmt: skip


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def template_digest(verifier: Verifier) -> str:
    return digest(str(getattr(verifier.tokenizer, "chat_template", None) or ""))


def dtype_name(verifier: Verifier) -> str:
    return str(verifier.dtype).removeprefix("torch.")


def vocabulary_digest(head: DraftHead) -> str:
    return digest(str(head.target_ids.tolist()))


def made_with(head: DraftHead, layers: Sequence[int]) -> dict[str, Any]:
    """What decoding must find again. layers: those whose states the training features hold."""
    config = head.config.model_dump(mode="json")
    return {"layers": list(layers), "vocabulary": vocabulary_digest(head), "config": config}


def by_record(head: DraftHead, verifier: Verifier, record: Provenance | None, adapted: bool) -> Iterator[Check]:
    """What the head folder and the verifier say today against what training was done with, and the vocabulary by itself.

    record: the run's provenance, None where there is none; adapted: whether the verifier's adapter was learned beside the head.
    """
    trained = None if record is None else record.head
    unknown = "provenance.json does not say: the head was not trained here, or before this was recorded"
    if record is None:
        yield Check("template", None, unknown)
    else:
        same = record.template == template_digest(verifier)
        note = "the chat template of training" if same else "the verifier's chat template is not the one of training"
        yield Check("template", same, note, None if same else "template")
    yield Check("verifier", None, unknown) if record is None else of_verifier(verifier, record, adapted)
    yield Check("configuration", None, unknown) if trained is None else of_configuration(head, trained)
    ids = head.target_ids
    fault = vocabulary_fault(ids, head.config.vocab_size)
    if fault is None and trained is not None and trained.vocabulary != vocabulary_digest(head):
        fault = "its tokens are not those of training"
    note = f"{len(ids)} of {head.config.vocab_size} tokens"
    yield Check("vocabulary", not fault, fault or note, "vocabulary map" if fault else None)


def of_verifier(verifier: Verifier, record: Provenance, adapted: bool) -> Check:
    """Its fingerprint is of more than its weights: it is compared where nothing but another verifier would change it."""
    made, dtype = record.verifier, dtype_name(verifier)
    if adapted:
        return Check("verifier", None, "not compared: the record is of the verifier before it learned its adapter")
    if made.dtype != dtype:
        then = "in a precision that provenance.json does not say" if made.dtype is None else f"in {made.dtype}"
        return Check("verifier", None, f"not compared: weights hashed {then}, here in {dtype}")
    if record.template != template_digest(verifier):
        return Check("verifier", None, "not compared: the chat template is part of its hash")
    if made.fingerprint != verifier.fingerprint:
        return Check("verifier", False, f"{verifier.name} has not the weights or the configuration of {made.name}, which the "
                     "head was trained for", "verifier")  # fmt: skip
    return Check("verifier", True, "the weights and the configuration of training")


def of_configuration(head: DraftHead, trained: MadeWith) -> Check:
    now, then = head.config.model_dump(mode="json"), trained.config
    differing = [name for name in now if name not in LEARNING and now[name] != then.get(name, now[name])]
    if list(head.needs) != trained.layers:
        return Check("configuration", False, f"the head reads states {list(head.needs)}, training read {trained.layers}",
                     "layer ids")  # fmt: skip
    if differing:
        name = differing[0]
        return Check("configuration", False, f"{name} is {now[name]} in head/config.json, {then.get(name)} in training",
                     CAUSES.get(name, "configuration"))  # fmt: skip
    return Check("configuration", True, "head/config.json as in training")


def undraftable(ids: Tensor, vocab_size: int) -> str | None:
    """Why tokens cannot be drafted by target_ids: the rules above temperature 0 rely on siblings being different tokens."""
    if not bool(((ids >= 0) & (ids < vocab_size)).all()):
        return f"ids from {int(ids.min())} to {int(ids.max())} for a vocabulary of {vocab_size}"
    found, counts = ids.unique(return_counts=True)
    return None if len(found) == len(ids) else f"id {int(found[counts.argmax()])} stands there {int(counts.max())} times"


def vocabulary_fault(ids: Tensor, vocab_size: int) -> str | None:
    """What is wrong with target_ids whoever trained them: engines, too, rely on distinct ids in ascending order."""
    if fault := undraftable(ids, vocab_size):
        return fault
    if not bool((ids[1:] > ids[:-1]).all()):
        at = int((ids[1:] <= ids[:-1]).int().argmax())
        return f"ids must ascend, {int(ids[at])} is followed by {int(ids[at + 1])} (offsets instead of ids, or permuted)"
    return None
