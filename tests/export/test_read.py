"""Published heads read back: bit-identical round trips, what others leave out, and what is refused."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.errors import UserError
from headstart.export.read import read_head
from headstart.heads.base import DraftHead

Build = Callable[..., Any]
SOME = torch.tensor([3, 7, 8, 20, 95])


def same(ours: DraftHead, theirs: DraftHead) -> None:
    a, b = ours.state_dict(), theirs.state_dict()
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("ids", [None, SOME, torch.arange(96)])
@pytest.mark.parametrize(("engine", "layers"), [
    ("vllm", (2, 4, 5)), ("vllm", (1, 3, 6)), ("sglang", (2, 4, 5)), ("sglang", (1, 3, 6)), ("speculators", (1, 3, 6)),
    ("eagle", (2, 4, 5)), ("tensorrt-llm", (2, 4, 5)),
])  # fmt: skip
def test_an_eagle3_round_trip_is_bit_identical(
    engine: str, layers: tuple[int, ...], ids: torch.Tensor | None, tiny: Build, tiny_eagle3: Build, export_to: Build
) -> None:
    verifier = tiny("qwen3", num_hidden_layers=8)
    head = tiny_eagle3(verifier, target_ids=ids, layers=layers)
    head.input_scale.fill_(1.0)  # a scale that is not one is folded into fc, and rounds once
    loaded = read_head(export_to(engine, head, verifier), verifier, engine)
    same(head, loaded)
    known = {"depth": loaded.config.depth} if engine != "speculators" else {}  # no other layout tells the depth
    assert loaded.config == head.config.model_copy(update=known)
    assert not loaded.training


def test_exporting_what_was_imported_writes_the_same_bytes(tiny: Build, tiny_eagle3: Build, export_to: Build) -> None:
    """Also where the first export rounded: the folded scale, and bfloat16."""
    verifier = tiny("llama3rope")
    head = tiny_eagle3(verifier)
    first = export_to("vllm", head, verifier, dtype=torch.bfloat16)
    again = export_to("vllm", read_head(first, verifier, "vllm"), verifier, dtype=torch.bfloat16, folder="again")
    for name in ("config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (again / name).read_bytes()


@pytest.mark.parametrize("family", ["gemma", "granite"])
def test_a_scaled_table_that_is_the_verifiers_is_taken_from_it(
    family: str, tiny: Build, tiny_eagle3: Build, export_to: Build
) -> None:
    verifier = tiny(family)
    head = tiny_eagle3(verifier)
    head.input_scale.fill_(1.0)
    same(head, read_head(export_to("vllm", head, verifier), verifier, "vllm"))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "eagle"])
def test_an_eagle1_round_trip_is_bit_identical(engine: str, tiny: Build, tiny_eagle1: Build, export_to: Build) -> None:
    verifier = tiny("qwen3")
    head = tiny_eagle1(verifier, target_ids=torch.arange(96))
    loaded = read_head(export_to(engine, head, verifier), verifier, "vllm")
    same(head, loaded)
    training = ("depth", "decay", "cross_entropy", "top_tokens", "noise", "noise_by_length")  # no layout tells them
    assert loaded.config == head.config.model_copy(update={name: getattr(loaded.config, name) for name in training})


@pytest.mark.parametrize(("fields", "tensors", "message"), [
    ({}, {"fc.bias": torch.ones(32)}, "its fc has a bias; heads here, and vLLM, have none"),
    ({}, {"layers.0.input_layernorm.weight": torch.ones(32)}, r"tensor layers\.0\.input_layernorm\.weight is unknown"),
    ({}, {"layers.0.mlp.up_proj.weight": None}, r"tensor layers\.0\.mlp\.up_proj\.weight is missing"),
    ({"rms_norm_eps": None}, {}, r"no EAGLE-1 head: config\.json has no rms_norm_eps"),
    ({"vocab_size": 95}, {}, "the head's vocabulary is 95, the verifier's 96"),
])  # fmt: skip
def test_damaged_eagle1_folders(
    fields: dict[str, Any],
    tensors: dict[str, Any],
    message: str,
    tiny: Build,
    tiny_eagle1: Build,
    export_to: Build,
    edit: Build,
) -> None:
    verifier = tiny("llama")
    folder = export_to("vllm", tiny_eagle1(verifier), verifier)
    edit(folder, fields, tensors)
    with pytest.raises(UserError, match=message):
        read_head(folder, verifier, "vllm")


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("ids", [None, SOME])
def test_a_medusa_round_trip_is_bit_identical(
    ids: torch.Tensor | None, lm_head: str, tiny: Build, tiny_medusa: Build, export_to: Build
) -> None:
    verifier = tiny("granite")
    head = tiny_medusa(verifier, lm_head=lm_head, blocks=2, target_ids=ids)
    loaded = read_head(export_to("vllm", head, verifier), verifier, "vllm")
    same(head, loaded)
    assert loaded.config == head.config


def test_an_original_medusa_round_trip(tiny: Build, tiny_medusa: Build, export_to: Build) -> None:
    verifier = tiny("llama")
    own, shared = tiny_medusa(verifier, blocks=2), tiny_medusa(verifier, lm_head="shared")
    same(own, read_head(export_to("medusa", own, verifier), verifier, "vllm"))
    loaded = read_head(export_to("medusa", shared, verifier), verifier, "vllm")
    assert loaded.config.lm_head == "own"  # the layout has one a head
    assert torch.equal(loaded.lm_heads[2].weight, verifier.model.get_output_embeddings().weight)
    assert torch.equal(loaded.blocks[1][0].linear.weight, shared.blocks[1][0].linear.weight)


def test_a_folder_as_others_write_it(tiny: Build, tiny_eagle3: Build, export_to: Build) -> None:
    """Older fields only, no head_dim, bfloat16, `model.` before the names, the verifier's table inside."""
    verifier = tiny("llama3rope", num_hidden_layers=8)
    head = tiny_eagle3(verifier, layers=(2, 4, 5))
    folder = export_to("vllm", head, verifier, dtype=torch.bfloat16)
    expected = read_head(folder, verifier, "vllm")
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    for name in ("head_dim", "dtype", "norm_before_residual", "attention_bias"):
        del config[name]
    config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")  # its name of old
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name if name.startswith(("lm_head", "d2t", "t2d")) else f"model.{name}": tensor
               for name, tensor in load_file(folder / "model.safetensors").items()}  # fmt: skip
    tensors["model.embed_tokens.weight"] = verifier.model.get_input_embeddings().weight.bfloat16()
    save_file(tensors, folder / "model.safetensors")
    loaded = read_head(folder, verifier, "vllm")
    same(expected, loaded)
    assert loaded.config == expected.config
    assert loaded.config.rope_parameters == rope
    assert loaded.lm_head.weight.dtype == torch.float32


