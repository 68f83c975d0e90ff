"""How near the head's first draft is to the verifier, from their two distributions on the verifier's own text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..heads.batch import Batch, shifted
from ..heads.drafter import Drafter
from ..heads.verifier import Verifier


@dataclass(frozen=True)
class Overlap:
    """Sums over `count` positions: of Σ_v min(p, q), and of KL(q ‖ p) = Σ_v q log(q / p) in nats."""

    shared: float = 0.0
    divergence: float = 0.0
    count: int = 0

    def __add__(self, other: "Overlap") -> "Overlap":
        return Overlap(self.shared + other.shared, self.divergence + other.divergence, self.count + other.count)

    @property
    def alpha(self) -> float | None:
        return self.shared / self.count if self.count else None

    @property
    def kl(self) -> float | None:
        return self.divergence / self.count if self.count else None


@torch.no_grad()
def overlap(verifier: Verifier, drafter: Drafter, prompt: Sequence[int], answer: Sequence[int]) -> Overlap:
    """At every token of an answer but its first (the prefill's), at T = 1; nothing where drafts have no distribution, or where
    it is not a number."""
    ids = torch.tensor([[*prompt, *answer]], device=verifier.device)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, len(prompt) :] = True
    batch = Batch(ids, mask, torch.tensor([ids.shape[1]], device=ids.device))
    where = shifted(mask, 1, False) & shifted(mask, 2, False)
    if not bool(where.any()):
        return Overlap()
    features = verifier.features(ids, drafter.needs)
    log_q = drafter.first_draft(batch, features, verifier, where)
    if log_q is None or bool(log_q.isnan().any()):
        return Overlap()
    log_p = verifier.logits(shifted(features.last, 1, 0.0)[where]).float().log_softmax(-1)[:, drafter.target_ids]
    q = log_q.exp()
    shared = torch.minimum(log_p.exp(), q).sum().item()
    return Overlap(shared, (q * (log_q - log_p)).sum().item(), len(q))
