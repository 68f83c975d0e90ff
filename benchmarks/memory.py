"""Peak memory and time of one EAGLE-3 training step over a large vocabulary: this package, whole logits, a peer.

    python benchmarks/memory.py                                    # a table; minutes on two cores
    python benchmarks/memory.py --vocabularies 8192 --tokens 256 --json

Every contender runs in a process of its own on the same sizes: random weights, one sample, the second half of it supervised.
Seconds are the median of the steps after the first; peak is what the process held at most during the steps, weights included.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine

HERE = Path(__file__).parent
PEER = HERE.parent / ".venv-peer" / "bin" / "python"
OWN = [sys.executable, str(HERE / "eagle3_steps.py")]
NAME, FROZEN, WHOLE = "headstart", "headstart, output layer frozen", "whole logits"
PEER_NAME = "speculators, output layer frozen"
COMMANDS = {
    NAME: OWN,
    FROZEN: [*OWN, "--frozen"],
    WHOLE: [*OWN, "--whole"],
    PEER_NAME: [str(PEER), str(HERE / "peer_eagle3.py")],
}


def write_verifier(folder: Path, vocabulary: int, hidden: int) -> None:
    """A random verifier of SmolLM2-135M's proportions with four layers: only its embedding and lm_head matter here."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=4,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=8192,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def limit_memory(share: float = 0.9) -> None:
    """In the child: fail rather than take the machine down."""
    pages = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
    most = int(int(pages) * 1024 * share)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def run(command: list[str]) -> dict[str, Any]:
    """{seconds, peak, loss}, or {failed: why}."""
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit_memory)
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(steps) < 2:
        told = done.stderr.strip().splitlines()
        return {"failed": told[-1] if told else f"exit {done.returncode}"}
    return {
        "seconds": statistics.median(step["seconds"] for step in steps[1:]),
        "peak": max(step["peak"] for step in steps),
        "loss": steps[0]["loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[131072, 262144])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--depth", type=int, default=3, help="training-time-test steps")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps; the first one is not timed")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()

    rows: list[dict[str, Any]] = []
    for vocabulary in asked.vocabularies:
        with tempfile.TemporaryDirectory() as folder:
            write_verifier(Path(folder), vocabulary, asked.hidden)
            sizes = ["--tokens", str(asked.tokens), "--depth", str(asked.depth), "--steps", str(asked.steps)]
            found: dict[str, dict[str, Any]] = {}
            for name, command in COMMANDS.items():
                if name == PEER_NAME and not PEER.exists():
                    found[name] = {"failed": "not installed: make .venv-peer/.ready"}
                    continue
                print(f"vocabulary {vocabulary}: {name} ...", file=sys.stderr, flush=True)
                found[name] = run([*command, folder, *sizes])
        for one, other in ((found[NAME], found[WHOLE]), (found[NAME], found[FROZEN])):
            if "loss" in one and "loss" in other:  # all compute the same thing
                assert abs(one["loss"] - other["loss"]) < 1e-3 * one["loss"], (one, other)
        rows += [{"vocabulary": vocabulary, "who": name} | result for name, result in found.items()]
    if asked.json:
        print(json.dumps({"machine": machine(), "tokens": asked.tokens, "hidden": asked.hidden, "rows": rows}, indent=1))
        return
    print(f"{machine()}; {asked.tokens} tokens, hidden size {asked.hidden}, {asked.depth} steps deep, float32\n")
    print("| vocabulary | who | peak | of the peer's | seconds a step | of the peer's |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        peer = next(r for r in rows if r["who"] == PEER_NAME and r["vocabulary"] == row["vocabulary"])
        if "failed" in row:
            print(f"| {row['vocabulary']} | {row['who']} | {row['failed']} | - | - | - |")
            continue
        peak, time = (f"{row[key] / peer[key]:.2f}x" if key in peer else "-" for key in ("peak", "seconds"))
        print(f"| {row['vocabulary']} | {row['who']} | {row['peak'] / 1e9:.2f} GB | {peak} | {row['seconds']:.2f} | {time} |")


if __name__ == "__main__":
    main()
