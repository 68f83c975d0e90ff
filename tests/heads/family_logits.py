"""Logits and embeddings of the tiny families, written from what their papers and configurations say."""

import torch
from torch import Tensor, nn

from headstart.heads.verifier import Verifier

EMBEDDING_SCALE = {"gemma2": 32**0.5, "granite": 12.0}  # what embeddings are multiplied with, where it is not 1
LOGIT_SCALE = {"granite": 1 / 8, "cohere": 0.0625}  # the same of logits


def logits_of(family: str, lm_head: nn.Linear, states: Tensor, ids: Tensor | None = None) -> Tensor:
    """The verifier's logits [..., V] of states [..., d], or those of some ids."""
    rows = torch.arange(lm_head.out_features) if ids is None else ids
    raw = states @ lm_head.weight[rows].T
    if family == "phi":
        raw = raw + lm_head.bias[rows]
    if family == "gemma2":
        return 5.0 * torch.tanh(raw / 5.0)
    return raw * LOGIT_SCALE.get(family, 1.0)


def biased(verifier: Verifier) -> Verifier:
    """With a random bias of the lm_head, where it has one: a new model's is zero."""
    if verifier.lm_head.bias is not None:
        with torch.no_grad():
            verifier.lm_head.bias.copy_(torch.randn(verifier.lm_head.out_features, generator=torch.Generator().manual_seed(5)))
    return verifier
