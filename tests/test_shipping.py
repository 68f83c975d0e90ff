"""`headstart export`, `verify-export` and `import` from run folder to run folder, in this process, on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import headstart
from safetensors.torch import load_file
from small_runs import Build

from headstart.errors import UserError
from headstart.heads.hub import load_head, save_head
from headstart.jobs import start_from
from headstart.training.recipe import load_recipe, recipe_yaml


def refused(*arguments: object) -> str:
    """The one line of a command that exits with 2."""
    ended = headstart(*arguments)
    assert ended.code == 2, ended
    (line,) = ended.err.splitlines()
    return line.removeprefix("error: ")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(("kind", "engine"), [
    ("eagle3", "vllm"), ("eagle3", "sglang"), ("eagle3", "speculators"), ("eagle1", "vllm"), ("eagle1", "sglang"),
    ("medusa", "vllm"), ("medusa", "medusa"),
])  # fmt: skip
def test_there_and_back(kind: str, engine: str, make_run: Build, verifier_folder: Path, tmp_path: Path) -> None:
    folder, out, back = make_run(kind), tmp_path / "out", tmp_path / "runs" / "back"
    exported = headstart("export", folder, "--to", engine, "--output", out, "--verifier", "owner/name")
    assert exported.code == 0, exported.err
    assert f"how to serve it is in {out / 'SERVING.md'}" in exported.err
    assert "owner/name" in (out / "SERVING.md").read_text()
    assert str(tmp_path) not in (out / "config.json").read_text() + (out / "SERVING.md").read_text()

    judged = headstart("verify-export", out, "--engine", engine, "--run", folder, "--json")
    assert judged.code == 0, judged
    verdict = json.loads(judged.out)
    assert (verdict["ok"], verdict["broken"]) == (True, [])
    assert verdict["difference"] < 1e-5

    imported = headstart("import", out, "--verifier", verifier_folder, "--run-folder", back, "--engine", engine)
    assert imported.code == 0, imported.err
    ours, theirs = load_head(folder / "head").state_dict(), load_head(back / "head").state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    recipe = load_recipe(back / "recipe.yaml")
    assert (recipe.verifier.model, recipe.head.kind) == (str(verifier_folder), kind)

    chats = f"data.train=[{tmp_path / 'chat.jsonl'}]"
    results = [headstart("eval", run, "--json", chats, "evaluation.max_new_tokens=12", "evaluation.trees=[{kind: chain, "
                         "depth: 3}]") for run in (folder, back)]  # fmt: skip
    assert [result.code for result in results] == [0, 0], results
    before, after = (json.loads(result.out)["results"][0] for result in results)
    assert before["rounds"] == after["rounds"] > 0
    assert (before["accepted"], before["alpha"]) == (after["accepted"], after["alpha"])


def test_training_goes_on_from_an_imported_head(make_run: Build, verifier_folder: Path, tmp_path: Path) -> None:
    folder, out, back = make_run("eagle3"), tmp_path / "out", tmp_path / "back"
    assert headstart("export", folder, "--to", "vllm", "--output", out).code == 0
    assert headstart("import", out, "--verifier", verifier_folder, "--run-folder", back).code == 0
    recipe = load_recipe(back / "recipe.yaml").model_dump(mode="json")
    recipe["data"] |= {"train": [str(tmp_path / "chat.jsonl")], "answer_tokens": 8}
    recipe["head"] |= {"depth": 2}
    recipe["training"] |= {"steps": 1, "batch_tokens": 100, "learning_rate": 1e-9, "warmup": 0.0}
    recipe["evaluation"] |= {"max_new_tokens": 8}
    (back / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    trained = headstart("train", back / "recipe.yaml", "--run-folder", back)
    assert trained.code == 0, trained.err
    start = load_file(back / "start" / "model.safetensors")
    after = load_file(back / "checkpoints" / "step-1" / "head.safetensors")
    for name, tensor in start.items():
        assert torch.allclose(tensor, after[name], atol=1e-7), name
    assert any(not torch.equal(tensor, after[name]) for name, tensor in start.items())
    assert json.loads((back / "head" / "config.json").read_text())["depth"] == 2  # how it learns may change


@pytest.mark.parametrize(("change", "message"), [
    ({"draft_vocabulary": 40}, "the recipe asks for 40 tokens, the head in .*start drafts 258; the vocabulary .* stays"),
    ({"layers": (1, 2)}, r"head\.layers: \(1, 2\) in the recipe, \(1, 2, 3\) in .*start; it cannot change"),
])  # fmt: skip
def test_case_13_what_an_imported_head_is_made_of_stays(
    change: dict[str, Any], message: str, make_run: Build, verifier_folder: Path, tmp_path: Path
) -> None:
    folder, out, back = make_run("eagle3"), tmp_path / "out", tmp_path / "back"
    assert headstart("export", folder, "--to", "vllm", "--output", out).code == 0
    assert headstart("import", out, "--verifier", verifier_folder, "--run-folder", back).code == 0
    section = load_recipe(back / "recipe.yaml").head.model_copy(update=change)
    with pytest.raises(UserError, match=message):
        start_from(back / "start", section)


def test_a_broken_rule_is_a_line_and_exit_1(make_run: Build, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert headstart("export", make_run("eagle3"), "--to", "vllm", "--output", out).code == 0
    good = headstart("verify-export", out, "--engine", "vllm")
    assert (good.code, good.out) == (0, f"{out}: vllm loads it\n")
    config = json.loads((out / "config.json").read_text())
    del config["head_dim"], config["rope_theta"]
    (out / "config.json").write_text(json.dumps(config))
    bad = headstart("verify-export", out, "--engine", "vllm")
    assert bad.code == 1
    assert [line.split(":")[0] for line in bad.out.splitlines()] == ["head_dim", "rope"]
    as_json = headstart("verify-export", out, "--engine", "vllm", "--json")
    assert as_json.code == 1
    assert json.loads(as_json.out)["ok"] is False


def test_bad_input_is_one_line_and_exit_2(make_run: Build, verifier_folder: Path, tmp_path: Path) -> None:
    folder, out = make_run("eagle3"), tmp_path / "out"
    assert "not a run folder" in refused("export", tmp_path, "--to", "vllm", "--output", out)
    assert "unknown engine" in refused("export", folder, "--to", "ollama", "--output", out)
    assert "give its hub id" in refused("export", folder, "--to", "speculators", "--output", out)
    assert "never by a path" in refused("export", folder, "--to", "vllm", "--output", out, "--verifier", "/models/x")
    assert "cannot be written" in refused("export", folder, "--to", "vllm", "--output", tmp_path / "chat.jsonl" / "out")
    assert not out.exists()
    assert "no such folder" in refused("verify-export", out, "--engine", "vllm")
    assert "config.json is missing" in refused("verify-export", tmp_path, "--engine", "vllm")
    back = tmp_path / "back"
    assert "no such folder" in refused("import", out, "--verifier", verifier_folder, "--run-folder", back)
    assert "no EAGLE-3 head" in refused("import", verifier_folder, "--verifier", verifier_folder, "--run-folder", back)
    assert "not empty" in refused("import", out, "--verifier", verifier_folder, "--run-folder", folder)
    assert not back.exists()
    assert load_head(folder / "head").kind == "eagle3"


def test_an_import_is_whole_or_not_there(
    make_run: Build, verifier_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, back = tmp_path / "out", tmp_path / "imported" / "back"
    assert headstart("export", make_run("eagle3"), "--to", "vllm", "--output", out).code == 0
    arguments = ("import", out, "--verifier", verifier_folder, "--run-folder")
    assert "cannot be written" in refused(*arguments, tmp_path / "chat.jsonl" / "back")
    saved: list[Path] = []

    def full_disk(head: Any, folder: Path) -> None:
        if saved:
            raise OSError(28, "No space left on device")
        saved.append(folder)
        save_head(head, folder)

    monkeypatch.setattr("headstart.shipping.save_head", full_disk)
    assert refused(*arguments, back).endswith("cannot be written: No space left on device")
    assert len(saved) == 1
    assert list(back.parent.iterdir()) == []


def test_a_head_for_another_verifier(make_run: Build, tiny: Build, tmp_path: Path, verifier_folder: Path) -> None:
    folder, out, other = make_run("medusa"), tmp_path / "out", tmp_path / "other"
    assert headstart("export", folder, "--to", "vllm", "--output", out).code == 0
    tiny("llama", vocab_size=300).model.save_pretrained(other)
    for path in verifier_folder.glob("token*"):
        (other / path.name).write_bytes(path.read_bytes())
    told = refused("import", out, "--verifier", other, "--run-folder", tmp_path / "back")
    assert told.endswith("do not fit: the head's vocabulary is 258, the verifier's 300")
    recipe = load_recipe(folder / "recipe.yaml", [f"verifier.model={other}"])
    (folder / "recipe.yaml").write_text(recipe_yaml(recipe), encoding="utf-8")
    assert "do not fit" in refused("verify-export", out, "--engine", "vllm", "--run", folder)
    assert "do not fit" in refused("export", folder, "--to", "vllm", "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()
