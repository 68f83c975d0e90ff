"""A random language model of a few tokens and random heads for it, built in memory: small enough to enumerate its texts."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ..heads.base import DraftHead
from ..heads.eagle3 import Eagle3Config, Eagle3Head
from ..heads.medusa import MedusaConfig, MedusaHead
from ..heads.verifier import Verifier
from .decode import speculate
from .enumeration import every_outcome
from .sampling import Dice, Sampling, probabilities
from .tree import AnyTree

VOCAB, HIDDEN = 3, 16
PROMPT = (2, 0, 1, 1)


def tiny_verifier(seed: int) -> Verifier:
    """In float64, so that what remains of a difference is a fault and not rounding."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return Verifier(model.double(), None, "a tiny random model")


def tiny_heads(verifier: Verifier, seed: int) -> list[DraftHead]:
    """A Medusa and an EAGLE-3 head with random weights."""
    facts = verifier.facts
    sizes: dict[str, Any] = {
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "draft_vocab_size": facts.vocab_size,
    }
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps",
             "max_position_embeddings", "rope_parameters")  # fmt: skip
    shape: dict[str, Any] = {name: getattr(facts, name) for name in names}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        medusa = MedusaHead(MedusaConfig(**sizes, heads=2, blocks=1, lm_head="own", targets="hard", decay=0.8))
        eagle3 = Eagle3Head(Eagle3Config(**sizes, **shape, layers=(0, 1), depth=2, decay=0.8))
        for head in (medusa, eagle3):
            for parameter in head.parameters():
                nn.init.normal_(parameter, std=0.4)
    return [medusa, eagle3]


@torch.no_grad()
def plain_joint(verifier: Verifier, length: int, sampling: Sampling) -> Tensor:
    """The law of the first `length` tokens after PROMPT by plain sampling, from full forward passes: [V] * length."""
    joint = torch.ones((), dtype=torch.float64)
    for size in range(length):
        texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=size)), dtype=torch.long)
        ids = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], 1)
        logits = verifier.model(input_ids=ids, use_cache=False).logits[:, -1]
        present = torch.zeros(len(ids), VOCAB, dtype=torch.bool).scatter(1, ids, True)
        law = probabilities(logits, sampling, present)
        joint = joint[..., None] * law.reshape([VOCAB] * (size + 1))
    return joint


def speculative_joint(
    verifier: Verifier, head: DraftHead, tree: AnyTree, length: int, sampling: Sampling
) -> tuple[Tensor, int]:  # fmt: skip
    """The same by the decoding loop, run once for every outcome of every draw, and the number of those."""
    joint = torch.zeros([VOCAB] * length, dtype=torch.float64)
    count = 0

    def decode(draw: Dice) -> Sequence[int]:
        return speculate(verifier, head, tree, [PROMPT], length, sampling=sampling, draw=draw)[0][0].tokens

    for weight, tokens in every_outcome(decode):
        joint[tuple(tokens)] += weight
        count += 1
    return joint, count
