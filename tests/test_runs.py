"""Runs whose verifier has an adapter, given (`verifier.adapter`) or learned (Medusa-2), and runs with `head.start`."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command import headstart
from safetensors.torch import load_file
from small_runs import ROWS, Build
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from headstart.export.layout import Order
from headstart.export.write import write_export
from headstart.heads.adapters import new_adapter
from headstart.heads.hub import load_head, save_head
from headstart.heads.verifier import Verifier
from headstart.training.checkpoint import Checkpoints

LEARNED = {"rank": 4, "alpha": 8, "heads_only": 0.5, "own": "ce", "rate": 0.5}


def refused(*arguments: object) -> str:
    """The one line of a command that exits with 2."""
    ended = headstart(*arguments)
    assert ended.code == 2, ended
    *_, line = ended.err.splitlines()
    return line.removeprefix("error: ")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")


@pytest.fixture
def base(verifier_folder: Path) -> Path:
    return verifier_folder


@pytest.fixture
def lora(base: Path, tmp_path: Path) -> Path:
    """An adapter that changes what the verifier says."""
    model = AutoModelForCausalLM.from_pretrained(base)
    adapter = new_adapter(model, "owner/base", 4, 8, 0.0, ["q_proj", "down_proj"])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in adapter.weights.values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    adapter.save(tmp_path / "lora")
    return tmp_path / "lora"


@pytest.fixture
def write(base: Path, tmp_path: Path) -> Callable[..., Path]:
    """`write(section__key=value)`: a Medusa recipe."""

    def recipe_file(**changes: Any) -> Path:
        chats = tmp_path / "chat.jsonl"
        chats.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
        recipe: dict[str, Any] = {
            "verifier": {"model": str(base), "dtype": "float32", "device": "cpu"},
            "data": {"train": [str(chats)], "holdout": "split", "answers": "regenerate", "answer_tokens": 12},
            "head": {"kind": "medusa", "heads": 3, "lm_head": "shared"},
            "training": {"steps": 4, "batch_tokens": 100, "learning_rate": 1e-2, "save_every": 3, "log_every": 1},
            "evaluation": {"trees": [{"kind": "chain", "depth": 3}], "max_new_tokens": 16, "batch": 4},
        }
        for name, value in changes.items():
            section, _, key = name.partition("__")
            recipe[section] = recipe[section] | {key: value} if key else value
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return path

    return recipe_file


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def evaluated(run: Path) -> dict[str, Any]:
    ended = headstart("eval", run, "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def test_case_56_a_head_for_a_verifier_with_an_adapter(
    write: Build, base: Path, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, run, out = tmp_path / "plain", tmp_path / "run", tmp_path / "out"
    assert headstart("train", write(), "--run-folder", plain).code == 0
    trained = headstart("train", write(verifier__adapter=str(lora)), "--run-folder", run)
    assert trained.code == 0, trained.err
    assert len(list((tmp_path / "cache" / "answers").iterdir())) == 2  # answers of its own
    prints = [json.loads((folder / "provenance.json").read_text())["verifier"]["fingerprint"] for folder in (plain, run)]
    assert prints[0] != prints[1]

    assert "adapter" not in evaluated(plain)
    evaluation = evaluated(run)
    assert (evaluation["verifier"], evaluation["adapter"]) == (str(base), str(lora))
    assert "verifier_quality" not in evaluation  # the adapter was there before the head
    assert evaluation["results"][0]["identical_to_greedy"] is True
    texts = [[token["text"] for token in e["results"][0]["example"]["tokens"]] for e in (evaluation, evaluated(plain))]
    assert texts[0] != texts[1]
    assert headstart("doctor", run).code == 0  # the adapter is part of what the record is of
    monkeypatch.setattr("headstart.judging.proof", lambda seed: iter(()))
    proved = headstart("lossless", run, "--tokens", 1000, "--json")
    greedy = [gate for gate in json.loads(proved.out)["gates"] if gate["name"].startswith("head, greedy")]
    assert [gate["passed"] for gate in greedy] == [True]

    exported = headstart("export", run, "--to", "vllm", "--output", out, "--verifier", "owner/merged")
    assert exported.code == 0, exported.err
    serving = (out / "SERVING.md").read_text()
    assert "vllm serve owner/merged " in serving
    assert "The verifier is the base model with the LoRA adapter of this run: serve the two merged" in serving
    assert str(tmp_path) not in serving
    judged = headstart("verify-export", out, "--engine", "vllm", "--run", run)
    assert judged.code == 0, judged.out

    shutil.move(lora, tmp_path / "gone")
    assert refused("eval", run) == f"adapter {lora}: no such folder"


def test_the_quality_of_an_adapted_verifier_is_told_of_the_files_answers_where_they_are_kept(
    write: Build, base: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    trained = headstart("train", write(head__adapter=LEARNED, data__answers="keep"), "--run-folder", run)
    assert trained.code == 0, trained.err
    original = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    nll, count = 0.0, 0
    for row in (row for row in ROWS if row["split"] == "holdout"):
        ids = tokenizer.apply_chat_template(row["messages"], return_tensors="pt")["input_ids"]
        size = len(row["messages"][1]["content"]) + 1  # a token a byte, and the end of the turn
        with torch.no_grad():
            log_p = original(ids).logits[0, -size - 1 : -1].double().log_softmax(-1)
        nll -= log_p.gather(1, ids[0, -size:, None]).sum().item()
        count += size
    kept = evaluated(run)["verifier_quality"]
    assert kept["tokens"] == count
    assert kept["before"]["perplexity"] == pytest.approx(torch.tensor(nll / count).exp().item(), rel=1e-4)


def test_medusa_2_from_recipe_to_export(write: Build, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    trained = headstart("train", write(head__adapter=LEARNED), "--run-folder", run)
    assert trained.code == 0, trained.err
    logged = [line for line in lines(run / "metrics.jsonl") if "loss" in line]
    assert [len(line["loss_by_depth"]) for line in logged] == [3] * 4
    assert [line["verifier_loss"] > 0 for line in logged] == [False, False, True, True]  # two stages

    evaluation = evaluated(run)
    assert (evaluation["verifier"], evaluation["adapter"]) == (str(base), str(run / "head" / "adapter"))
    assert evaluation["results"][0]["identical_to_greedy"] is True
    told = headstart("eval", run)
    assert f"the verifier is {base} with the adapter in {run / 'head' / 'adapter'}, and answers are held against its own" in (
        told.err.replace("\n", " ")
    )
    its = Verifier.load(str(base), device="cpu", adapter=str(run / "head" / "adapter"))
    assert type(load_head(run / "head")).__name__ == "MedusaHead"

    # perplexity and KL of the original's own greedy answers, by transformers alone
    kept = evaluation["verifier_quality"]
    original = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    nll, nll_after, kl, count = 0.0, 0.0, 0.0, 0
    for row in (row for row in ROWS if row["split"] == "holdout"):
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True)["input_ids"]
        ids = original.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            p, q = (m(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1) for m in (original, its.model))
        answer = ids[0, len(prompt) :]
        nll -= p.gather(1, answer[:, None]).sum().item()
        nll_after -= q.gather(1, answer[:, None]).sum().item()
        kl += (p.exp() * (p - q)).sum().item()
        count += len(answer)
    assert kept["tokens"] == count
    assert kept["before"] == {"perplexity": pytest.approx(torch.tensor(nll / count).exp().item(), rel=1e-4), "kl": 0.0}
    assert kept["after"]["perplexity"] == pytest.approx(torch.tensor(nll_after / count).exp().item(), rel=1e-4)
    assert kept["after"]["kl"] == pytest.approx(kl / count, rel=1e-3)
    assert kept["after"]["kl"] > 1e-3

    page = headstart("report", run)
    assert page.code == 0, page.err
    html = (run / "report.html").read_text()
    assert f"{kept['before']['perplexity']:.3f} → {kept['after']['perplexity']:.3f}" in html

    checks = {check["name"]: check for check in json.loads(headstart("doctor", run, "--json").out)["checks"]}
    assert checks["verifier"]["healthy"] is None  # the record is of the one without the adapter
    assert all(check["healthy"] for name, check in checks.items() if name != "verifier")

    monkeypatch.setattr("headstart.judging.proof", lambda seed: iter(()))
    gates = json.loads(headstart("lossless", run, "--tokens", 1000, "--json").out)["gates"]
    assert [gate["passed"] for gate in gates if gate["name"].startswith("head, greedy")] == [True]
    exported = headstart("export", run, "--to", "vllm", "--output", out)
    assert exported.code == 0, exported.err
    assert "with the LoRA adapter of this run: serve the two merged" in (out / "SERVING.md").read_text()
    assert "give its hub id" in refused("export", run, "--to", "medusa", "--output", tmp_path / "other")

    shutil.rmtree(run / "head" / "adapter")
    assert refused("eval", run).startswith(f"{run / 'head' / 'adapter'}: no such folder; the head was trained with the adapter")


def test_a_killed_medusa_2_run_goes_on(write: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in stage 2, with dropout: heads, adapter and what was drawn end as in the run that was never stopped."""
    recipe = write(head__adapter=LEARNED | {"own": "kl", "weight": 0.5, "ramp": "constant", "dropout": 0.3})
    assert headstart("train", recipe, "--run-folder", tmp_path / "straight").code == 0
    save = Checkpoints.save

    def save_and_die(self: Checkpoints, *arguments: Any) -> None:
        save(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", save_and_die)
    assert headstart("train", recipe, "--run-folder", tmp_path / "killed").code == 130
    monkeypatch.undo()
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    assert headstart("train", recipe, "--run-folder", tmp_path / "killed").code == 0
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        one, other = (load_file(tmp_path / name / "head" / file) for name in ("straight", "killed"))
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert any(tensor.abs().max() > 0 for name, tensor in one.items() if "lora_B" in name)


def test_one_adapter_at_a_time(write: Build, lora: Path, tmp_path: Path) -> None:
    recipe = write(verifier__adapter=str(lora), head__adapter={})
    told = refused("train", recipe, "--run-folder", tmp_path / "run")
    assert told.startswith(f"{recipe}:")
    assert "head.adapter cannot learn on top of verifier.adapter: merge that into the verifier first" in told
    told = refused("train", write(head__adapter={}, training__strategy="fsdp"), "--run-folder", tmp_path / "run")
    assert told.endswith("fsdp shards a frozen verifier; with head.adapter set strategy to single or ddp")
    told = refused("train", write(head__adapter={"heads_only": 0.8}), "--run-folder", tmp_path / "run")
    assert told == "head.adapter.heads_only: 0.8 of 4 steps leave none to the adapter"
    recipe = write(head__adapter={"targets": ["query"]})
    told = refused("train", recipe, "--run-folder", tmp_path / "run")
    assert "Target modules {'query'} not found" in told
    assert not (tmp_path / "run").exists()


@pytest.fixture
def publish(base: Path, tmp_path: Path, tiny_medusa: Build, tiny_eagle1: Build, tiny_eagle3: Build) -> Callable[..., Path]:
    """`publish(kind, **config)`: a folder with a random head in vLLM's layout; the same head, as it is saved here, in own/."""

    def export(kind: str, **config: Any) -> Path:
        verifier = Verifier.load(str(base), device="cpu")
        head = {"medusa": tiny_medusa, "eagle1": tiny_eagle1, "eagle3": tiny_eagle3}[kind](verifier, **config)
        if kind == "eagle3":
            head.input_scale.fill_(1.0)
        write_export(Order(head, verifier, "owner/base", torch.float32), "vllm", tmp_path / f"published_{kind}")
        save_head(head, tmp_path / "own" / kind)
        return tmp_path / f"published_{kind}"

    return export


SOME = torch.tensor([0, 1, *range(40, 120)])
PUBLISHED: dict[str, dict[str, Any]] = {
    "eagle3": {"layers": (1, 2, 3), "target_ids": SOME},
    "eagle1": {},
    "medusa": {"heads": 3, "blocks": 2, "target_ids": SOME},
}
SLOW = {"training__steps": 1, "training__learning_rate": 1e-9, "training__warmup": 0.0}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_training_starts_from_a_published_head(kind: str, publish: Build, write: Build, tmp_path: Path) -> None:
    """Its layers, blocks and vocabulary map are in the folder, not in the recipe; so are its weights."""
    folder = publish(kind, **PUBLISHED[kind])
    given = load_head(tmp_path / "own" / kind)
    for source in (folder, tmp_path / "own" / kind):
        run, learning = tmp_path / "runs" / source.name, {"decay": 0.5} if kind == "medusa" else {"depth": 2}
        trained = headstart("train", write(head={"kind": kind, "start": str(source), **learning}, **SLOW), "--run-folder", run)
        assert trained.code == 0, trained.err
        assert "draft vocabulary: " not in trained.err  # none was chosen anew
        assert ("labels of a few samples are outside the head's vocabulary" in trained.err) == (kind != "eagle1")
        after = load_file(run / "checkpoints" / "step-1" / "head.safetensors")
        assert after.keys() == given.state_dict().keys()
        for name, tensor in given.state_dict().items():
            assert torch.allclose(tensor, after[name], atol=1e-6), name
        assert any(not torch.equal(tensor, after[name]) for name, tensor in given.state_dict().items())
        config = load_head(run / "head").config
        made_of, value = {"eagle3": ("layers", (1, 2, 3)), "medusa": ("blocks", 2), "eagle1": ("noise", 0.1)}[kind]
        assert getattr(config, made_of) == value
        assert {name: getattr(config, name) for name in learning} == learning
        again = headstart("train", run / "recipe.yaml", "--run-folder", run)  # every default spelled out
        assert again.code == 0, again.err


def test_medusa_2_starts_from_a_published_head(publish: Build, write: Build, tmp_path: Path) -> None:
    folder = publish("medusa", **PUBLISHED["medusa"])
    section = {"kind": "medusa", "start": str(folder), "adapter": LEARNED | {"heads_only": 0.0}}
    trained = headstart("train", write(head=section), "--run-folder", tmp_path / "run")
    assert trained.code == 0, trained.err
    head, given = load_head(tmp_path / "run" / "head"), load_head(tmp_path / "own" / "medusa")
    assert torch.equal(head.target_ids, given.target_ids)
    weights = load_file(tmp_path / "run" / "head" / "adapter" / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in weights.items() if "lora_B" in name)


def test_a_head_of_medusa_2_is_for_the_verifier_with_its_adapter(
    publish: Build, write: Build, lora: Path, tmp_path: Path
) -> None:  # fmt: skip
    publish("medusa", **PUBLISHED["medusa"])
    folder = tmp_path / "own" / "medusa"
    shutil.copytree(lora, folder / "adapter")
    section = {"kind": "medusa", "start": str(folder)}
    assert refused("train", write(head=section, **SLOW), "--run-folder", tmp_path / "run") == (
        f"head.start: {folder} was trained with the adapter in it: set verifier.adapter to {folder / 'adapter'}, or take the "
        "folder without it for a verifier that has it merged in"
    )
    recipe = write(head=section, verifier__adapter=str(folder / "adapter"), **SLOW)
    trained = headstart("train", recipe, "--run-folder", tmp_path / "run")
    assert trained.code == 0, trained.err


@pytest.mark.parametrize(("section", "reason"), [
    ({"kind": "medusa"}, "head.kind: medusa in the recipe, eagle3 in {folder}; it cannot change"),
    ({"draft_vocabulary": 50}, "head: the recipe asks for 50 tokens, the head in {folder} drafts 82; the vocabulary of an "
     "imported head stays"),
    ({"layers": [1, 2]}, "head.layers: (1, 2) in the recipe, (1, 2, 3) in {folder}; it cannot change"),
    ({"start": "/nowhere/at/all"}, "/nowhere/at/all: no such folder"),
])  # fmt: skip
def test_a_start_that_does_not_fit_is_one_line(
    section: dict[str, Any], reason: str, publish: Build, write: Build, tmp_path: Path
) -> None:
    folder = publish("eagle3", **PUBLISHED["eagle3"])
    recipe = write(head={"kind": "eagle3", "start": str(folder)} | section)
    assert refused("train", recipe, "--run-folder", tmp_path / "run") == reason.format(folder=folder)
    assert not (tmp_path / "run").exists()


def test_a_start_for_another_verifier(base: Path, tiny: Build, tiny_medusa: Build, write: Build, tmp_path: Path) -> None:
    save_head(tiny_medusa(tiny("llama", vocab_size=300)), tmp_path / "other")
    told = refused("train", write(head={"kind": "medusa", "start": str(tmp_path / "other")}), "--run-folder", tmp_path / "run")
    assert told == f"head and verifier {base} do not fit: the head's vocabulary is 300, the verifier's 258"


def test_a_started_head_may_be_less_deep_than_the_trees(publish: Build, write: Build, tmp_path: Path) -> None:
    folder = publish("medusa", heads=2)
    recipe = write(head={"kind": "medusa", "start": str(folder)})
    told = refused("train", recipe, "--run-folder", tmp_path / "run")
    assert told == "evaluation.trees: a chain tree of depth 3 is deeper than its drafter, which has 2"
