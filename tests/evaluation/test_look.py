"""Looks during training: counts by prompt, the time budget, alpha and KL by hand, and which of two looks is better."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headstart.data.chat import Sample
from headstart.data.features import OnlineFeatures
from headstart.evaluation import look as look_module
from headstart.evaluation.decode import speculate
from headstart.evaluation.evaluate import Evaluator, Prompt
from headstart.evaluation.look import look
from headstart.evaluation.overlap import overlap
from headstart.evaluation.tree import StaticTree, chain
from headstart.heads.generate import generate
from headstart.heads.hub import load_head
from headstart.heads.verifier import Verifier
from headstart.training.best import better
from headstart.training.trainer import Settings, fit

BUDGET = 12


@pytest.fixture
def verifier(tiny: Callable[..., Verifier]) -> Verifier:
    return tiny("llama", eos_token_id=None)


def some_prompts(count: int) -> list[Prompt]:
    return [Prompt([3 + 2 * i, 7, 11 + i], f"p-{i}", None, "") for i in range(count)]


def test_counts_by_prompt_add_up_to_tau(verifier: Verifier, tiny_medusa: Callable[..., Any]) -> None:
    head, prompts = tiny_medusa(verifier), some_prompts(5)
    found = look(Evaluator(verifier, prompts, BUDGET, batch=2), head, chain(3))
    alone = [speculate(verifier, head, chain(3), [prompt.ids], BUDGET)[0][0] for prompt in prompts]
    assert found["by_prompt"] == [[BUDGET - 1, len(answer.rounds)] for answer in alone]
    assert found["tau"] == pytest.approx(5 * (BUDGET - 1) / sum(len(answer.rounds) for answer in alone))
    assert (found["prompts"], found["of"], found["rounds"]) == (5, 5, sum(len(answer.rounds) for answer in alone))


@pytest.mark.parametrize(
    ("seconds", "judged"),
    [(None, 10), (100.0, 10), (6.5, 6), (5.9, 4), (0.001, 2)],  # a batch of two takes two made-up seconds
)
def test_prompts_that_fit_the_budget(
    seconds: float | None, judged: int, verifier: Verifier, tiny_medusa: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, prompts, clock = tiny_medusa(verifier), some_prompts(10), [0.0]
    monkeypatch.setattr(look_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def slow(*given: Any) -> Any:
        clock[0] += 2.0
        return speculate(*given)

    monkeypatch.setattr(look_module, "speculate", slow)
    found = look(Evaluator(verifier, prompts, BUDGET, batch=2), head, chain(2), None, seconds)
    assert (found["prompts"], found["of"], len(found["by_prompt"])) == (judged, 10, judged)
    monkeypatch.undo()
    whole = look(Evaluator(verifier, prompts, BUDGET, batch=2), head, chain(2))
    assert found["by_prompt"] == whole["by_prompt"][:judged]


def test_a_limit_comes_before_the_budget(verifier: Verifier, tiny_medusa: Callable[..., Any]) -> None:
    found = look(Evaluator(verifier, some_prompts(6), BUDGET, batch=4), tiny_medusa(verifier), StaticTree([[0], [1]]), 3, 60.0)
    assert (found["prompts"], found["of"]) == (3, 3)
    assert "conditional" not in found


def test_alpha_and_kl_by_hand(
    verifier: Verifier, tiny_medusa: Callable[..., Any], half_vocabulary: torch.Tensor
) -> None:  # fmt: skip
    """p and q of the token after each token of the answer, q of the first Medusa head from transformers' states."""
    head = tiny_medusa(verifier, target_ids=half_vocabulary)
    prompt = [5, 9, 30]
    answer = generate(verifier, [prompt], BUDGET)[0]
    found = overlap(verifier, head, prompt, answer)
    with torch.no_grad():
        out = verifier.model(torch.tensor([prompt + answer]), output_hidden_states=True)
    alphas, divergences = [], []
    for at in range(len(prompt) + 1, len(prompt) + len(answer)):
        p = out.logits[0, at - 1].double().softmax(-1)[half_vocabulary]
        block = head.blocks[0][0].linear
        z = out.hidden_states[-1][0, at - 2]
        z = z + nn.functional.silu(block.weight @ z + block.bias)
        q = (head.lm_heads[0].weight @ z).double().softmax(-1)
        alphas.append(torch.minimum(p, q).sum().item())
        divergences.append(sum(b * (torch.log(b) - torch.log(a)) for a, b in zip(p, q, strict=True)).item())
    assert found.count == len(alphas) == BUDGET - 1
    assert found.alpha == pytest.approx(sum(alphas) / len(alphas), rel=1e-4)
    assert found.kl == pytest.approx(sum(divergences) / len(divergences), rel=1e-4)


