"""How far a text is the verifier's own: the share of its supervised tokens that the verifier would choose itself."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..heads.verifier import Verifier
from .chat import Sample
from .features import FeatureSource, OnlineFeatures
from .packing import split_by_tokens

LOW = 0.75  # the verifier's own greedy answers give 1; SmolLM2-135M agrees with two thirds of GSM8K's own answers
BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Agreement:
    """agreeing of `tokens` supervised tokens are the argmax of the verifier, given the text before them."""

    tokens: int
    agreeing: int

    @property
    def share(self) -> float:
        return self.agreeing / max(self.tokens, 1)

    @property
    def warning(self) -> str | None:
        """What a low share means, None when it is high."""
        if not self.tokens or self.share >= LOW:
            return None
        return (
            f"only {self.share:.0%} of the supervised tokens are what the verifier would choose: a head would learn another "
            "author's words and see its drafts refused; data.answers: regenerate lets the verifier write"
        )


def agreement(source: FeatureSource, batches: Iterable[Sequence[int]]) -> Agreement:
    """Count over batches of sample indices of the source."""
    tokens = agreeing = 0
    for indices in batches:
        batch, features = source.load(indices)
        assert features.choice is not None
        choice = features.choice[:, :-1]
        tokens += int((choice >= 0).sum())
        agreeing += int((choice == batch.ids[:, 1:]).sum())
    return Agreement(tokens, agreeing)


def read_agreement(verifier: Verifier, samples: Sequence[Sample]) -> Agreement:
    """Let the verifier read the samples."""
    lengths = [len(sample.ids) for sample in samples]
    batches = split_by_tokens(sorted(range(len(samples)), key=lambda i: lengths[i]), lengths, BATCH_TOKENS) if samples else []
    return agreement(OnlineFeatures(verifier, samples, ()), batches)


def a_few(samples: Sequence[Sample], tokens: int = BATCH_TOKENS) -> list[list[int]]:
    """Indices of samples from all over, one a batch, about as many as `tokens` hold."""
    average = sum(len(sample.ids) for sample in samples) / len(samples)
    count = min(len(samples), max(1, round(tokens / average)))
    return [[i * len(samples) // count] for i in range(count)]
