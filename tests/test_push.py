"""`headstart push`: the card, what is refused, and what arrives at a local stand-in of the hub."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import yaml
from command import headstart
from hub_stand_in import TOKEN, Hub, running_hub
from safetensors.torch import load
from small_runs import Build

from headstart.card import acceptance_row, share, shown, tau_margin
from headstart.errors import UserError
from headstart.evaluation.run_folder import read_run
from headstart.export.leaks import leaks
from headstart.export.upload import check_repo, upload
from headstart.heads.hub import load_head

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # inside huggingface_hub


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as server:
        hub_says = {"ENDPOINT": server.address, "HF_HUB_OFFLINE": False, "HF_TOKEN_PATH": str(tmp_path / "none"),
                    "HF_HUB_DISABLE_XET": True}  # fmt: skip
        for name, value in hub_says.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture
def trained(make_run: Build, tmp_path: Path) -> Path:
    """A run of two steps, evaluated. Its recipe names a verifier and chats of this machine."""
    folder = tmp_path / "trained"
    done = headstart("train", make_run("medusa") / "recipe.yaml", "--run-folder", folder)
    assert done.code == 0, done.err
    assert headstart("eval", folder).code == 0
    return folder


def pushed(run: Path, *more: object) -> list[object]:
    return ["push", run, "--to", "vllm", "--repo", "you/head", "--verifier", "owner/name", *more]


def test_arrives_private_whole_and_clean(trained: Path, hub: Hub, tmp_path: Path) -> None:
    ended = headstart(*pushed(trained, "--license", "apache-2.0"))
    assert ended.code == 0, ended.err
    assert ended.out.strip() == f"{hub.address}/you/head"
    assert hub.private == {"you/head": True}
    files = {name.removeprefix("you/head/"): content for name, content in hub.files.items()}
    assert set(files) >= {"README.md", "config.json", "model.safetensors", "SERVING.md", "training.png"}
    assert files["training.png"].startswith(b"\x89PNG")
    ours = {name: tensor.sum().item() for name, tensor in load_head(trained / "head").state_dict().items() if "linear" in name}
    theirs = [tensor.sum().item() for tensor in load(files["model.safetensors"]).values()]
    assert ours
    assert set(ours.values()) <= set(theirs)  # names are the layout's, which has tests of its own
    assert json.loads(files["config.json"])["num_heads"] == 3
    card = files["README.md"].decode()
    assert not re.search(re.escape(str(tmp_path)), card)
    front = yaml.safe_load(card.split("---")[1])
    assert front == {
        "license": "apache-2.0",
        "base_model": "owner/name",
        "tags": ["speculative-decoding", "draft-head", "medusa"],
    }
    made = json.loads((trained / "provenance.json").read_text())
    assert made["data"]["samples"] == 4
    for value in (made["verifier"]["fingerprint"], made["template"], made["data"]["sha256"]):
        assert value in card
    result = json.loads((trained / "evaluation.json").read_text())["results"][0]
    (row,) = (line for line in card.splitlines() if line.startswith("| chain"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:4] == [str(result["rounds"]), str(result["emitted"])]
    assert cells[6] == "yes"
    assert "vllm serve owner/name --speculative-config" in card
    recipe = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert recipe["verifier"]["model"] == "owner/name"
    assert recipe["data"]["train"] == ["chat.jsonl"]


def test_a_dry_run_shows_the_folder_and_asks_no_hub(trained: Path, hub: Hub) -> None:
    ended = headstart(*pushed(trained, "--dry-run"))
    assert ended.code == 0, ended.err
    assert not hub.seen
    names = [line.split()[1] for line in ended.out.splitlines()[:5]]
    assert names == ["README.md", "SERVING.md", "config.json", "model.safetensors", "training.png"]
    assert "# Medusa draft head for owner/name" in ended.out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "folder"
    target.mkdir()
    (target / "model.safetensors").write_bytes(bytes(1000))
    (target / "config.json").write_text("{}")
    return target


def test_a_second_push_sends_only_what_is_missing(folder: Path, hub: Hub) -> None:
    hub.fail["PUT"] = 9
    with pytest.raises(UserError, match=r"you/head: Error while uploading 'model.safetensors'.*; run it again to go on"):
        upload(folder, "you/head", "first")
    hub.fail["PUT"], hub.seen["PUT"] = 0, 0
    hub.fail["commit"] = 1
    with pytest.raises(UserError, match=r"you/head: the hub answered 500: planted.*; run it again to go on"):
        upload(folder, "you/head", "first")
    assert (hub.seen["PUT"], hub.files) == (1, {})  # nothing is visible before the commit
    upload(folder, "you/head", "second")
    assert hub.seen["PUT"] == 1
    assert hub.files["you/head/model.safetensors"] == bytes(1000)


def test_a_public_repository_is_written_only_when_asked(folder: Path, hub: Hub) -> None:
    hub.private["you/head"] = False
    with pytest.raises(UserError, match="you/head is public already; say --public"):
        upload(folder, "you/head", "m")
    assert not hub.files
    upload(folder, "you/head", "m", public=True)
    upload(folder, "you/new", "m", public=True)
    assert hub.private["you/new"] is False


def test_tokens_networks_and_names(folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.writable = False
    with pytest.raises(UserError, match="you/head: your token may not write there"):
        upload(folder, "you/head", "m")
    for token in ("a-wrong-token", None):
        monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(UserError, match="you/head: the hub does not know your token; set HF_TOKEN"):
            upload(folder, "you/head", "m")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"you/head: http://127.0.0.1:9 cannot be reached \(ConnectError\); run it again"):
        upload(folder, "you/head", "m")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        upload(folder, "you/head", "m")
    for name in ("head", "you/head/more", "you/he ad", "you/-head"):
        with pytest.raises(UserError, match=f"--repo {name}: "):
            check_repo(name)


@pytest.mark.parametrize(("text", "told"), [
    ("token: hf_" + "a" * 34, "a Hugging Face token"), ("sk-" + "b" * 40, "an OpenAI-style key"),
    ("ghp_" + "c" * 36, "a GitHub token"), ("AKIA" + "D" * 16, "an AWS key"),
    ("-----BEGIN RSA PRIVATE KEY-----", "a private key"), ("https://me:secret@host/x", "a password in a URL"),
    ("from /home/me/chats.jsonl on", "/home/me/chats.jsonl"), ("see ~/runs/x", "~/runs/x"),
    ("C:\\Users\\me\\x", "C:\\Users\\me\\x"),
    ('"/mnt/disk/model"', "/mnt/disk/model"),
])  # fmt: skip
def test_leaks_are_named(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"a line\n{text}\n")
    (line,) = leaks(tmp_path)
    assert line.startswith("README.md:2 ")
    assert told in line
    if "secret" in text or "token:" in text:
        assert text not in line


@pytest.mark.parametrize("text", [
    "https://huggingface.co/owner/data/tree", "owner/tmp/x", "0.5/home", "HF_TOKEN", "skip-this-and-that-and-much-more-text",
    "and/or", "a ~ b", "layers: [2, 15, 27]",
])  # fmt: skip
def test_ordinary_text_is_no_leak(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert list(leaks(tmp_path)) == []


def test_a_secret_in_the_recipe_stops_the_push(trained: Path, hub: Hub) -> None:
    recipe = (trained / "recipe.yaml").read_text()
    (trained / "recipe.yaml").write_text(f"# my token: hf_{'a' * 34}\n" + recipe)
    assert headstart(*pushed(trained, "--dry-run")).code == 0  # comments do not travel
    ended = headstart(*pushed(trained, "--license", "hf_" + "a" * 34))
    assert ended.code == 2
    assert "README.md:2 holds what looks like a Hugging Face token" in ended.err
    assert not hub.seen


def test_runs_that_cannot_be_published(trained: Path, hub: Hub) -> None:
    def refused(*arguments: object) -> str:
        ended = headstart(*arguments)
        assert ended.code == 2, ended
        return ended.err.splitlines()[-1].removeprefix("error: ")

    assert "give its hub id" in refused("push", trained, "--to", "vllm", "--repo", "you/head")
    assert "unknown engine" in refused("push", trained, "--to", "vlm", "--repo", "you/head", "--verifier", "o/n")
    assert "EAGLE" in refused("push", trained, "--to", "speculators", "--repo", "you/head", "--verifier", "o/n")
    (trained / "provenance.json").unlink()
    assert "provenance.json is missing" in refused(*pushed(trained))
    (trained / "evaluation.json").unlink()
    assert "`headstart eval` writes it" in refused(*pushed(trained))
    assert not hub.seen


def test_intervals() -> None:
    # Wilson, 31 of 100, z = 1.959964: centre (0.31 + z²/200) / (1 + z²/100), by hand 0.2279 .. 0.4062
    assert share(31, 100) == "0.31 (0.23 to 0.41)"
    # accepted 0, 0, 1, 3: mean 1, sample variance 2, standard error sqrt(2 / 4)
    assert tau_margin([2, 1, 0, 1]) == pytest.approx(1.959964 * math.sqrt(2 / 4), abs=1e-5)


def test_paths_become_names(tmp_path: Path) -> None:
    assert shown({"a": [str(tmp_path / "x.jsonl"), "owner/name"], "b": 1}) == {"a": ["x.jsonl", "owner/name"], "b": 1}


def test_a_row_says_what_was_counted(trained: Path) -> None:
    (result,) = read_run(trained).evaluation.results
    row = acceptance_row(result)
    assert row["tau"].startswith(f"{result.tau:.3f} ± ")
    assert row["survival"].count("to") == 3
