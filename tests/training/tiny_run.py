"""A tiny verifier and chat file in a folder, recipes for them, and real processes that train on them."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

PACKAGE = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ '<u>' if m['role'] == 'user' else '<a>' }}{{ m['content'] }}{{ '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
STEPS = 20


def write_verifier(folder: Path) -> Path:
    """A random llama of four layers that speaks bytes."""
    special = ["</s>", "<u>", "<a>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=256, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def write_chats(path: Path) -> Path:
    """Twenty-four conversations whose answers have 2 to 60 letters."""
    rng = random.Random(0)

    def text(least: int, most: int) -> str:
        return "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(least, most)))

    rows = [
        {"id": f"{i}", "split": "holdout" if i % 6 == 0 else "train", "messages": [
            {"role": "user", "content": text(2, 20)}, {"role": "assistant", "content": text(2, 60)}]}
        for i in range(24)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_recipe(path: Path, verifier: Path, chats: Path, **training: Any) -> Path:
    """An EAGLE-3 recipe of twenty steps; `training` changes its section. Small batches: some ranks get nothing."""
    recipe = {
        "verifier": {"model": str(verifier), "dtype": "float32", "device": "cpu"},
        "data": {"train": [str(chats)], "holdout": "split", "max_length": 96, "answers": "keep", "features": "online"},
        "head": {"kind": "eagle3", "layers": [1, 2, 3], "draft_vocabulary": 101, "depth": 3},
        "training": {"steps": STEPS, "batch_tokens": 120, "learning_rate": 1.0e-3, "weight_decay": 0.01, "log_every": 1,
                     "evaluate_every": 10} | training,
        "evaluation": {"trees": [{"kind": "chain", "depth": 2}], "max_new_tokens": 8},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return kept | {"PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


def command(processes: int, *options: str) -> list[str]:
    """`headstart` under torchrun, or by itself as one process."""
    if processes == 0:
        return [sys.executable, "-m", "headstart"]
    nodes = ["--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, "-m", "torch.distributed.run", *nodes, *options, "-m", "headstart"]


def train(recipe: Path, folder: Path, processes: int = 0, *overrides: str, **more: str) -> subprocess.CompletedProcess[str]:
    line = [*command(processes), "train", str(recipe), *overrides, "--run-folder", str(folder)]
    return subprocess.run(line, env=environment(**more), capture_output=True, text=True, timeout=300)


def lines(folder: Path, key: str = "loss") -> dict[int, Any]:
    """step -> value, of the lines of metrics.jsonl that have the key."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line[key] for line in found if key in line}


def weights(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step}" / "head.safetensors")
