"""EAGLE-3 training steps of the speculators package, run by memory.py in an environment of its own (`make .venv-peer/.ready`).

The package trains with the output layer frozen. Prints one JSON object a step: seconds, loss, peak bytes.
"""

import argparse
import copy
import json
import time

import torch
from machine import peak_bytes, reset_peak
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.core import Eagle3DraftModel
from transformers import AutoConfig

parser = argparse.ArgumentParser()
parser.add_argument("verifier", help="folder with config.json and model.safetensors")
parser.add_argument("--tokens", type=int, required=True)
parser.add_argument("--depth", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
asked = parser.parse_args()

torch.manual_seed(0)
config = AutoConfig.from_pretrained(asked.verifier)
layer = copy.deepcopy(config)
layer.num_hidden_layers = 1
model = Eagle3DraftModel.from_training_args(
    layer, num_layers=1, norm_before_residual=False, draft_vocab_size=config.vocab_size,
    verifier_name_or_path=asked.verifier, ttt_steps=asked.depth, draft_attn_impl="eager", target_layer_ids=[1, 2, 3],
).float()  # fmt: skip
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
mask = torch.ones(1, asked.tokens, dtype=torch.bool)
mask[:, : asked.tokens // 2] = False
batch = {
    "hidden_states": torch.randn(1, asked.tokens, 3 * config.hidden_size),
    "verifier_last_hidden_states": torch.randn(1, asked.tokens, config.hidden_size),
    "input_ids": torch.randint(0, config.vocab_size, (1, asked.tokens)),
    "document_ids": torch.zeros(1, asked.tokens, dtype=torch.long),
    "loss_mask": mask,
}
options = {"ttt_steps": asked.depth, "ttt_step_loss_decay": 0.8, "loss_config": resolve_loss_config("ce", "eager")}
reset_peak()
for _ in range(asked.steps):
    start = time.perf_counter()
    loss = model(**batch, **options)[1]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "loss": float(loss), "peak": peak_bytes()}), flush=True)
