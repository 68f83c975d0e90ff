"""Run folders of tiny random heads, with their verifier and chats on disk: fixtures for the tests that import them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.heads.hub import save_head
from headstart.training.recipe import Recipe, recipe_yaml

Build = Callable[..., Any]
CHATML = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
ROWS = [
    {"split": "holdout" if i % 3 == 0 else "train",
     "messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "a few words of the file"}]}
    for i in range(6)
]  # fmt: skip
MAKE = {"eagle3": {"kind": "eagle3", "layers": [1, 2, 3], "depth": 4}, "eagle1": {"kind": "eagle1"},
        "medusa": {"kind": "medusa", "heads": 3}}  # fmt: skip


@pytest.fixture
def verifier_folder(tiny: Build, tmp_path: Path) -> Path:
    """A tiny llama on disk, with a tokenizer of bytes."""
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    plain = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", chat_template=CHATML)
    folder = tmp_path / "verifier"
    tiny("llama", vocab_size=len(vocab), eos_token_id=1).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make_run(
    tiny: Build, tiny_eagle1: Build, tiny_eagle3: Build, tiny_medusa: Build, verifier_folder: Path, tmp_path: Path
) -> Callable[[str], Path]:
    """`make_run(kind)`: a run folder with a random head; the chats lie in chat.jsonl."""

    def make(kind: str) -> Path:
        build = {"eagle1": tiny_eagle1, "eagle3": tiny_eagle3, "medusa": tiny_medusa}[kind]
        head = build(tiny("llama", vocab_size=258), target_ids=torch.arange(258))
        if kind == "eagle3":
            head.input_scale.fill_(1.0)
        chats = tmp_path / "chat.jsonl"
        chats.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
        recipe = Recipe.model_validate({
            "verifier": {"model": str(verifier_folder), "dtype": "float32"},
            "data": {"train": [str(chats)], "holdout": "split", "answers": "regenerate", "answer_tokens": 8},
            "head": MAKE[kind],
            "training": {"steps": 2, "batch_tokens": 100, "learning_rate": 1e-3},
            "evaluation": {"trees": [{"kind": "chain", "depth": 3}], "max_new_tokens": 12},
        })  # fmt: skip
        folder = tmp_path / "runs" / kind
        save_head(head, folder / "head")
        (folder / "recipe.yaml").write_text(recipe_yaml(recipe), encoding="utf-8")
        return folder

    return make
