"""How often the text's own token is among a head's k likeliest, by depth, over the tokens that decoding would draft."""

import torch

from ..heads.base import DraftHead, columns_of
from ..heads.verifier import Verifier
from .analysis_file import Depth
from .parity import Texts

RANKS = 5


@torch.no_grad()
def top_k(head: DraftHead, verifier: Verifier, texts: Texts, depths: int) -> list[Depth]:
    """A label of depth k is a token of the answer with k + 1 tokens of it before: the last depths have fewer. One that the head
    cannot draft is a miss, not a label less."""
    where = texts.drafted_from
    rows, at = torch.nonzero(where, as_tuple=True)
    columns = columns_of(head.target_ids, head.config.vocab_size)
    found = []
    for k, log_q in enumerate(head.predictions(texts.batch, texts.trained, verifier, where, depths)):
        inside = at + 2 + k < texts.batch.lengths[rows]
        labels = texts.batch.ids[rows[inside], at[inside] + 2 + k]
        ranked = head.target_ids[log_q[inside].topk(min(RANKS, log_q.shape[1])).indices]  # [n, ranks]
        hits = (ranked == labels[:, None]).cumsum(1).sum(0).tolist()
        count = len(labels)
        accuracy = [hit / count if count else None for hit in hits]
        found.append(Depth(labels=count, in_vocabulary=int((columns[labels] >= 0).sum()), accuracy=accuracy))
    return found
