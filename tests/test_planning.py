"""`headstart train --dry-run`: what it counts, what it warns of, and the shipped recipes at their verifiers' true sizes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Ended, headstart
from true_configs import TRUE

from headstart.build import build_settings
from headstart.errors import UserError
from headstart.heads.base import build_head
from headstart.heads.loading import load_skeleton
from headstart.heads.sizes import VerifierSizes, flops_a_label
from headstart.heads.verifier import Verifier
from headstart.planning import head_sizes, skeleton_head, tokens_each, with_adapter
from headstart.training.estimate import HeadSizes, Strategy, Work, memory
from headstart.training.recipe import load_recipe, shipped_recipes
from headstart.training.trainer import make_optimizers

CLUSTER = [name for name in shipped_recipes() if not name.startswith("smollm2")]


def config_only(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def plan(*arguments: object) -> tuple[int, dict[str, Any]]:
    ended = headstart("train", *arguments, "--dry-run", "--no-probe", "--json")
    assert ended.code in (0, 1), ended
    return ended.code, json.loads(ended.out)


def test_every_verifier_has_its_recipes() -> None:
    assert {name.partition("/")[0] for name in CLUSTER} == set(TRUE)
    for verifier in TRUE:
        assert {f"{verifier}/medusa", f"{verifier}/eagle3"} <= set(CLUSTER)


@pytest.mark.parametrize("name", CLUSTER)
def test_a_shipped_recipe_fits_its_node_at_the_true_size(name: str, tmp_path: Path) -> None:
    """Eight GPUs of 80 GB, as its first lines say; the verifier is a config.json alone, and the chats are not there yet."""
    assert headstart("recipe", "check", name).code == 0
    config, total, active = TRUE[name.partition("/")[0]]
    folder = config_only(tmp_path / "verifier", config)
    code, found = plan(name, f"verifier.model={folder}", "--ranks", 8, "--device-memory", 80)
    assert (found["verifier"]["parameters"], found["verifier"]["active"]) == (total, active)
    assert found["head"]["kind"] == name.partition("/")[2]
    assert (code, found["fits"]) == (0, True)
    assert [warning.partition(":")[0] for warning in found["warnings"]] == ["data"]
    assert found["memory_total_gb"] == pytest.approx(sum(found["memory_gb"].values()), abs=0.01)
    if found["strategy"] == "ddp":
        assert found["memory_gb"]["verifier"] == pytest.approx(total * 2e-9, abs=0.001)
    else:  # an eighth of the layers, two layers more, embedding and lm_head
        assert total * 2e-9 / 8 < found["memory_gb"]["verifier"] < total * 2e-9 / 4


def test_a_verifier_that_does_not_fit_is_told_before(tmp_path: Path) -> None:
    folder = config_only(tmp_path / "verifier", TRUE["llama-3.1-70b"][0])
    ask = ("llama-3.1-70b/eagle3", f"verifier.model={folder}", "training.strategy=ddp", "--ranks", 8, "--device-memory", 80)
    code, found = plan(*ask)
    assert (code, found["fits"]) == (1, False)
    assert found["memory_gb"]["verifier"] == pytest.approx(141.107, abs=0.01)
    assert "on a device of 80.0 GB; shard the verifier: training.strategy=fsdp on more processes" in found["warnings"][1]
    table = headstart("train", *ask, "--dry-run", "--no-probe")
    assert table.code == 1
    assert "141.11 GB" in table.out
    assert "warning" in table.out


def test_a_verifier_without_configuration_is_one_line_and_exit_2(tmp_path: Path) -> None:
    tmp_path.joinpath("empty").mkdir()
    ended = headstart("train", "qwen3-8b/mtp", f"verifier.model={tmp_path / 'empty'}", "--dry-run")
    assert ended.code == 2
    assert ended.err.startswith(f"error: verifier {tmp_path / 'empty'}: its configuration cannot be read")


# a verifier of 1000 numbers, 800 of them in 8 layers; a head of 100 trained numbers
SIZES = VerifierSizes(total=1000, layers=800, layer=100, active=900)
HEAD = HeadSizes(parameters=100, matrices=0, columns=10, passes=3, row=7)
WORK = Work(tokens=20, share=60, hidden=5, intermediate=11, states=4, vocabulary=50, bytes=2, online=True)


@pytest.mark.parametrize(
    ("strategy", "ranks", "verifier", "weights", "gradients", "moments", "exchange"),
    [
        ("single", 1, 2000, 400, 400, 800, 0),
        ("ddp", 4, 2000, 400, 400, 800, 400),
        ("fsdp", 4, 2 * (200 + 200 + 200), 400, 400, 800, 400),
        ("fsdp_head", 4, 2 * (200 + 200 + 200), 100, 100, 200, 800),
        ("zero1", 4, 2000, 500, 400, 200, 400),
        ("zero2", 4, 2000, 500, 100, 200, 400),
        ("zero3", 4, 2 * (200 + 200 + 200), 100, 100, 200, 800),
    ],
)
def test_memory_by_strategy(
    strategy: Strategy, ranks: int, verifier: int, weights: int, gradients: int, moments: int, exchange: int
) -> None:
    parts = memory(strategy, ranks, SIZES, HEAD, WORK)
    assert parts["verifier"] == verifier
    assert (parts["head weights"], parts["gradients"], parts["moments"]) == (weights, gradients, moments)
    assert parts["exchange"] == exchange
    assert parts["head weights in bfloat16"] == 200
    assert parts["features"] == 60 * 4 * 5 * 2
    assert parts["head pass"] == 20 * 3 * 7 * 2
    assert parts["verifier pass"] == 20 * (30 + 33) * 2 + 512 * 50 * 6
    assert parts["loss"] == 4 * 256 * 10 * 4


def test_memory_with_muon_and_kept_features() -> None:
    """Muon holds one moment of a matrix; without a verifier in the step nothing runs through it; float32 needs no copies."""
    head = HeadSizes(parameters=100, matrices=60, columns=10, passes=3, row=7)
    work = Work(tokens=20, share=20, hidden=5, intermediate=11, states=4, vocabulary=50, bytes=4, online=False)
    parts = memory("single", 1, SIZES, head, work)
    assert parts["moments"] == 4 * 60 + 8 * 40
    assert "verifier pass" not in parts
    assert parts["head weights in bfloat16"] == 0
    assert parts["head pass"] == 20 * 3 * 7 * 4


def test_memory_of_soft_medusa_targets() -> None:
    """The teacher's logits and probabilities of all rows."""
    parts = memory("single", 1, SIZES, replace(HEAD, whole_teacher=True), WORK)
    assert parts["loss"] == (4 * 256 + 2 * 20) * 10 * 4


