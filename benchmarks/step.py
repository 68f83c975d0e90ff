"""Where the time of a training step goes: data, verifier, forward, backward, optimizer.

    python benchmarks/step.py                                  # the built-in verifier, three kinds of head, a minute or two
    python benchmarks/step.py smollm2-135m/eagle3 --features online --batch-tokens 2048

The recipes' heads and optimizers, on samples of random tokens whose second half is supervised.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from machine import machine

from headstart.build import build_settings, build_verifier
from headstart.build_heads import build_head, needed_layers
from headstart.data.chat import Sample
from headstart.data.features import FeatureSource, MemoryFeatures, OnlineFeatures
from headstart.data.packing import batch_plan
from headstart.training.recipe import find_recipe, load_recipe
from headstart.training.trainer import fit

PARTS = ("data", "verifier", "forward", "backward", "optimizer", "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=[f"smollm2-135m/{kind}" for kind in ("medusa", "eagle3", "mtp")])
    parser.add_argument("--model", help="another verifier")
    parser.add_argument("--features", nargs="+", choices=["online", "memory"], default=["online", "memory"])
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=10, help="measured ones; as many go before them")
    asked = parser.parse_args()

    name = "GPU: " + torch.cuda.get_device_name() if torch.cuda.is_available() else machine()
    print(f"{name}; steps of {asked.batch_tokens} tokens, samples of {asked.length}\n")
    print("| recipe | features | " + " | ".join(PARTS) + " | tokens/s | supervised tokens/s | MFU | peak |")
    print("|---|---|" + "---|" * (len(PARTS) + 4))
    for recipe_name in asked.recipes:
        changes = [f"training.steps={2 * asked.steps}", f"training.log_every={asked.steps}", "training.save_every=null",
                   "training.evaluate_every=null"] + ([f"verifier.model={asked.model}"] if asked.model else [])  # fmt: skip
        recipe = load_recipe(find_recipe(recipe_name), changes)
        verifier = build_verifier(recipe)
        draw = torch.Generator().manual_seed(0)
        half = [i >= asked.length // 2 for i in range(asked.length)]
        samples = [
            Sample(torch.randint(verifier.facts.vocab_size, (asked.length,), generator=draw).tolist(), half)
            for _ in range(2 * max(1, asked.batch_tokens // asked.length))
        ]
        layers = needed_layers(recipe, verifier)
        for features in asked.features:
            source: FeatureSource = (
                OnlineFeatures(verifier, samples, layers) if features == "online"
                else MemoryFeatures(verifier, samples, layers, 2048)
            )  # fmt: skip
            head = build_head(recipe, verifier, samples, source)
            plan = batch_plan([asked.length] * len(samples), asked.batch_tokens, 0, 2 * asked.steps, None)
            with tempfile.TemporaryDirectory() as folder:
                fit(head, verifier, source, plan, build_settings(recipe), Path(folder), lambda head: {"tau": 0.0})
                lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
            line = [line for line in lines if "loss" in line][-1]
            shares = " | ".join(f"{line['time_shares'][part]:.1%}" for part in PARTS)
            rates = f"{line['tokens_per_second']:,.0f} | {line['supervised_tokens_per_second']:,.0f}"
            print(f"| {recipe_name} | {features} | {shares} | {rates} | {line['mfu']:.0%} | {line['peak_memory_gb']:.1f} GB |",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
