"""analysis.json: every number against a reference of its own, and its pictures on the page."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.errors import UserError
from headstart.evaluation.analysis import ALPHAS, analyse, curve, expected_tokens
from headstart.evaluation.analysis_file import Analysis, Depth
from headstart.evaluation.parity import write_texts
from headstart.evaluation.report import write_report
from headstart.evaluation.run_folder import read_run
from headstart.evaluation.top_k import top_k
from headstart.heads.verifier import Verifier

RESULT: dict[str, Any] = {
    "tree": {"kind": "chain", "depth": 4, "nodes": 5}, "temperature": 0.0, "rounds": 6, "emitted": 16, "drafted": 24,
    "accepted": 10, "tau": 16 / 6, "survival": [2 / 3, 2 / 3, 1 / 3, 0.0],
    "seconds": {"prefill": 0.5, "draft": 1.2, "verify": 6.0, "other": 0.5, "plain": 15.5},
    "timing": {"prompts": 4, "repeats": 3, "batch": 1},
    "by_category": {"writing": {"tau": 2.25, "rounds": 4, "emitted": 9}},
    "by_context": {"0-127": {"tau": 2.5, "rounds": 4, "emitted": 10}},
}  # fmt: skip
LOOKS = [(10, 0.31, 1.9, 1.4), (20, 0.44, 1.2, 1.7), (30, 0.42, 1.3, 1.8), (40, 0.55, 0.9, 2.1)]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def write(looks: Any = LOOKS, **changes: Any) -> Path:
        (tmp_path / "recipe.yaml").write_text("head: {kind: medusa}\n", encoding="utf-8")
        lines = [{"step": s, "held_out": {"tau": tau, "alpha": a, "kl": kl}} for s, a, kl, tau in looks]
        text = "".join(json.dumps(line) + "\n" for line in [{"step": 5, "loss": 2.0}, *lines])
        (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
        evaluation = {"verifier": "v", "head": {"kind": "medusa", "parameters": 1}, "prompts": 4, "max_new_tokens": 8,
                      "dtype": "float32", "device": "cpu", "results": [RESULT | changes]}  # fmt: skip
        (tmp_path / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
        return tmp_path

    return write


def test_expected_tokens_are_those_of_coins() -> None:
    """The mean over random rounds: drafts are accepted until the first that is not, and one token more is emitted."""
    rng = random.Random(0)
    for alpha in ALPHAS:
        total = 0
        for _ in range(40_000):
            accepted = 0
            while accepted < 5 and rng.random() < alpha:
                accepted += 1
            total += accepted + 1
        assert expected_tokens(alpha, 5) == pytest.approx(total / 40_000, rel=0.02)
    assert expected_tokens(0.7, 3) == pytest.approx(1 + 0.7 + 0.49 + 0.343)
    assert (expected_tokens(1.0, 3), expected_tokens(0.5, 0)) == (4.0, 1.0)


def test_the_best_number_of_drafts() -> None:
    """By hand at alpha 0.5 and cost 0.1: 1, 1.5/1.1, 1.75/1.2, 1.875/1.3, 1.9375/1.4."""
    found = curve(0.5, 0.1)
    assert found.speedup[:5] == pytest.approx([1, 1.5 / 1.1, 1.75 / 1.2, 1.875 / 1.3, 1.9375 / 1.4])
    assert found.best == 2
    assert curve(0.5, 0.6).best == 0  # 1.5 / 1.6 does not pay
    assert curve(0.85, 0.0).best == 16
    assert [curve(alpha, 0.05).best for alpha in ALPHAS] == sorted(curve(alpha, 0.05).best for alpha in ALPHAS)


def test_a_run_is_read_right(make_run: Callable[..., Path]) -> None:
    found = analyse(read_run(make_run()), [], None)
    assert [(s.step, s.alpha, s.kl, s.tau) for s in found.stages.looks] == LOOKS
    # ranks of kl: 4 2 3 1, of alpha: 1 3 2 4: all differences odd, 1 - 6 * (9 + 1 + 1 + 9) / (4 * 15)
    assert found.stages.spearman == pytest.approx(1 - 6 * 20 / 60)
    assert found.stages.p == pytest.approx(0.0, abs=1e-9)
    assert (found.lengths.cost, found.lengths.cost_is_measured) == (pytest.approx(1.2 / 4 / 6.0), True)
    (chain,) = found.lengths.measured
    assert (chain.tokens, chain.tau) == (pytest.approx([1, 5 / 3, 7 / 3, 8 / 3, 8 / 3]), 16 / 6)
    assert [c.alpha for c in found.lengths.curves] == [0.5, 0.7, 0.85]
    assert found.by_category["writing"].tau == 2.25
    assert found.by_context["0-127"].rounds == 4


def test_ranks_that_are_no_line(make_run: Callable[..., Path]) -> None:
    """Squared rank differences 1 + 1 + 1 + 1: 1 - 6 * 4 / 60."""
    looks = [(1, 0.1, 0.2, 1.0), (2, 0.2, 0.1, 1.0), (3, 0.3, 0.4, 1.0), (4, 0.4, 0.3, 1.0)]
    assert analyse(read_run(make_run(looks)), [], None).stages.spearman == pytest.approx(0.6)


@pytest.mark.parametrize("looks", [LOOKS[:2], [], [(1, 0.5, 0.2, 1.0), (2, 0.5, 0.1, 1.0), (3, 0.5, 0.4, 1.0)]])
def test_too_few_looks_have_no_rank_correlation(looks: Any, make_run: Callable[..., Path]) -> None:
    found = analyse(read_run(make_run(looks)), [], None).stages
    assert (found.spearman, found.p, len(found.looks)) == (None, None, len(looks))


@pytest.mark.parametrize(("given", "timing", "cost", "measured"), [
    (0.3, RESULT["timing"], 0.3, False), (None, None, 0.1, False), (0.0, None, 0.0, False),
])  # fmt: skip
def test_a_cost_is_given_or_assumed(
    given: float | None, timing: Any, cost: float, measured: bool, make_run: Callable[..., Path]
) -> None:
    found = analyse(read_run(make_run(timing=timing)), [], given).lengths
    assert (found.cost, found.cost_is_measured) == (cost, measured)


def test_chains_of_several_drafters_are_told_apart(make_run: Callable[..., Path]) -> None:
    """n-grams cost next to nothing: theirs is not what a draft of the head costs, wherever they stand in the list."""
    path = make_run() / "evaluation.json"
    evaluation = json.loads(path.read_text(encoding="utf-8"))
    cheap = {"drafter": "prompt_lookup", "seconds": RESULT["seconds"] | {"draft": 0.012}}
    evaluation["results"].insert(0, RESULT | cheap)
    path.write_text(json.dumps(evaluation), encoding="utf-8")
    found = analyse(read_run(path.parent), [], None).lengths
    assert found.cost == pytest.approx(1.2 / 4 / 6.0)
    assert [chain.label for chain in found.measured] == ["prompt_lookup, chain, depth 4, T 0", "chain, depth 4, T 0"]
    evaluation["results"].pop()
    path.write_text(json.dumps(evaluation), encoding="utf-8")
    assert analyse(read_run(path.parent), [], None).lengths.cost_is_measured is False


def test_a_tree_is_no_chain(make_run: Callable[..., Path]) -> None:
    run = read_run(make_run(tree={"kind": "dynamic", "depth": 4, "nodes": 9, "top_k": 3}))
    assert analyse(run, [], None).lengths.measured == []


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_top_k_is_counted_by_hand(
    kind: str, tiny: Callable[..., Verifier], half_vocabulary: torch.Tensor, request: pytest.FixtureRequest
) -> None:
    """A session shown the text up to each position, its likeliest tokens sorted, labels that it cannot draft as misses."""
    verifier = tiny("llama", eos_token_id=None)
    head = request.getfixturevalue(f"tiny_{kind}")(verifier, target_ids=half_vocabulary).eval()
    prompts, depths = [[3, 7, 11], [40, 41, 42, 43, 44]], 3
    texts = write_texts(head, verifier, prompts, 9)
    found = top_k(head, verifier, texts, depths)
    hits, labels, inside = [[0] * 5 for _ in range(depths)], [0] * depths, [0] * depths
    for row, prompt in enumerate(prompts):
        text = texts.batch.ids[row, : len(prompt) + 9].tolist()
        states = verifier.features(torch.tensor([text]), head.needs)
        for root in range(len(prompt), len(text) - 1):
            session = head.begin(verifier, 1, 64)
            seen = type(states)(states.last[:, :root], states.layers[:, :root])
            log_q = session.observe(seen, torch.tensor([text[1 : root + 1]]), [root])[0]
            for k in range(min(depths, len(text) - 1 - root)):
                if k:
                    log_q = session.expand(torch.tensor([[text[root + k]]]), torch.tensor([[k - 2]]))[0, 0]
                ranked = sorted(range(48), key=lambda column: -log_q[column].item())[:5]
                label = text[root + 1 + k]
                labels[k] += 1
                inside[k] += label in half_vocabulary.tolist()
                for rank in range(5):
                    hits[k][rank] += label in [int(half_vocabulary[column]) for column in ranked[: rank + 1]]
    assert [depth.labels for depth in found] == labels == [16, 14, 12]
    assert [depth.in_vocabulary for depth in found] == inside
    assert sum(inside) < sum(labels)
    assert [depth.accuracy for depth in found] == [
        pytest.approx([hit / n for hit in its]) for its, n in zip(hits, labels, strict=True)
    ]


def test_the_page_shows_the_pictures(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    depths = [
        Depth(labels=20, in_vocabulary=18, accuracy=[0.5, 0.6, None]),
        Depth(labels=10, in_vocabulary=9, accuracy=[0.3, 0.4, 0.5]),
    ]
    analysis = analyse(read_run(folder), depths, None)
    (folder / "analysis.json").write_text(analysis.model_dump_json(), encoding="utf-8")
    assert read_run(folder).analysis == analysis
    page = write_report([folder], folder / "report.html").read_text(encoding="utf-8")
    assert "rank correlation -1.000 (p 0)." in page
    assert "at 0.05 verifier passes a draft (measured)" in page
    assert "of 20, 10 labels" in page
    assert {path.name for path in (folder / "plots").iterdir()} >= {"alpha-kl.png", "draft-length.png", "top-k.png"}
    assert Analysis.model_validate_json((folder / "analysis.json").read_text(encoding="utf-8")) == analysis

    (folder / "analysis.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"analysis\.json: stages: Field required"):
        read_run(folder)