@pytest.mark.parametrize(("rate", "optimizer", "matrices"), [(0.25, "muon", 0), (1.0, "muon", 1), (1.0, "adamw", 0)])
def test_memory_of_an_adapter_that_learns_with_the_heads(
    rate: float, optimizer: str, matrices: int, tmp_path: Path
) -> None:  # fmt: skip
    """d = 32, four heads of 8, MLP 64: of rank r a layer has r (4 · (32 + 32) + 3 · (32 + 64)) numbers. It is stepped by muon
    where it has the heads' own rate, and the verifier's pass is there though its states are stored."""
    small = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    folder = config_only(tmp_path / "verifier", {"model_type": "llama", **small})
    recipe = load_recipe(
        shipped_recipes()["qwen3-8b/medusa"],
        [f"verifier.model={folder}", "head.adapter={rank: 3}", f"head.adapter.rate={rate}", f"training.optimizer={optimizer}"],
    )
    section = recipe.head.adapter
    model = load_skeleton(str(folder), "float32", "cpu")
    work = replace(WORK, online=False)
    head, its = with_adapter(recipe, section, model, HEAD, work)
    learned = 4 * 3 * (4 * 64 + 3 * 96)
    assert (head.parameters, head.matrices) == (100 + learned, learned * matrices)
    assert (its.online, its.kept) == (True, 4 * (17 * 32 + 5 * 32 + 5 * 64))  # with dropout
    still = section.model_copy(update={"dropout": 0.0})
    assert with_adapter(recipe, still, load_skeleton(str(folder), "float32", "cpu"), HEAD, work)[1].kept == 4 * (
        12 * 32 + 4 * 32 + 4 * 64
    )
    with_it, without = (memory("single", 1, SIZES, *pair) for pair in ((head, its), (HEAD, work)))
    assert with_it["gradients"] - without["gradients"] == 4 * learned
    assert with_it["moments"] - without["moments"] == (4 if matrices else 8) * learned
    assert with_it["verifier's backward pass"] == 20 * its.kept * 2
    assert "verifier pass" in with_it
    assert not {"verifier pass", "verifier's backward pass"} & without.keys()
    with pytest.raises(UserError, match="query"):
        with_adapter(recipe, section.model_copy(update={"targets": ("query",)}), load_skeleton(str(folder), "float32", "cpu"),
                     HEAD, work)  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_weights_gradients_and_moments_are_what_a_step_allocates(
    kind: str, optimizer: str, tiny: Callable[..., Verifier], tmp_path: Path
) -> None:
    """The recipe's head at a tiny verifier's size, built and stepped for real, tensor by tensor."""
    verifier = tiny("llama", num_hidden_layers=8)
    recipe = load_recipe(shipped_recipes()[f"qwen3-8b/{kind}"], [f"training.optimizer={optimizer}", "head.lm_head=own"][
        : 2 if kind == "medusa" else 1])  # fmt: skip
    if kind == "eagle3":
        recipe = recipe.model_copy(update={"head": recipe.head.model_copy(update={"draft_vocabulary": 40})})
    sizes = head_sizes(recipe, verifier.facts, skeleton_head(recipe, verifier.facts))
    head = build_head(skeleton_head(recipe, verifier.facts).config.model_dump())
    for parameter in head.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers = make_optimizers(head, build_settings(recipe))
    for one in optimizers:
        one.step()
    states = [value for one in optimizers for state in one.state.values() for value in state.values()]
    parts = memory("single", 1, SIZES, sizes, WORK)
    assert parts["head weights"] == sum(p.numel() * p.element_size() for p in head.parameters())
    assert parts["gradients"] == sum(p.grad.numel() * 4 for p in head.parameters() if p.grad is not None)
    assert parts["moments"] == sum(t.numel() * t.element_size() for t in states if isinstance(t, torch.Tensor) and t.dim())


