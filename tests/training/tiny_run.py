"""A tiny verifier and chat file in a folder, recipes for them, and real processes that train on them."""

import json
import multiprocessing
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import headstart.cli
from headstart import ranks
from headstart.errors import UserError

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
        num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=256,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
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


EAGLE3 = {"kind": "eagle3", "layers": [1, 2, 3], "draft_vocabulary": 101, "depth": 3}


def write_recipe(path: Path, verifier: Path, chats: Path, head: dict[str, Any] = EAGLE3, **training: Any) -> Path:
    """A recipe of twenty steps; `training` changes its section. Small batches: some ranks get nothing."""
    recipe = {
        "verifier": {"model": str(verifier), "dtype": "float32", "device": "cpu"},
        "data": {"train": [str(chats)], "holdout": "split", "max_length": 96, "answers": "keep", "features": "online"},
        "head": head,
        "training": {"steps": STEPS, "batch_tokens": 120, "learning_rate": 1.0e-3, "weight_decay": 0.01, "log_every": 1,
                     "evaluate_every": 10} | training,
        "evaluation": {"trees": [{"kind": "chain", "depth": 2}], "max_new_tokens": 8},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


class Processes:
    """`headstart` on several processes as torchrun starts them, forked from one that has imported everything already."""

    def __init__(self, count: int, arguments: list[object], output: Path, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.outputs = [output.with_name(f"{output.name}-{rank}.txt") for rank in range(count or 1)]
        self.all = []
        for rank, told in enumerate(self.outputs):
            own = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count else {}
            process = FORKS.Process(target=run_one, args=([str(a) for a in arguments], own | environment, told))
            process.start()
            self.all.append(process)

    def wait(self, seconds: float = 240) -> list[int | None]:
        """Exit codes, negative where a signal ended the process; None for one that had to be killed now."""
        end = time.monotonic() + seconds
        for process in self.all:
            process.join(max(0.1, end - time.monotonic()))
        codes = [process.exitcode for process in self.all]
        for process in self.all:
            process.kill()
        return codes

    def kill(self, number: int) -> None:
        for process in self.all:
            os.kill(process.pid, number)

    def told(self) -> list[str]:
        return [path.read_text(encoding="utf-8") for path in self.outputs]


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["headstart.teaching", "torch._dynamo", "tiny_run"])


def run_one(arguments: list[str], environment: dict[str, str], output: Path) -> None:
    os.environ |= environment
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    for patch in filter(None, os.environ.get("PATCHES", "").split(",")):
        PATCHES[patch]()
    code = headstart.cli.run(arguments)
    sys.stdout.flush()
    sys.exit(code)


def lines(folder: Path, key: str = "loss") -> dict[int, Any]:
    """step -> value, of the lines of metrics.jsonl that have the key."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line[key] for line in found if key in line}


def weights(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step}" / "head.safetensors")


# What a test plants in the processes it starts, by name: PATCHES=name in their environment.


def slow_steps() -> None:
    from headstart.training import trainer

    step = trainer.step

    def slow(*arguments: Any) -> None:
        time.sleep(0.3)
        step(*arguments)

    trainer.step = slow


def slow_judge() -> None:
    """The held-out evaluation takes longer than any collective of training may."""
    import datetime

    from headstart import teaching

    join, look = torch.distributed.init_process_group, teaching.look

    def impatient(*arguments: Any, **options: Any) -> None:
        join(*arguments, **options, timeout=datetime.timedelta(seconds=10))

    def slow(*arguments: Any, **options: Any) -> dict[str, Any]:
        time.sleep(13)
        return look(*arguments, **options)

    torch.distributed.init_process_group, teaching.look = impatient, slow


def second_rank_fails() -> None:
    from headstart.training import trainer

    step = trainer.step

    def failing(*arguments: Any) -> None:
        if arguments[5] == 4 and ranks.rank() == 1:
            raise UserError("the second rank has had enough")
        step(*arguments)

    trainer.step = failing


def dies_while_saving(nth: int) -> Callable[[], None]:
    """kill -9 at the nth renaming of a folder: a checkpoint's files are there, under another name."""

    def plant() -> None:
        rename, calls = Path.rename, []

        def renamed(path: Path, target: Path) -> Path:
            if "checkpoints" in str(path):
                calls.append(path)
                if len(calls) == nth:
                    os.kill(os.getpid(), 9)
            return rename(path, target)

        Path.rename = renamed  # type: ignore[method-assign]

    return plant


PATCHES: dict[str, Callable[[], None]] = {
    "slow_steps": slow_steps,
    "slow_judge": slow_judge,
    "second_rank_fails": second_rank_fails,
    "dies_at_second_save": dies_while_saving(2),
}
