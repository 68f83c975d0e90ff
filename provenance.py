"""What a head was trained on, by hashes: written into the run folder, shown on the model card."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from .data.chat import Sample, counts
from .evaluation.record import dtype_name, template_digest
from .heads.verifier import Verifier


def provenance(verifier: Verifier, samples: Sequence[Sample]) -> dict[str, Any]:
    """verifier: its name, the hash of its weights and their precision; template: SHA-256 of the chat template; data: counts,
    and SHA-256 of every sample's ids and mask in order."""
    digest = hashlib.sha256()

    def read() -> Iterator[Sample]:
        for sample in samples:
            digest.update(json.dumps([list(sample.ids), [int(m) for m in sample.mask]]).encode())
            yield sample

    counted = counts(read())
    return {
        "verifier": {"name": verifier.name, "fingerprint": verifier.fingerprint, "dtype": dtype_name(verifier)},
        "template": template_digest(verifier),
        "data": counted | {"sha256": digest.hexdigest()},
    }