def test_recomputed_layers_keep_only_what_they_read(tiny: Callable[..., Verifier]) -> None:
    facts = tiny("llama", num_hidden_layers=8).facts  # d = 32, four heads of 8, MLP 64
    for changes, row in (([], 12 * 32 + 4 * 32 + 4 * 64), (["training.gradient_checkpointing=true"], 3 * 32)):
        recipe = load_recipe(shipped_recipes()["qwen3-8b/mtp"], changes)
        found = head_sizes(recipe, facts, skeleton_head(recipe, facts))
        assert (found.passes, found.row, found.columns) == (4, row, 96)


def test_flops_a_label(tiny: Callable[..., Verifier], tiny_medusa: Callable[..., Any], tiny_eagle3: Callable[..., Any]) -> None:
    """6 for a parameter it runs through, 4 for one of the verifier's lm_head; each Medusa head sees its own labels alone."""
    verifier = tiny("llama")  # d = 32, V = 96
    eagle3 = tiny_eagle3(verifier)
    assert flops_a_label(eagle3) == 6 * sum(p.numel() for p in eagle3.parameters())
    assert flops_a_label(tiny_medusa(verifier, heads=3, blocks=2)) == 6 * (2 * (32 * 32 + 32) + 32 * 96)
    assert flops_a_label(tiny_medusa(verifier, heads=3, lm_head="shared")) == 6 * (32 * 32 + 32) + 4 * 32 * 96


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [{"messages": [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": "it is it"}]}
            for i in range(20)]  # fmt: skip
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def written(tmp_path: Path, chats: Path, **training: Any) -> Path:
    recipe = {
        "verifier": {"model": str(tmp_path / "verifier"), "dtype": "float32", "device": "cpu"},
        "data": {"train": [str(chats)], "holdout": 0.1, "max_length": 64, "answers": "keep"},
        "head": {"kind": "eagle3", "layers": [1, 2, 3], "depth": 3},
        "training": {"batch_tokens": 100, "learning_rate": 1e-3} | training,
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")  # YAML reads JSON
    return path


def test_steps_of_epochs_without_a_tokenizer_are_counted_at_the_longest(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """18 conversations of at most 64 tokens, three times: 3,456 tokens, 35 steps of 100."""
    small = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config_only(tmp_path / "verifier", {"model_type": "llama", **small})
    code, found = plan(written(tmp_path, chats, epochs=3))
    assert (code, found["tokens"], found["steps"]) == (0, 3456, 35)
    assert found["warnings"] == []
    assert found["hours"] is None
    counted: list[float] = []
    monkeypatch.setattr("headstart.planning.tokens_each", lambda *its: counted.append(tokens_each(*its)) or counted[-1])
    code, found = plan(written(tmp_path, chats, epochs=3), "data.features=memory")
    assert found["host_features_gb"] == round(18 * 64 * 4 * 32 * 4 / 1e9, 3)
    assert (found["tokens"], counted) == (3456, [64.0])  # the files are read once
    plan(written(tmp_path, chats, steps=3))
    assert counted == [64.0]  # and not at all where nobody asks
    ended: Ended = headstart("train", tmp_path / "recipe.yaml", "--dry-run", "--json")
    assert "cannot be loaded" in json.loads(ended.out)["not_probed"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("answers", ["keep", "regenerate"])
def test_tokens_of_epochs_are_those_of_the_samples(answers: str, tmp_path: Path, chats: Path, verifier_folder: Path) -> None:
    """A byte is a token: <user>, the question, the end; <assistant>, then the file's answer and its end, or the longest one."""
    opened = [len(f"<user>what is {i}?") + 1 + len("<assistant>") for i in range(20)]
    each = [size - len("<assistant>") + len("<assistant>it is it") + 1 if answers == "keep" else size + 5 for size in opened]
    assert len(set(each)) == 2  # numbers of one digit and of two: which are held out decides the mean a little
    _, found = plan(written(tmp_path, chats, epochs=3), f"data.answers={answers}", "data.answer_tokens=5")
    assert 3 * 18 * min(each) <= found["tokens"] <= 3 * 18 * max(each)
