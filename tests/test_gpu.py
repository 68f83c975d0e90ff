"""On a CUDA device: what a CPU computes, a GPU computes (run by `make gpu`)."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headstart.evaluation.decode import Clock, Decoded, rounds, speculate
from headstart.evaluation.evaluate import Evaluator, Prompt
from headstart.evaluation.lossless import own_text
from headstart.evaluation.sampling import Sampling
from headstart.evaluation.tree import AnyTree, DynamicTree, StaticTree, chain
from headstart.heads import repeated
from headstart.heads.base import DraftHead
from headstart.heads.batch import Batch
from headstart.heads.generate import generate
from headstart.heads.loading import resolve_dtype
from headstart.heads.verifier import Features, Verifier

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
TREES: list[AnyTree] = [chain(3), StaticTree([[0], [1], [0, 0], [1, 0], [0, 0, 0]]), DynamicTree(depth=3, top_k=3, nodes=12)]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("tiny_medusa", {}),
    "eagle1": ("tiny_eagle1", {"depth": 3, "top_tokens": 10}),
    "eagle3": ("tiny_eagle3", {"fc_norm": True, "norm_output": True}),
    **{form: ("tiny_mtp", {"form": form}) for form in ("parallel", "sequential", "recursive")},
}


@pytest.fixture(params=KINDS)
def new_head(request: pytest.FixtureRequest) -> Callable[[Verifier], DraftHead]:
    fixture, fields = KINDS[request.param]
    build = request.getfixturevalue(fixture)
    return lambda verifier: build(verifier, **fields)


@pytest.fixture(params=["llama", "qwen3", "gpt2", "gemma2", "mistral"])
def verifier(request: pytest.FixtureRequest, tiny: Callable[..., Verifier]) -> Verifier:
    verifier = tiny(request.param)
    verifier.model.to("cuda")
    return verifier


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.kind)
def test_trees_write_what_plain_decoding_writes(
    tree: AnyTree, verifier: Verifier, new_head: Callable[[Verifier], DraftHead]
) -> None:
    head = new_head(verifier).to("cuda")
    decoded, _ = speculate(verifier, head, tree, PROMPTS, 48)
    assert [answer.tokens for answer in decoded] == generate(verifier, PROMPTS, 48)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.kind)
def test_a_round_waits_once(
    tree: AnyTree, verifier: Verifier, tiny_eagle3: Callable[..., DraftHead], recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What waits is what hands the round's tokens to the host."""
    monkeypatch.delitem(repeated.RECORDERS, "cuda")  # recording waits
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
    head = tiny_eagle3(verifier).to("cuda")
    done = [Decoded() for _ in PROMPTS]
    going = rounds(verifier, head, tree, PROMPTS, 120, done, Clock(verifier.device))
    next(going)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        recwarn.clear()
        warnings.simplefilter("always")
        for _ in range(4):
            next(going)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in recwarn if "synchronizing" in str(w.message)]) == 4


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.kind)
def test_passes_are_replayed(
    tree: AnyTree, verifier: Verifier, tiny_eagle3: Callable[..., DraftHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
    head, replays = tiny_eagle3(verifier).to("cuda"), []
    replay = repeated.Recorded.__call__
    monkeypatch.setattr(repeated.Recorded, "__call__", lambda *given: replays.append(given) or replay(*given))
    replayed, _ = speculate(verifier, head, tree, PROMPTS, 120)
    assert len(replays) > 100
    assert not verifier.repeated.refused
    monkeypatch.delitem(repeated.RECORDERS, "cuda")
    assert [answer.tokens for answer in replayed] == [a.tokens for a in speculate(verifier, head, tree, PROMPTS, 120)[0]]


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_sampled_text_is_the_verifiers(kind: str, verifier: Verifier, request: pytest.FixtureRequest) -> None:
    """The gates of `headstart lossless` for one's own model: chi-square of the rules on all trees, and the planted bias."""
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
    head: DraftHead = request.getfixturevalue(f"tiny_{kind}")(verifier).to("cuda")
    evaluator = Evaluator(verifier, [Prompt(ids, str(ids), None, "") for ids in PROMPTS * 20], 48, batch=60)
    gates = list(own_text(evaluator, [("head", head)], TREES, [Sampling(1.0)], 20_000))
    assert all(gate.passed for gate in gates), gates


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_loss_and_gradients_are_the_cpus(
    half: bool, tiny: Callable[..., Verifier], new_head: Callable[[Verifier], DraftHead], batch_of: Callable[..., Batch],
    ids_of: Callable[..., list[int]], features_of: Callable[..., Features],
) -> None:  # fmt: skip
    verifier = tiny("llama")
    head = new_head(verifier)
    batch = batch_of([ids_of(1, 30), ids_of(2, 20)], [[(4, 30)], [(3, 12)]])
    features = features_of(verifier, batch, head.needs)
    found: list[tuple[Any, torch.Tensor]] = []
    for device in ("cpu", "cuda"):
        verifier.model.to(device)
        head.to(device).zero_grad()
        there = Batch(batch.ids.to(device), batch.mask.to(device), batch.lengths.to(device))
        assert features.choice is not None
        states = Features(features.last.to(device), features.layers.to(device), features.choice.to(device))
        with torch.autocast(device, torch.bfloat16, enabled=half):
            loss = head.loss(there, states, verifier)
        loss.total().backward()
        found.append((loss.total().item(), torch.cat([p.grad.flatten().cpu() for p in head.parameters()])))
    (cpu, cpu_gradients), (gpu, gpu_gradients) = found
    assert gpu == pytest.approx(cpu, rel=1e-2 if half else 1e-5)
    assert torch.cosine_similarity(gpu_gradients, cpu_gradients, dim=0) > (0.99 if half else 0.99999)


def test_auto_is_bfloat16_where_the_gpu_multiplies_in_it() -> None:
    expected = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == expected
