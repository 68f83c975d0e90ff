"""Heads as folders: bit-identical there and back, and one line for everything that can be wrong with one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.errors import UserError
from headstart.heads.base import DraftHead
from headstart.heads.hub import load_head, save_head

Build = Callable[..., Any]


@pytest.fixture
def heads(tiny: Build, tiny_medusa: Build, tiny_eagle3: Build) -> dict[str, DraftHead]:
    llama, scaled = tiny("llama"), tiny("llama3rope")
    some = torch.tensor([3, 7, 8, 95])
    return {
        "medusa": tiny_medusa(llama),
        "medusa, shared": tiny_medusa(llama, lm_head="shared", targets="soft", blocks=2, target_ids=some),
        "eagle3": tiny_eagle3(scaled),
        "eagle3.1": tiny_eagle3(llama, fc_norm=True, norm_output=True),
        "eagle3, whole": tiny_eagle3(tiny("gpt2"), target_ids=torch.arange(96), layers=(1, 3)),
    }


@pytest.fixture
def folder(heads: dict[str, DraftHead], tmp_path: Path) -> Path:
    save_head(heads["eagle3"], tmp_path / "head")
    return tmp_path / "head"


@pytest.mark.parametrize("name", ["medusa", "medusa, shared", "eagle3", "eagle3.1", "eagle3, whole"])
def test_a_head_comes_back_bit_identical(name: str, heads: dict[str, DraftHead], tmp_path: Path) -> None:
    head = heads[name]
    save_head(head, tmp_path / "deep" / "head")
    loaded = load_head(tmp_path / "deep" / "head")
    assert type(loaded) is type(head)
    assert loaded.config == head.config
    assert not loaded.training
    ours, theirs = head.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype
        assert torch.equal(tensor, theirs[key]), key
    assert loaded.target_ids.tolist() == head.target_ids.tolist()
    assert sorted(path.name for path in (tmp_path / "deep" / "head").iterdir()) == ["config.json", "model.safetensors"]


def test_a_loaded_head_drafts_the_same(
    heads: dict[str, DraftHead], folder: Path, tiny: Build, batch_of: Build, features_of: Build, ids_of: Build
) -> None:
    verifier = tiny("llama3rope")
    batch = batch_of([ids_of(1, 9)], [[(2, 9)]])
    features = features_of(verifier, batch, (1, 2, 3))
    drafts = [head.first_draft(batch, features, verifier, batch.mask) for head in (heads["eagle3"], load_head(folder))]
    assert torch.equal(*drafts)


def test_saving_again_replaces_the_folder_and_leaves_nothing_beside_it(heads: dict[str, DraftHead], folder: Path) -> None:
    (folder / "stale.txt").write_text("old")
    save_head(heads["medusa"], folder)
    assert load_head(folder).kind == "medusa"
    assert [path.name for path in folder.parent.iterdir()] == ["head"]
    assert not (folder / "stale.txt").exists()


def test_a_failing_write_leaves_the_old_head(
    heads: dict[str, DraftHead], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headstart.heads.hub.save_file", no_space)
    with pytest.raises(UserError, match=r"head: cannot be written: No space left on device$"):
        save_head(heads["medusa"], folder)
    assert load_head(folder).kind == "eagle3"
    assert [path.name for path in folder.parent.iterdir()] == ["head"]


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    config = {key: value for key, value in config.items() if value != "gone"}
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda f: f.rename(f.with_name("moved")), r"not a draft head: config\.json is missing"),
    "no config": (lambda f: (f / "config.json").unlink(), r"not a draft head: config\.json is missing"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"not a draft head: model\.safetensors is missing"),
    "truncated weights": (truncate, "not a readable draft head"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "not a readable draft head"),
    "no JSON": (lambda f: (f / "config.json").write_text("{ kind"), "not a readable draft head"),
    "JSON of another shape": (lambda f: (f / "config.json").write_text("[1]"), r"config\.json must be a JSON object"),
    "unknown kind": (lambda f: edit_config(f, kind="eagle9"), "head kind 'eagle9' is unknown; known kinds: eagle1, eagle3,"),
    "no kind": (lambda f: edit_config(f, kind="gone"), "head kind None is unknown"),
    "missing field": (lambda f: edit_config(f, depth="gone"), "depth"),
    "unknown field": (lambda f: edit_config(f, width=3), "width"),
    "wrong value": (lambda f: edit_config(f, head_dim="wide"), "head_dim"),
    "unknown tensor": (lambda f: edit_tensors(f, extra=torch.ones(2)), r"model\.safetensors: tensor extra is unknown"),
    "missing tensor": (lambda f: edit_tensors(f, fc__weight=None), r"tensor fc\.weight is missing"),
    "NaN": (lambda f: edit_tensors(f, fc__weight=torch.full((32, 96), float("nan"))), r"tensor fc\.weight holds NaN or inf"),
    "infinity": (lambda f: edit_tensors(f, fc__weight=torch.full((32, 96), -float("inf"))), r"tensor fc\.weight holds NaN or"),
    "wrong shape": (lambda f: edit_tensors(f, fc__weight=torch.ones(32, 64)),
                    r"tensor fc\.weight is \[32, 64\], the config says \[32, 96\]"),
    "ids of another vocabulary": (lambda f: edit_tensors(f, target_ids=torch.arange(50, 98)),
                                  r"target_ids are from 50 to 97, of a vocabulary of 96"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_head_is_refused_in_one_line_that_names_the_fault(name: str, folder: Path) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_head(folder)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(folder))


def test_case_10_a_pruned_head_keeps_its_own_rows_under_a_tied_verifier(
    tiny: Build, tiny_eagle3: Build, tmp_path: Path
) -> None:
    verifier = tiny("llama", tie_word_embeddings=True)
    head = tiny_eagle3(verifier, target_ids=torch.arange(0, 96, 4))
    head.initialise(verifier)
    save_head(head, tmp_path / "head")
    loaded = load_head(tmp_path / "head")
    assert loaded.lm_head.weight.shape == (24, 32)
    assert torch.equal(loaded.lm_head.weight, verifier.lm_head.weight[::4])
