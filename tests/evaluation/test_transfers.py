"""How often a round of the decoding loop waits for the device: as often for sixty nodes as for six."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.evaluation.decode import Clock, Decoded, rounds
from headstart.evaluation.draft_model import ModelDrafter
from headstart.evaluation.hierarchical import Hierarchical
from headstart.evaluation.lookahead import Lookahead
from headstart.evaluation.ngrams import PromptLookup
from headstart.evaluation.sampling import GREEDY, Sampling, dice
from headstart.evaluation.tree import AnyTree, DynamicTree, StaticTree, chain
from headstart.heads.drafter import Drafter
from headstart.heads.truncated import first_layers
from headstart.heads.verifier import Verifier

CPU = torch.device("cpu")
READS = {"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__"}
PROMPTS = [[3, 4, 5, 3, 4], [5, 6, 7, 8, 9, 5, 6, 7]]


class Reads(TorchFunctionMode):
    """Counts the methods that hand a tensor's values to Python, and indexing by a mask, whose size Python must know."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        index = args[1] if name in ("__getitem__", "__setitem__") else ()
        parts = index if isinstance(index, tuple) else (index,)
        masked = any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)
        to_host = name == "to" and "cpu" in args[1:]  # by name: a device given as torch.device is the drafter's own
        self.count += name in READS or masked or to_host
        return function(*args, **(kwargs or {}))


class Scalars(TorchDispatchMode):
    """Counts what reads a scalar or a size below Python, such as masked_select."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal")
        self.count += function.name().removeprefix("aten::").split(".")[0] in names
        return function(*args, **(kwargs or {}))


@pytest.fixture
def verifier(tiny: Callable[..., Verifier]) -> Verifier:
    verifier = tiny("llama")
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
    return verifier


@pytest.fixture
def drafters(verifier: Verifier, tiny_eagle3: Any, tiny_medusa: Any, tiny_mtp: Any) -> dict[str, Drafter]:
    lookup = PromptLookup(96, CPU, longest=2, shortest=1)
    return {
        "eagle3": tiny_eagle3(verifier),
        "medusa": tiny_medusa(verifier),
        "mtp": tiny_mtp(verifier, "sequential"),
        "prompt_lookup": lookup,
        "lookahead": Lookahead(96, CPU),
        "hierarchical": Hierarchical(lookup, tiny_eagle3(verifier)),
        "truncated": ModelDrafter(first_layers(verifier, 2), verifier),
    }


def reads_of_rounds(verifier: Verifier, drafter: Drafter, tree: AnyTree, sampling: Sampling) -> list[int]:
    """Of the second, third and fourth round (the first copies a fixed shape to the device)."""
    found = []
    budget = 1 + 4 * (tree.depth + 1)
    done, clock = [Decoded() for _ in PROMPTS], Clock(CPU)
    loop = rounds(verifier, drafter, tree, PROMPTS, budget, done, clock, sampling, dice(0))
    next(loop)
    for _ in range(3):
        with Scalars() as scalars, Reads() as reads:
            next(loop)
        found.append(max(reads.count, scalars.count))
    return found


def wide(nodes: int) -> StaticTree:
    """`nodes` nodes on three levels."""
    paths = [[0], [0, 0], [0, 0, 0]]
    return StaticTree([*paths, *[[rank] for rank in range(1, (nodes - 3) // 2)], *[[0, r] for r in range(1, (nodes - 2) // 2)]])


KINDS = ["eagle3", "medusa", "mtp", "prompt_lookup", "lookahead", "hierarchical", "truncated"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_greedy_round_reads_the_device_a_fixed_number_of_times(kind: str, verifier: Verifier, drafters: Any) -> None:
    """Once for the account of the round; n-gram drafters once more for the tokens, lookahead once more for its window."""
    allowed = 1 + (kind in ("prompt_lookup", "lookahead", "hierarchical")) + (kind == "lookahead")
    for tree in (chain(3), wide(8), wide(60), DynamicTree(3, 2, 6), DynamicTree(3, 8, 60)):
        found = reads_of_rounds(verifier, drafters[kind], tree, GREEDY)
        assert found == [allowed] * 3


@pytest.mark.parametrize("rule", ["candidates", "without_replacement"])
def test_a_sampled_round_reads_the_device_no_oftener_for_more_nodes(rule: Any, verifier: Verifier, drafters: Any) -> None:
    sampling = Sampling(1.0, rule)
    few, many = (max(reads_of_rounds(verifier, drafters["eagle3"], wide(nodes), sampling)) for nodes in (8, 60))
    assert few <= 2 + 2 * 3 + 3  # the account, a look at each level of the walk, and at what children are drawn from
    assert many <= 2 + 2 * 3 + 3


def test_a_read_for_every_node_would_be_counted(verifier: Verifier, drafters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a tree that looks at each of its nodes."""
    honest = StaticTree.grow

    def grow(*given: Any) -> Any:
        tree = honest(*given)
        assert all(int(token) >= 0 for row in tree.ids for token in row)
        return tree

    monkeypatch.setattr(StaticTree, "grow", grow)
    assert min(reads_of_rounds(verifier, drafters["medusa"], wide(60), GREEDY)) > 60
