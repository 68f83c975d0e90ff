"""What a head's vocabulary leaves out, against a walk over the labels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headstart.data.chat import Sample
from headstart.data.features import MemoryFeatures
from headstart.data.left_out import left_out


@pytest.mark.parametrize("kind", ["tiny_medusa", "tiny_mtp", "tiny_eagle1", "tiny_eagle3"])
def test_labels_outside_the_vocabulary(
    kind: str, tiny: Callable[..., Any], ids_of: Callable[..., list[int]], half_vocabulary: torch.Tensor,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """The text's tokens, or the verifier's choices from an answer's first token on."""
    verifier, known = tiny("llama"), half_vocabulary.tolist()
    head = request.getfixturevalue(kind)(verifier, target_ids=half_vocabulary)
    samples = [Sample(ids_of(seed, 14), [False] * 4 + [True] * 10) for seed in range(3)]
    found = left_out(head, MemoryFeatures(verifier, samples, head.needs, 100), [[0, 1], [2]])
    labels = []
    for sample in samples:
        chosen = verifier.model(input_ids=torch.tensor([sample.ids])).logits[0].argmax(-1).tolist()
        labels += sample.ids[4:] if kind in ("tiny_medusa", "tiny_mtp") else chosen[4:-1]
    assert found == (sum(label not in known for label in labels), len(labels))
    assert 0 < found[0] < found[1]