def test_case_07_sglangs_layer_indices(tiny: Build, tiny_eagle3: Build, export_to: Build) -> None:
    verifier = tiny("llama", num_hidden_layers=8)
    folder = export_to("sglang", tiny_eagle3(verifier, layers=(1, 3, 6)), verifier)
    assert read_head(folder, verifier, "sglang").needs == (1, 3, 6)
    folder = export_to("vllm", tiny_eagle3(verifier, layers=(1, 3, 6)), verifier)
    assert read_head(folder, verifier, "vllm").needs == (1, 3, 6)
    assert read_head(folder, verifier, "sglang").needs == (2, 4, 7)  # vLLM's indices read as SGLang means them


def test_a_whole_vocabulary_needs_no_d2t(tiny: Build, tiny_eagle3: Build, export_to: Build, edit: Build) -> None:
    verifier = tiny("llama")
    folder = export_to("vllm", tiny_eagle3(verifier, target_ids=torch.arange(96)), verifier)
    edit(folder, {}, {"d2t": None, "t2d": None})
    assert read_head(folder, verifier, "vllm").target_ids.tolist() == list(range(96))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "the normed residual": ({"norm_before_residual": True}, {}, r"norm_before_residual\); heads here keep the one before"),
    "a norm before fc": ({"norm_before_fc": True}, {}, "norm_before_fc is true; no published head with such a part"),
    "two layers": ({"num_hidden_layers": 2}, {}, "has 2 layers; heads here have one"),
    "another width": ({"target_hidden_size": 64}, {}, "its hidden size differs from the verifier's"),
    "no field": ({"rms_norm_eps": None}, {}, r"no EAGLE-3 head: config\.json has no rms_norm_eps"),
    "no lm_head": ({}, {"lm_head.weight": None}, r"no EAGLE-3 head: tensor lm_head\.weight is missing"),
    "a bias": ({}, {"fc.bias": torch.zeros(32)}, r"tensor fc\.bias is unknown"),
    "no d2t": ({}, {"d2t": None}, "drafts 48 of 96 tokens, but tensor d2t, which says which, is missing"),
    "ids in d2t": ({}, {"d2t": torch.arange(48) * 2}, "d2t holds offsets, not ids"),
    "another shape": ({}, {"norm.weight": torch.ones(31)}, r"tensor norm\.weight is \[31\], config\.json says \[32\]"),
    "a table of its own": ({}, {"embed_tokens.weight": torch.zeros(96, 32)}, "its embedding table is not the verifier's"),
    "layers beyond": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}, r"the states entering \[1, 2, 9\]"),
    "another verifier": ({"vocab_size": 95}, {"d2t": None, "t2d": None, "lm_head.weight": torch.ones(95, 32)},
                         "the head's vocabulary is 95, the verifier's 96|drafts 48"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_heads_here_cannot_be_is_refused(
    name: str, tiny: Build, tiny_eagle3: Build, export_to: Build, edit: Build
) -> None:
    fields, tensors, message = REFUSED[name]
    verifier = tiny("llama")
    folder = export_to("vllm", tiny_eagle3(verifier), verifier)
    if name == "another verifier":
        fields = fields | {"draft_vocab_size": 95}
    edit(folder, fields, tensors)
    with pytest.raises(UserError, match=message) as caught:
        read_head(folder, verifier, "vllm")
    assert "\n" not in str(caught.value)


def test_a_speculators_folder_that_is_silent_about_its_residual(
    tiny: Build, tiny_eagle3: Build, export_to: Build, edit: Build
) -> None:
    verifier = tiny("llama")
    folder = export_to("speculators", tiny_eagle3(verifier), verifier)
    edit(folder, {"norm_before_residual": None})
    with pytest.raises(UserError, match="norm_before_residual"):
        read_head(folder, verifier, "vllm")


@pytest.mark.parametrize(("fields", "tensors", "message"), [
    ({"num_heads": 4}, {}, r"names: tensor blocks\.3\.layers\.0\.bias is missing"),
    ({"medusa_fc_bias": None}, {}, r"names: tensor blocks\.0\.layers\.0\.bias is dropped"),
    ({"vocab_size": 95, "truncated_vocab_size": 95}, {f"lm_heads.{h}.weight": torch.ones(95, 32) for h in range(3)},
     "the head's vocabulary is 95, the verifier's 96"),
])  # fmt: skip
def test_damaged_medusa_folders(
    fields: dict[str, Any],
    tensors: dict[str, Any],
    message: str,
    tiny: Build,
    tiny_medusa: Build,
    export_to: Build,
    edit: Build,
) -> None:
    verifier = tiny("llama")
    folder = export_to("vllm", tiny_medusa(verifier), verifier)
    edit(folder, fields, tensors)
    with pytest.raises(UserError, match=message):
        read_head(folder, verifier, "vllm")


def as_pickle(folder: Path, content: Any = None) -> Path:
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors if content is None else content, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_pickles_are_read_only_when_allowed(tiny: Build, tiny_eagle3: Build, export_to: Build) -> None:
    verifier = tiny("llama")
    head = tiny_eagle3(verifier)
    head.input_scale.fill_(1.0)
    folder = as_pickle(export_to("vllm", head, verifier))
    with pytest.raises(UserError, match=r"pytorch_model\.bin: a pickle can run code; .*--allow-pickle"):
        read_head(folder, verifier, "vllm")
    same(head, read_head(folder, verifier, "vllm", allow_pickle=True))


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import pathlib; pathlib.Path('ran').write_text('x')",))


def test_a_hostile_pickle_runs_nothing(
    tiny: Build, tiny_eagle3: Build, export_to: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    verifier = tiny("llama")
    folder = export_to("vllm", tiny_eagle3(verifier), verifier)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Hostile()}))
    with pytest.raises(UserError, match="not loadable as weights alone"):
        read_head(folder, verifier, "vllm", allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_of_something_else(tiny: Build, tiny_eagle3: Build, export_to: Build) -> None:
    verifier = tiny("llama")
    folder = as_pickle(export_to("vllm", tiny_eagle3(verifier), verifier), {"model": {"fc.weight": torch.ones(2)}})
    with pytest.raises(UserError, match="holds something else than named tensors"):
        read_head(folder, verifier, "vllm", allow_pickle=True)
