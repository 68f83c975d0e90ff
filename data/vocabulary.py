"""The draft vocabulary: which of the verifier's tokens a head may propose."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError


@dataclass(frozen=True)
class DraftVocabulary:
    """ids: the kept verifier ids, ascending; coverage: share of the supervised tokens that they cover."""

    ids: list[int]
    coverage: float


def choose_vocabulary(
    samples: Iterable[tuple[Sequence[int], Sequence[bool]]], size: int, vocab_size: int, pinned: Iterable[int]
) -> DraftVocabulary:
    """The draft vocabulary of `samples` (ids, mask): see `choose_by_count`."""
    counts: Counter[int] = Counter()
    for ids, mask in samples:
        counts.update(token for token, learned in zip(ids, mask, strict=True) if learned)
    return choose_by_count(counts, size, vocab_size, pinned)


def choose_by_count(counts: Counter[int], size: int, vocab_size: int, pinned: Iterable[int]) -> DraftVocabulary:
    """The `size` most frequent of the counted tokens, all `pinned` ids among them.

    pinned: stop tokens and other special ids, kept whatever their count: a small or truncated corpus may not show them.
    Where fewer different tokens occur, the lowest unseen ids fill up: byte-pair merges are numbered by frequency.
    Raises UserError when `size` cannot hold the pinned ids or exceeds the vocabulary.
    """
    kept = sorted({token for token in pinned if token < vocab_size})
    if not len(kept) <= size <= vocab_size:
        raise UserError(f"draft vocabulary of {size}: must hold the {len(kept)} special tokens and fit in the verifier's "
                        f"{vocab_size}")  # fmt: skip
    chosen = set(kept)
    by_count = sorted(counts, key=lambda token: (-counts[token], token))
    for token in [*by_count, *range(vocab_size)]:
        if len(chosen) == size:
            break
        chosen.add(token)
    covered = sum(count for token, count in counts.items() if token in chosen)
    return DraftVocabulary(sorted(chosen), covered / max(counts.total(), 1))


def template_tokens(tokenizer: Any) -> set[int]:
    """Special ids, and the tokens of its own that the chat template writes, special or not: ends of turns, tags of calls."""
    template = str(tokenizer.chat_template or "")
    written = {id for id, token in tokenizer.added_tokens_decoder.items() if str(token) in template}
    return written | set(tokenizer.all_special_ids)
