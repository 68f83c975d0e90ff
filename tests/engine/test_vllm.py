"""The real client: vLLM on a CPU serves our exports, and its own counters agree with our chain evaluator.

`make test-engine` makes the engine's environment and the quickstart's heads first. HEADSTART_ENGINE_PYTHON and
HEADSTART_ENGINE_RUNS name others; HEADSTART_ENGINE_PROMPTS says how many held-out prompts are asked (default: all).
"""

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import headstart
from headstart.build import build_prompts
from headstart.build_data import build_conversations
from headstart.evaluation.decode import speculate
from headstart.evaluation.metrics import acceptance
from headstart.evaluation.tree import chain
from headstart.heads.base import DraftHead
from headstart.heads.hub import load_head
from headstart.heads.loading import resolve
from headstart.heads.verifier import Verifier
from headstart.shipping import export_run
from headstart.training.recipe import Recipe, load_recipe

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3 * 3600)]

ROOT = Path(headstart.__file__).parent
PYTHON = Path(os.environ.get("HEADSTART_ENGINE_PYTHON", ROOT / ".venv-engine" / "bin" / "python"))
RUNS = Path(os.environ.get("HEADSTART_ENGINE_RUNS", ROOT / "runs" / "quickstart"))
PROMPTS = int(os.environ.get("HEADSTART_ENGINE_PROMPTS", "0")) or None
TOKENS, DRAFTED, ROUNDS = 256, 4, 2000  # new tokens a prompt, drafts a round, and the fewest rounds that count
METHODS = {"eagle1": "eagle"}  # vLLM's name, where it differs
SERVED = [("medusa", "vllm"), ("eagle1", "vllm"), ("eagle3", "vllm"), ("eagle3", "speculators")]


@cache
def opened(kind: str) -> tuple[Recipe, DraftHead, Verifier, tuple[tuple[int, ...], ...]]:
    """The run's recipe and head, the verifier in float32, and the held-out prompts."""
    run = RUNS / kind
    assert (run / "head").is_dir(), f"{run}: no trained head; run `make quickstart` first"
    recipe = load_recipe(run / "recipe.yaml")
    verifier = Verifier.load(recipe.verifier.model, "float32", "cpu")
    prompts = build_prompts(verifier, build_conversations(recipe).holdout, PROMPTS)
    return recipe, load_head(run / "head"), verifier, tuple(tuple(prompt.ids) for prompt in prompts)


@cache
def asked(model: str, prompts: tuple[tuple[int, ...], ...], speculative: str | None) -> dict[str, Any]:
    """vLLM's answers and counters. speculative: its configuration as JSON, None for plain decoding."""
    assert PYTHON.exists(), f"{PYTHON}: no engine; `make test-engine` installs it"
    job = {"model": model, "prompts": prompts, "max_tokens": TOKENS, "max_model_len": max(map(len, prompts)) + TOKENS + 16,
           "speculative": json.loads(speculative) if speculative else None}  # fmt: skip
    command = [str(PYTHON), str(Path(__file__).with_name("serve_with_vllm.py"))]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, env=env)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
    assert done.returncode == 0, "\n".join(errors) or done.stderr[-4000:]
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.parametrize(("kind", "layout"), SERVED)
def test_vllm_drafts_what_the_chain_evaluator_says(kind: str, layout: str, tmp_path: Path) -> None:
    _, head, verifier, prompts = opened(kind)
    depth = min(head.depth or DRAFTED, DRAFTED)
    served = tmp_path / "served"
    export_run(RUNS / kind, layout, served, verifier_name="HuggingFaceTB/SmolLM2-135M-Instruct")
    model = resolve(verifier.name)["pretrained_model_name_or_path"]
    method = {"method": METHODS.get(kind, kind), "model": str(served), "num_speculative_tokens": depth}
    theirs = asked(model, prompts, json.dumps(method))
    assert theirs["answers"] == asked(model, prompts, None)["answers"]  # the head changes no token

    decoded = [speculate(verifier, head, chain(depth), [prompt], TOKENS)[0][0] for prompt in prompts]
    ours = acceptance([r for answer in decoded for r in answer.rounds], depth)
    survival = [count / theirs["drafts"] for count in theirs["accepted_per_position"]]
    tau = 1 + sum(survival)
    report = {
        "kind": kind, "layout": layout, "depth": depth, "prompts": len(prompts),
        "same_answers": sum(a.tokens == b for a, b in zip(decoded, theirs["answers"], strict=True)),
        "ours": {name: ours[name] for name in ("rounds", "tau", "survival")},
        "vllm": {"rounds": theirs["drafts"], "tau": tau, "survival": survival},
    }  # fmt: skip
    target = ROOT / "runs" / "engine" / f"{kind}-{layout}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    assert theirs["drafts"] >= ROUNDS or PROMPTS, "too few rounds to compare"
    assert len(survival) == depth
    for position, (mine, its) in enumerate(zip(ours["survival"], survival, strict=True)):
        assert mine == pytest.approx(its, abs=0.02), f"position {position}"
    assert ours["tau"] == pytest.approx(tau, rel=0.02)
