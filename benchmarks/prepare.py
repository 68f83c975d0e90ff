"""How fast `data prepare` renders and masks conversations of the length of GSM8K's, and how its memory grows with their number.

    python benchmarks/prepare.py [CHATS.jsonl] [--verifier builtin:smollm2-135m]

Speed: conversations a minute of CPU time, on one core, the fastest of three. Memory: peak of a process that prepares 1,000 and
one that prepares 100,000 rows (the file's own, again and again). Without a file the rows are made up, as long as GSM8K's.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # before the tokenizer is imported: one core

from rich.console import Console
from rich.table import Table

from headstart.data.chat import samples
from headstart.data.conversations import read_conversations
from headstart.data.skips import Skips
from headstart.heads.loading import load_tokenizer
from headstart.preparing import prepare
from headstart.training.recipe import load_recipe

WORDS = """the of and to in she he they has had buys sells each day week dollars apples books cost price total number how
many much left after gives friends twice half as more than first then so therefore answer is""".split()  # noqa: SIM905
RECIPE = """
verifier: {{model: {verifier}}}
data: {{train: [{file}], holdout: 0.001}}
head: {{kind: medusa}}
training: {{steps: 1, learning_rate: 1.0e-3}}
"""
GOAL = 20_000  # conversations a minute a core
SMALL, LARGE = 1_000, 100_000  # rows
GROWTH = 1.25  # of the peak, from small to large


def made_up(count: int) -> Iterator[dict[str, str]]:
    """Questions of about 45 words and answers of about 55, as GSM8K has."""
    rng = random.Random(0)
    for _ in range(count):
        question, answer = (" ".join(rng.choice((*WORDS, str(rng.randrange(100)))) for _ in range(n)) for n in (45, 55))
        yield {"question": question + "?", "answer": f"{answer}\n#### {rng.randrange(1000)}"}


def write_rows(chats: Path | None, count: int, target: Path) -> None:
    rows = cycle(chats.read_text(encoding="utf-8").splitlines()) if chats else map(json.dumps, made_up(count))
    with target.open("w", encoding="utf-8") as file:
        file.writelines(row + "\n" for row in islice(rows, count))


def speed(file: Path, verifier: str) -> tuple[float, float]:
    """Conversations a minute of CPU time, and tokens a conversation."""
    tokenizer = load_tokenizer(verifier)
    conversations = list(read_conversations([file], Skips()))
    best, tokens = float("inf"), 0
    for _ in range(3):
        start = time.process_time()
        tokens = sum(len(sample.ids) for sample in samples(tokenizer, iter(conversations), 2048, Skips()))
        best = min(best, time.process_time() - start)
    return len(conversations) / best * 60, tokens / len(conversations)


def peak(file: Path, verifier: str) -> float:
    """Peak memory in MB of a process that prepares a file."""
    arguments = [sys.executable, __file__, "--one", str(file), "--verifier", verifier]
    return float(subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True).stdout)


def prepare_one(file: Path, verifier: str) -> None:
    recipe = file.with_suffix(".yaml")
    recipe.write_text(RECIPE.format(file=file, verifier=verifier), encoding="utf-8")
    prepare(load_recipe(recipe))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chats", nargs="?", type=Path)
    parser.add_argument("--verifier", default="builtin:smollm2-135m")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        prepare_one(options.one, options.verifier)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small.jsonl", Path(folder) / "large.jsonl"
        write_rows(options.chats, SMALL, small)
        write_rows(options.chats, LARGE, large)
        rate, tokens = speed(small, options.verifier)
        peaks = [peak(file, options.verifier) for file in (small, large)]
    table = Table("what", "measured", "goal", title=f"data prepare, {tokens:.0f} tokens a conversation")
    table.add_row("conversations a minute a core", f"{rate:,.0f}", f">= {GOAL:,}")
    table.add_row(f"peak memory, {SMALL:,} rows", f"{peaks[0]:,.0f} MB", "")
    table.add_row(f"peak memory, {LARGE:,} rows", f"{peaks[1]:,.0f} MB", f"<= {GROWTH * peaks[0]:,.0f} MB")
    Console().print(table)
    return 0 if rate >= GOAL and peaks[1] <= GROWTH * peaks[0] else 1


if __name__ == "__main__":
    sys.exit(main())
