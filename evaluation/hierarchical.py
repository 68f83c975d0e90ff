"""Two drafters, one behind the other: prompt lookup where the text repeats itself, the head elsewhere, by row and round."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..heads.batch import Batch
from ..heads.drafter import Drafter, DraftSession
from ..heads.verifier import Features, Verifier
from .ngrams import NOTHING, NgramSession, PromptLookup


class Hierarchical(Drafter):
    """Drafts over the whole vocabulary: the lookup knows every token, the head its own."""

    def __init__(self, lookup: PromptLookup, head: Drafter) -> None:
        self.lookup, self.head = lookup, head
        self.target_ids = lookup.target_ids

    @property
    def needs(self) -> tuple[int, ...]:
        return self.head.needs

    @property
    def depth(self) -> int | None:
        return self.head.depth

    def first_draft(self, batch: Batch, features: Features, verifier: Verifier, where: Tensor) -> None:
        return None  # of one drafter here and of another there

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> "HierarchicalSession":
        sessions = self.lookup.begin(verifier, batch, capacity), self.head.begin(verifier, batch, capacity)
        return HierarchicalSession(*sessions, self.head.target_ids, len(self.target_ids))


class HierarchicalSession(DraftSession):
    """The head sees every committed token, so that it can take over in any round; it drafts only where it is needed."""

    def __init__(self, lookup: NgramSession, head: DraftSession, target_ids: Tensor, vocab_size: int) -> None:
        self.lookup, self.head, self.target_ids, self.vocab_size = lookup, head, target_ids, vocab_size
        self.found = torch.empty(0)  # [B]: rows that the lookup drafts for

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self.lookup.start(prompts)
        self.head.start(prompts)

    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        by_lookup = self.lookup.observe(features, next_ids, counts)
        by_head = self.head.observe(features, next_ids, counts)
        self.found = torch.tensor(self.lookup.found, device=next_ids.device)
        self.reach = self.lookup.reach if all(self.lookup.found) else None
        return torch.where(self.found[:, None], by_lookup, self.widened(by_head))

    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        if all(self.lookup.found):
            return self.lookup.expand(ids, parents)
        by_head = self.widened(self.head.expand(ids, parents))
        if not any(self.lookup.found):
            return by_head
        return torch.where(self.found[:, None, None], self.lookup.expand(ids, parents), by_head)

    def widened(self, log_q: Tensor) -> Tensor:
        """[..., Q] of the head -> [..., V]."""
        out = log_q.new_full((*log_q.shape[:-1], self.vocab_size), NOTHING)
        out[..., self.target_ids] = log_q
        return out

    def keep_rows(self, rows: list[int]) -> None:
        self.lookup.keep_rows(rows)
        self.head.keep_rows(rows)