def test_a_head_of_nan_has_no_alpha(verifier: Verifier, tiny_medusa: Callable[..., Any]) -> None:
    """Its drafts are never accepted, and nothing that is not a number is logged."""
    head = tiny_medusa(verifier)
    with torch.no_grad():
        head.lm_heads[0].weight.fill_(float("nan"))
    found = look(Evaluator(verifier, some_prompts(2), BUDGET, batch=2), head, chain(2))
    assert (found["tau"], found["survival"], found["alpha"], found["kl"]) == (1.0, [0.0, 0.0], None, None)


@pytest.mark.parametrize(
    ("tau", "counts", "best_tau", "best_counts", "expected"),
    [
        (2.0, [], 1.5, [], True),
        (1.5, [], 1.5, [], False),
        (1.75, [[20, 10], [15, 10]], 2.0, [[20, 10]], False),  # equal on the prompt that both saw
        (1.8, [[21, 10], [15, 10]], 2.0, [[20, 10]], True),
        (2.1, [[21, 10]], 2.5, [[20, 10], [30, 10]], True),
        (2.2, [[22, 10]], 2.4, [[23, 10], [25, 10]], False),
        (0.0, [[0, 0]], 0.0, [[0, 0]], False),
    ],
)
def test_looks_are_compared_on_what_both_judged(
    tau: float, counts: Any, best_tau: float, best_counts: Any, expected: bool
) -> None:  # fmt: skip
    assert better(tau, counts, best_tau, best_counts) is expected


def test_a_head_that_overfits_is_caught(verifier: Verifier, tiny_medusa: Callable[..., Any], tmp_path: Any) -> None:
    """Trained first on the verifier's text, then on and on on one sample of nonsense: the training loss falls to the end, the
    held-out tau does not, and `head/` holds the head of its peak."""
    prompts = [[3 + i, 7, 11 + i] for i in range(24)]
    answers = generate(verifier, prompts, BUDGET)
    texts = [Sample(p + a, [False] * 3 + [True] * len(a)) for p, a in zip(prompts, answers, strict=True)]
    nonsense = Sample([3, 7, 11, *([40, 41] * 8)], [False] * 3 + [True] * 16)
    plan = [list(range(24))] * 20 + [[24]] * 20
    settings = Settings(
        optimizer="adamw", learning_rate=2e-2, warmup=0.0, schedule="constant", weight_decay=0.0, betas=(0.9, 0.95), clip=1.0,
        log_every=1, save_every=None, evaluate_every=4,
        **{name: 1 for name in ("accumulation", "seed") if name in Settings.__dataclass_fields__},
    )  # fmt: skip
    head = tiny_medusa(verifier)
    evaluator = Evaluator(verifier, [Prompt(p, str(i), None, "") for i, p in enumerate(prompts[:6])], BUDGET, batch=6)
    taus: list[float] = []

    def evaluate(head: Any) -> dict[str, Any]:
        found = look(evaluator, head, chain(3))
        taus.append(found["tau"])
        return found

    fit(head, verifier, OnlineFeatures(verifier, [*texts, nonsense], ()), plan, settings, tmp_path, evaluate)
    peak = max(taus)
    assert taus.index(peak) in range(1, 6)
    assert taus[-1] < peak - 0.3
    kept = look(evaluator, load_head(tmp_path / "head"), chain(3))
    assert kept["tau"] == pytest.approx(peak)
