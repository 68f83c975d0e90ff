"""EAGLE-3 training steps of this package, or of the same head with whole [tokens, vocabulary] logits; run by memory.py.

Prints one JSON object a step: seconds, loss, peak bytes.
"""

import argparse
import json
import time

import torch
from machine import peak_bytes, reset_peak
from torch import Tensor
from transformers import AutoModelForCausalLM

from headstart.heads.batch import Batch, shifted
from headstart.heads.eagle3 import Eagle3Config, Eagle3Head
from headstart.heads.packed import pack_linears
from headstart.heads.verifier import Features, Verifier

SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
         "rms_norm_eps", "max_position_embeddings", "rope_parameters")  # fmt: skip


def whole_loss(head: Eagle3Head, batch: Batch, features: Features, verifier: Verifier) -> Tensor:
    """The definition, with every position's logits in memory."""
    supervised = head.supervised(batch, features)
    teacher = verifier.logits(features.last).softmax(-1)  # [B, S, V]
    _, states = head.training_states(batch, features, verifier, torch.ones_like(batch.mask), head.config.depth)
    total = torch.zeros(())
    for k, state in enumerate(states):
        log_q = head.lm_head(head.norm(state)).log_softmax(-1)  # [B, S, V]
        terms = -(shifted(teacher, 1 + k, 0.0) * log_q).sum(-1)
        total = total + 0.8**k * (terms * supervised[k]).sum() / supervised[k].sum()
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verifier", help="folder with config.json and model.safetensors")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--whole", action="store_true", help="whole logits")
    parser.add_argument("--frozen", action="store_true", help="the output layer is not trained")
    asked = parser.parse_args()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(asked.verifier, dtype=torch.float32)
    pack_linears(model)
    verifier = Verifier(model, None, asked.verifier)
    facts = verifier.facts
    sizes = {name: getattr(facts, name) for name in SIZES}
    head = Eagle3Head(Eagle3Config(layers=(1, 2, 3), depth=asked.depth, decay=0.8, draft_vocab_size=facts.vocab_size, **sizes))
    head.initialise(verifier)
    head.lm_head.requires_grad_(not asked.frozen)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-4, fused=True)
    shape = (1, asked.tokens)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, asked.tokens // 2 :] = True
    batch = Batch(torch.randint(facts.vocab_size, shape), mask, torch.tensor([asked.tokens]))
    last, layers = torch.randn(*shape, facts.hidden_size), torch.randn(*shape, 3 * facts.hidden_size)
    features = Features(last, layers, torch.zeros(shape, dtype=torch.long))
    reset_peak()
    for _ in range(asked.steps):
        start = time.perf_counter()
        if asked.whole:
            loss = whole_loss(head, batch, features, verifier)
        else:
            loss = head.loss(batch, features, verifier).total()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "loss": loss.item(), "peak": peak_bytes()}), flush=True)


if __name__ == "__main__":
    main()
