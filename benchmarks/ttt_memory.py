"""Peak memory and time of training-time-test attention, forwards and backwards through all steps, each form in a process of
its own:

    python benchmarks/ttt_memory.py [--tokens 2048] [--steps 7] [--heads 4] [--groups 2] [--size 64] [--device cpu]

mask:   one softmax under a mask of (S · K) by (S · K), the definition, by torch's fused attention
scores: one softmax a step over S + k scores, all of them in memory
pieces: what the heads do (heads/attention.py)
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from headstart.heads.attention import attend_with_own, sight

Steps = list[Tensor]  # [1, heads, S, D] of each step


def by_mask(q: Steps, k: Steps, v: Steps) -> Steps:
    steps, length = len(q), q[0].shape[2]
    place = torch.arange(length, device=q[0].device)
    mask = torch.full((steps, length, steps, length), float("-inf"), device=q[0].device)
    for step in range(steps):
        mask[step, :, 0].masked_fill_(place <= place[:, None], 0.0)
        for j in range(1, step + 1):
            mask[step, :, j].fill_diagonal_(0.0)
    joined = [torch.cat(x, 2) for x in (q, k, v)]
    out = functional.scaled_dot_product_attention(*joined, attn_mask=mask.flatten(2).flatten(0, 1), enable_gqa=True)
    return list(out.split(length, 2))


def by_scores(q: Steps, k: Steps, v: Steps) -> Steps:
    length, groups = q[0].shape[2], q[0].shape[1] // k[0].shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=q[0].device).tril()
    keys, values = ([x.repeat_interleave(groups, 1) for x in them] for them in (k, v))
    out = []
    for step, query in enumerate(q):
        query = query * query.shape[-1] ** -0.5
        shared = (query @ keys[0].mT).masked_fill(~causal, float("-inf"))
        own = [(query * key).sum(-1, keepdim=True) for key in keys[1 : step + 1]]
        weights = torch.cat([shared, *own], -1).softmax(-1)
        mixed = weights[..., :length] @ values[0]
        out.append(sum((weights[..., length + j, None] * values[1 + j] for j in range(step)), start=mixed))
    return out


def by_pieces(q: Steps, k: Steps, v: Steps) -> Steps:
    place = torch.arange(q[0].shape[2], device=q[0].device)[None]
    seen = sight(torch.zeros_like(place), place, torch.ones_like(place, dtype=torch.bool), q[0].shape[1])
    return [attend_with_own(query, k[0], v[0], seen, k[1 : i + 1], v[1 : i + 1]) for i, query in enumerate(q)]


FORMS: dict[str, Callable[[Steps, Steps, Steps], Steps]] = {"mask": by_mask, "scores": by_scores, "pieces": by_pieces}


def measure(form: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Seconds, mebibytes above the inputs, and sums of the gradients to compare."""
    cuda = arguments.device.startswith("cuda")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        [
            torch.randn(1, n, arguments.tokens, arguments.size, generator=generator).to(arguments.device).requires_grad_()
            for _ in range(arguments.steps)
        ]
        for n in (arguments.heads, arguments.groups, arguments.groups)
    )
    few = [[x[:, :, :8].detach() for x in steps] for steps in (q, k, v)]
    FORMS[form](*few)  # once in small: libraries are loaded and kernels chosen
    before = torch.cuda.memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    sum(out.square().sum() for out in FORMS[form](q, k, v)).backward()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sizes = [torch.stack([x.grad for x in steps if x.grad is not None]).double().norm().item() for steps in (q, k, v)]
    return {"seconds": seconds, "mebibytes": (peak - before) / 2**20, "gradients": sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 2048), ("steps", 7), ("heads", 4), ("groups", 2), ("size", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--form", choices=FORMS, help="measure one form in this process")
    arguments = parser.parse_args()
    if arguments.form:
        print(json.dumps(measure(arguments.form, arguments)))
        return
    print(f"{arguments.tokens} tokens, {arguments.steps} steps, {arguments.heads} heads in {arguments.groups} groups of size "
          f"{arguments.size}, {arguments.device}")  # fmt: skip
    print(f"{'form':8} {'MiB':>8} {'seconds':>8}")
    found = {}
    for form in FORMS:
        done = subprocess.run([sys.executable, *sys.argv, "--form", form], capture_output=True, text=True)
        if done.returncode:
            print(f"{form:8} failed: {done.stderr.strip().splitlines()[-1] if done.stderr else 'killed'}")
            continue
        found[form] = json.loads(done.stdout)
        print(f"{form:8} {found[form]['mebibytes']:8.0f} {found[form]['seconds']:8.2f}", flush=True)
    sizes = [one["gradients"] for one in found.values()]
    worst = max(abs(a - b) / b for one in sizes for a, b in zip(one, sizes[-1], strict=True))
    print(f"gradient norms agree within {worst:.1e}")
    if worst > 1e-4:
        raise SystemExit("the forms do not compute the same gradients")


if __name__ == "__main__":
    main()
