"""Recorded passes: what a CUDA graph would replay is traced on the CPU, so that no line of a model's Python runs again."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from headstart.evaluation.decode import speculate
from headstart.evaluation.draft_model import ModelDrafter
from headstart.evaluation.tree import AnyTree, DynamicTree, StaticTree, chain
from headstart.heads import repeated
from headstart.heads.drafter import Drafter
from headstart.heads.generate import generate
from headstart.heads.truncated import first_layers
from headstart.heads.verifier import Verifier

PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
BRANCHES = StaticTree([[0], [1], [0, 0], [1, 0], [0, 0, 0]])


class Tape:
    """A recorder: the tensor operations of a pass, replayed into the same outputs."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
        program = make_fx(run)()
        outputs = [output.clone() for output in run()]
        self.recorded += 1

        def replay() -> list[Tensor]:
            self.replayed += 1
            for output, value in zip(outputs, program(), strict=True):
                output.copy_(value)
            return outputs

        return replay


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    tape = Tape()
    monkeypatch.setitem(repeated.RECORDERS, "cpu", tape)
    monkeypatch.setattr(repeated, "SPAN", 16)  # several of them in a text
    monkeypatch.setattr(repeated, "REPEATS", 2)
    return tape


def texts(verifier: Verifier, drafter: Drafter, tree: AnyTree) -> list[list[int]]:
    return [answer.tokens for answer in speculate(verifier, drafter, tree, PROMPTS, 24)[0]]


@pytest.mark.parametrize(
    ("family", "tree"),
    [
        ("llama", DynamicTree(3, 3, 9)), ("gemma2", BRANCHES),
        *(pytest.param(family, BRANCHES, marks=pytest.mark.slow)
          for family in ("qwen3", "gpt2", "mistral", "phi3", "gpt_neox", "cohere2", "granite", "olmo2")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)  # fmt: skip
def test_replayed_passes_write_the_same_text(
    tree: AnyTree, family: str, tape: Tape, tiny: Callable[..., Verifier], tiny_eagle3: Callable[..., Any]
) -> None:
    """Rows of other lengths, windows, and rows that leave the batch at times of their own."""
    verifier = tiny(family)
    expected = generate(tiny(family), PROMPTS, 24)
    tape.recorded = tape.replayed = 0
    assert texts(verifier, tiny_eagle3(verifier), tree) == expected
    assert tape.replayed > tape.recorded > 6
    assert not verifier.repeated.refused


@pytest.mark.parametrize("kind", ["eagle1", "medusa", "sequential", "truncated"])
def test_every_drafter(kind: str, tape: Tape, tiny: Callable[..., Verifier], request: pytest.FixtureRequest) -> None:
    """The same rounds, token by token, as without recording."""
    verifier = tiny("llama")
    if kind == "truncated":
        drafter: Drafter = ModelDrafter(first_layers(verifier, 2), verifier)
    elif kind in ("eagle1", "medusa"):
        drafter = request.getfixturevalue(f"tiny_{kind}")(verifier)
    else:
        drafter = request.getfixturevalue("tiny_mtp")(verifier, kind)
    recorded = speculate(verifier, drafter, BRANCHES, PROMPTS, 16)[0]
    assert tape.replayed > 0
    del repeated.RECORDERS["cpu"]
    assert recorded == speculate(verifier, drafter, BRANCHES, PROMPTS, 16)[0]


def test_a_cache_whose_rows_changed_is_recorded_anew(tape: Tape, tiny: Callable[..., Verifier]) -> None:
    verifier = tiny("llama")
    cache = verifier.new_cache(2, 40)
    verifier.prefill(PROMPTS[:2], cache)
    one, zero = torch.ones(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long)

    def passes(rows: int, count: int) -> None:
        for _ in range(count):
            verifier.decode(torch.full((rows, 1), 7), one, zero, cache)
            cache.advance([1] * rows)

    counts = []
    for rows, count in ((2, 1), (2, 1), (2, 3), (1, 1), (1, 1)):
        if rows < len(cache.lengths):
            cache.keep_rows([1])
        passes(rows, count)
        counts.append((tape.recorded, tape.replayed))
    assert counts == [(0, 0), (1, 1), (1, 4), (1, 4), (2, 5)]
    assert cache.lengths == [12]
    states = verifier.features(torch.tensor([[*PROMPTS[1], *[7] * 7]])).last[0, -1]
    found = verifier.decode(torch.full((1, 1), 7), one, zero, cache).last[0, 0]
    expected = verifier.features(torch.tensor([[*PROMPTS[1], *[7] * 8]])).last[0, -1]
    assert (found - expected).abs().max() < 1e-5 < (states - expected).abs().max()


def test_a_pass_that_says_something_else_is_not_replayed(
    tape: Tape, tiny: Callable[..., Verifier], tiny_eagle3: Callable[..., Any], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """And the text stays right, as it does where recording fails."""
    monkeypatch.setattr(repeated, "REPEATS", 3)
    verifier = tiny("llama")
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
    head, expected = tiny_eagle3(verifier), None
    for fault, told in (
        (lambda run: lambda: [output + 1 for output in run()], "a recorded pass differs from the pass as it is"),
        (lambda run: (_ for _ in ()).throw(RuntimeError("operation not permitted\nwhen capturing")), "operation not permitted"),
    ):
        verifier.repeated.refused.clear()
        monkeypatch.setitem(repeated.RECORDERS, "cpu", fault)
        found = texts(verifier, head, chain(3))
        monkeypatch.delitem(repeated.RECORDERS, "cpu")
        expected = expected or texts(verifier, head, chain(3))
        assert found == expected
        layers = f"verifier, layers {[*head.needs]}"
        assert verifier.repeated.refused == {layers, "eagle3 layer"}
        line = f"{layers}: not recorded as a CUDA graph, which makes decoding slower: {told}"
        assert line in capsys.readouterr().err.splitlines()
