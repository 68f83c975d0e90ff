"""What a head was trained on, by hashes: written into the run folder, shown on the model card."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from .data.chat import Sample
from .heads.verifier import Verifier


def provenance(verifier: Verifier, samples: Sequence[Sample]) -> dict[str, Any]:
    """verifier: its name and the hash of its weights; template: SHA-256 of the chat template; data: counts, and SHA-256 of
    every sample's ids and mask in order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([list(sample.ids), [int(m) for m in sample.mask]]).encode())
    template = getattr(verifier.tokenizer, "chat_template", None) or ""
    return {
        "verifier": {"name": verifier.name, "fingerprint": verifier.fingerprint},
        "template": hashlib.sha256(str(template).encode()).hexdigest(),
        "data": {
            "samples": len(samples),
            "tokens": sum(len(sample.ids) for sample in samples),
            "supervised": sum(sum(sample.mask) for sample in samples),
            "sha256": digest.hexdigest(),
        },
    }
