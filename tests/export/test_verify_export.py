"""`verify`: good folders pass, and every planted fault is named by the rule it breaks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headstart.errors import UserError
from headstart.export.verify import verify

Build = Callable[..., Any]
SOME = torch.tensor([3, 7, 8, 20, 95])
KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def folder(tiny: Build, tiny_eagle3: Build, tiny_medusa: Build, export_to: Build) -> Callable[[str, str], Path]:
    """`folder(engine, kind)`: a good export for a verifier of eight layers."""

    def make(engine: str, kind: str) -> Path:
        verifier = tiny("llama3rope", num_hidden_layers=8)
        if kind == "eagle3":
            return export_to(engine, tiny_eagle3(verifier, target_ids=SOME, layers=(2, 4, 5)), verifier)
        return export_to(engine, tiny_medusa(verifier, target_ids=SOME if kind == "pruned" else None), verifier)

    return make


GOOD = [("vllm", (1, 3, 6)), ("sglang", (1, 3, 6)), ("speculators", (1, 3, 6)), ("vllm", (2, 4, 5)), ("sglang", (2, 4, 5)),
        ("eagle", (2, 4, 5)), ("tensorrt-llm", (2, 4, 5))]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("engine", "layers"), GOOD)
def test_our_own_export_passes_and_drafts_as_the_head(
    engine: str, layers: tuple[int, ...], dtype: torch.dtype, tiny: Build, tiny_eagle3: Build, export_to: Build
) -> None:
    verifier = tiny("llama3rope", num_hidden_layers=8)
    head = tiny_eagle3(verifier, layers=layers)
    verdict = verify(export_to(engine, head, verifier, dtype=dtype), engine, head, verifier)
    assert verdict.broken == []
    assert verdict.difference is not None
    assert verdict.difference < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("family", ["gemma", "granite", "gpt2", "qwen3", "stablelm"])
def test_exports_for_other_families_pass(family: str, tiny: Build, tiny_eagle3: Build, export_to: Build) -> None:
    verifier = tiny(family, num_hidden_layers=8)
    head = tiny_eagle3(verifier, layers=(1, 3, 6))
    assert verify(export_to("vllm", head, verifier), "vllm", head, verifier).broken == []


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize(("engine", "ids"), [("vllm", None), ("vllm", SOME), ("medusa", None)])
def test_our_own_medusa_export_passes(
    engine: str, ids: torch.Tensor | None, lm_head: str, tiny: Build, tiny_medusa: Build, export_to: Build
) -> None:
    verifier = tiny("granite")
    head = tiny_medusa(verifier, lm_head=lm_head, target_ids=ids)
    verdict = verify(export_to(engine, head, verifier), engine, head, verifier)
    assert verdict.broken == []
    assert verdict.difference is not None
    assert verdict.difference < 1e-5


@pytest.mark.parametrize("family", ["llama3rope", "gemma", "granite", "qwen3"])
@pytest.mark.parametrize("engine", ["vllm", "eagle", "sglang"])
def test_our_own_eagle1_export_passes(engine: str, family: str, tiny: Build, tiny_eagle1: Build, export_to: Build) -> None:
    verifier = tiny(family)
    head = tiny_eagle1(verifier)
    if engine == "sglang" and family in ("gemma", "granite"):
        with pytest.raises(UserError, match="scales it; nearest alternative: --to vllm"):
            export_to(engine, head, verifier)
        return
    verdict = verify(export_to(engine, head, verifier), engine, head, verifier)
    assert verdict.broken == []
    assert verdict.difference is not None
    assert verdict.difference < 1e-3


# engine, fields to change (None deletes, "null" writes null), tensors to change (None deletes), the rule that names it
Fault = tuple[str, dict[str, Any], dict[str, Callable[[torch.Tensor], torch.Tensor] | None], str]
EAGLE3: dict[str, Fault] = {
    "another class": ("vllm", {"architectures": ["LlamaForCausalLM"]}, {}, r"architectures: \['LlamaForCausalLM'\]"),
    "two layers": ("sglang", {"num_hidden_layers": 2}, {}, "layers: num_hidden_layers is 2"),
    "a tensor is missing": ("vllm", {}, {"midlayer.mlp.up_proj.weight": None}, r"names: .*mlp\.up_proj\.weight is missing"),
    "a bias of fc": ("vllm", {}, {"fc.bias": lambda t: torch.zeros(32)}, r"names: tensor fc\.bias is unknown"),
    "a prefix": ("vllm", {}, {"model.norm.weight": lambda t: torch.ones(32), "norm.weight": None},
                 r"names: tensor norm\.weight is missing"),
    "a short lm_head": ("vllm", {}, {"lm_head.weight": lambda t: t[:4]}, r"shapes: lm_head\.weight is \[4, 32\], .* \[5, 32\]"),
    "fc of two states": ("sglang", {}, {"fc.weight": lambda t: t[:, :64]}, r"shapes: fc\.weight is \[32, 64\]"),
    "another head size": ("vllm", {"head_dim": 16}, {}, r"shapes: midlayer\.self_attn\.\w_proj\.weight"),
    "no head size": ("vllm", {"head_dim": None}, {}, "head_dim: must be explicit"),
    "no size": ("vllm", {"intermediate_size": None}, {}, "fields: intermediate_size missing"),
    "no draft vocabulary": ("vllm", {"draft_vocab_size": None}, {}, "vocabulary: draft_vocab_size is missing"),
    "no d2t": ("vllm", {}, {"d2t": None}, "d2t: missing, and then the first"),
    "ids in d2t": ("vllm", {}, {"d2t": lambda t: SOME}, "d2t: .* d2t holds offsets, not ids"),
    "ids in d2t that stay inside": ("sglang", {}, {"d2t": lambda t: torch.tensor([3, 7, 8, 20, 40])}, "t2d: .* offsets"),
    "d2t in int32": ("vllm", {}, {"d2t": lambda t: t.int()}, r"d2t: is torch\.int32 \[5\]"),
    "d2t twice the same": ("vllm", {}, {"d2t": lambda t: torch.tensor([3, 2, 6, 17, 91])}, "d2t: .* must be distinct"),
    "no t2d": ("vllm", {}, {"t2d": None}, "t2d: missing"),
    "t2d in int64": ("vllm", {}, {"t2d": lambda t: t.long()}, r"t2d: is torch\.int64"),
    "a tied lm_head": ("sglang", {"tie_word_embeddings": True}, {}, "tie: "),
    "tie left open": ("vllm", {"tie_word_embeddings": None}, {}, "tie: "),
    "no modern rope": ("vllm", {"rope_parameters": None}, {}, "rope: rope_parameters is missing"),
    "no legacy rope": ("vllm", {"rope_theta": None}, {}, "rope: rope_theta is missing"),
    "two thetas": ("vllm", {"rope_theta": 5e5}, {}, "rope: .* differ in rope_theta"),
    "lost scaling": ("vllm", {"rope_scaling": "null"}, {}, "rope: .* differ in factor, "),
    "a partial rotation": ("vllm", {"partial_rotary_factor": 0.5}, {}, r"rope: partial_rotary_factor 0\.5"),
    "no positions": ("vllm", {"max_position_embeddings": None}, {}, "positions: "),
    "biased attention": ("vllm", {"attention_bias": True}, {}, "bias: attention_bias"),
    "another activation": ("vllm", {"hidden_act": "gelu"}, {}, "activation: "),
    "a norm before fc": ("sglang", {"norm_before_fc": True}, {}, "flags: norm_before_fc"),
    "a residual that SGLang ignores": ("sglang", {"norm_before_residual": True}, {}, "residual: .* sglang ignores it"),
    "a residual left open": ("speculators", {"norm_before_residual": None}, {}, "residual: .* vLLM takes it as true"),
    "a null target": ("vllm", {"target_hidden_size": "null"}, {}, "target: target_hidden_size is null"),
    "layers out of order": ("vllm", {KEY: [4, 2, 5]}, {}, r"layer ids: \[4, 2, 5\] must be distinct"),
    "a layer twice": ("vllm", {KEY: [2, 2, 5]}, {}, r"layer ids: \[2, 2, 5\] must be distinct"),
    "two layer ids": ("vllm", {KEY: [2, 5]}, {}, "layer ids: 2 of them, fc reads 3"),
    "layer ids that EAGLE ignores": ("eagle", {KEY: [1, 3, 6]}, {}, "layer ids: eagle ignores them"),
    "the embeddings of layer 0": ("vllm", {KEY: [0, 3, 6]}, {}, "layer ids: .* begins before"),
    "a table that SGLang ignores": ("sglang", {}, {"embed_tokens.weight": lambda t: torch.ones(96, 32)},
                                    r"names: embed_tokens\.weight is ignored"),
    "no speculators version": ("speculators", {"speculators_version": None}, {}, "speculators: speculators_version"),
    "another speculators type": ("speculators", {"speculators_model_type": "medusa"}, {}, "speculators: .* must be 'eagle3'"),
    "another layer type": ("speculators", {"transformer_layer_config.model_type": "gpt2"}, {}, "speculators: .* llama or"),
    "no proposal": ("speculators", {"speculators_config.proposal_methods": []}, {}, "speculators: speculators_config needs"),
    "no verifier": ("speculators", {"speculators_config.verifier.name_or_path": None}, {}, "speculators: .* a verifier"),
    "NaN": ("vllm", {}, {"norm.weight": lambda t: t * float("nan")}, r"tensors: norm\.weight holds NaN"),
    "an empty tensor (C45)": ("vllm", {}, {"lm_head.weight": lambda t: t[:0]}, r"tensors: lm_head\.weight is empty"),
    "another dtype": ("vllm", {"dtype": "bfloat16"}, {}, "dtype: config.json says bfloat16, the tensors are float32"),
    "no dtype": ("vllm", {"dtype": None}, {}, "dtype: config.json says None"),
    "a local path": ("speculators", {"speculators_config.verifier.name_or_path": "/home/me/model"}, {}, "paths: specul"),
    "an empty auto_map": ("vllm", {"auto_map": {"": "x"}}, {}, "auto_map: "),
}  # fmt: skip


@pytest.mark.parametrize("name", EAGLE3)
def test_a_planted_fault_is_named(name: str, folder: Build, edit: Build) -> None:
    engine, fields, tensors, rule = EAGLE3[name]
    path = folder(engine, "eagle3")
    assert verify(path, engine).broken == []
    held = load_file(path / "model.safetensors")
    edit(path, fields, {n: None if change is None else change(held.get(n)) for n, change in tensors.items()})
    broken = verify(path, engine).broken
    assert any(matches(rule, line) for line in broken), broken
    assert not any("\n" in line for line in broken)


def matches(rule: str, line: str) -> bool:
    import re

    return re.match(rule, line) is not None


FIVE: dict[str, Any] = {f"lm_heads.{h}.weight": lambda t: t[SOME] for h in range(3)}  # rows as a token_map names them
MEDUSA: dict[str, Fault] = {
    "another type": ("vllm", {"model_type": "eagle"}, {}, "model_type: 'eagle'"),
    "another class": ("vllm", {"architectures": ["Medusa"]}, {}, "architectures: "),
    "no vocabulary size": ("vllm", {"vocab_size": None}, {}, "fields: vocab_size is missing, and then 32001"),
    "no hidden size": ("vllm", {"hidden_size": None}, {}, "fields: hidden_size is missing, and then 4096"),
    "biases dropped": ("vllm", {"medusa_fc_bias": None}, {}, r"names: .*\.bias is dropped .* is not true"),
    "heads counted elsewhere": ("vllm", {"num_key_value_heads": 8}, {}, "counts: num_key_value_heads would be read"),
    "too many heads": ("vllm", {"num_heads": 4}, {}, r"names: tensor blocks\.3\.layers\.0\.weight is missing"),
    "a head unread": ("vllm", {"num_heads": 2}, {}, r"names: tensor blocks\.2\.layers\.0\.\w+ is dropped"),
    "shared, said": ("vllm", {"original_lm_head": True}, {}, r"names: tensor lm_heads\.1\.weight is dropped"),
    "a stranger": ("vllm", {}, {"extra": lambda t: torch.ones(2)}, "names: tensor extra is dropped"),
    "a short head": ("vllm", {}, {"lm_heads.1.weight": lambda t: t[:3]}, r"shapes: lm_heads\.1\.weight"),
    "no token map": ("vllm", {"truncated_vocab_size": 5}, FIVE, "token_map: missing, truncated_vocab_size is 5 of 96"),
    "a map beyond": ("vllm", {"truncated_vocab_size": 5}, FIVE | {"token_map": lambda t: SOME + 10},
                     "token_map: must be distinct ids below 96"),
    "a map in int32": ("vllm", {"truncated_vocab_size": 5}, FIVE | {"token_map": lambda t: SOME.int()},
                       r"token_map: is torch\.int32"),
    "a good map": ("vllm", {"truncated_vocab_size": 5}, FIVE | {"token_map": lambda t: SOME},
                   r"loading: .*weights were not initialized"),
    "a map unread": ("vllm", {}, {"token_map": lambda t: SOME}, "token_map: ignored"),
}  # fmt: skip


@pytest.mark.parametrize("name", MEDUSA)
def test_case_48_a_planted_fault_in_a_medusa_folder_is_named(name: str, folder: Build, edit: Build) -> None:
    engine, fields, tensors, rule = MEDUSA[name]
    path = folder(engine, "pruned")
    assert verify(path, engine).broken == []
    held = load_file(path / "model.safetensors")
    if name == "another type":
        edit(path, {"medusa_num_heads": 3}, {})  # it stays recognisable as Medusa
    edit(path, fields, {n: None if change is None else change(held.get(n)) for n, change in tensors.items()})
    broken = verify(path, engine).broken
    assert any(matches(rule, line) for line in broken), broken


EAGLE1: dict[str, Fault] = {
    "a bias that vLLM fails on": ("vllm", {}, {"fc.bias": lambda t: torch.zeros(32)}, r"names: tensor fc\.bias is unknown"),
    "a bias that SGLang makes up": ("sglang", {}, {"fc.bias": None}, r"names: tensor fc\.bias .*; sglang leaves it random"),
    "SGLang's class": ("vllm", {"architectures": ["LlamaForCausalLMEagle"]}, {}, "architectures: "),
    "two layers": ("vllm", {"num_hidden_layers": 2}, {}, "layers: num_hidden_layers is 2"),
    "no size": ("vllm", {"vocab_size": None}, {}, "fields: vocab_size missing"),
    "a first norm": ("vllm", {}, {"layers.0.input_layernorm.weight": lambda t: torch.ones(32)},
                     r"names: tensor layers\.0\.input_layernorm\.weight is unknown"),
    "a short fc": ("vllm", {}, {"fc.weight": lambda t: t[:, :32]}, r"shapes: fc\.weight is \[32, 32\], .* \[32, 64\]"),
    "a table that SGLang ignores": ("sglang", {}, {"embed_tokens.weight": lambda t: torch.ones(96, 32)}, "names: embed_tokens"),
    "biased attention": ("vllm", {"bias": True}, {}, "bias: bias is true"),
    "no head size": ("vllm", {"head_dim": None}, {}, "head_dim: "),
    "a tied lm_head": ("vllm", {"tie_word_embeddings": True}, {}, "tie: "),
    "no legacy rope": ("vllm", {"rope_theta": None}, {}, "rope: rope_theta is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", EAGLE1)
def test_case_49_a_planted_fault_in_an_eagle1_folder_is_named(
    name: str, tiny: Build, tiny_eagle1: Build, export_to: Build, edit: Build
) -> None:
    engine, fields, tensors, rule = EAGLE1[name]
    verifier = tiny("llama")
    path = export_to(engine, tiny_eagle1(verifier), verifier)
    assert verify(path, engine).broken == []
    held = load_file(path / "model.safetensors")
    edit(path, fields, {n: None if change is None else change(held.get(n)) for n, change in tensors.items()})
    broken = verify(path, engine).broken
    assert any(matches(rule, line) for line in broken), broken


@pytest.mark.parametrize("engine", ["speculators", "tensorrt-llm", "medusa"])
def test_engines_without_eagle1(engine: str, tiny: Build, tiny_eagle1: Build, export_to: Build) -> None:
    path = export_to("vllm", tiny_eagle1(tiny("llama")), tiny("llama"))
    assert verify(path, engine).broken[0].startswith("engine: ")


@pytest.mark.parametrize(("tensor", "change"), [("fc.weight", 1.01), ("layers.0.self_attn.k_proj.weight", -1.0)])
def test_eagle1_weights_that_differ_from_the_run(
    tensor: str, change: float, tiny: Build, tiny_eagle1: Build, export_to: Build, edit: Build
) -> None:
    verifier = tiny("llama")
    head = tiny_eagle1(verifier)
    path = export_to("vllm", head, verifier)
    edit(path, {}, {tensor: load_file(path / "model.safetensors")[tensor] * change})
    assert matches("logits: differ", verify(path, "vllm", head, verifier).broken[0])


ORIGINAL: dict[str, Fault] = {
    "no count": ("medusa", {"medusa_num_layers": None}, {}, "fields: medusa_num_layers is missing"),
    "no base model": ("medusa", {"base_model_name_or_path": None}, {}, "fields: base_model_name_or_path"),
    "a block is missing": ("medusa", {}, {"1.0.linear.bias": None}, r"names: tensor 1\.0\.linear\.bias is missing"),
    "a stranger": ("medusa", {}, {"3.0.linear.bias": lambda t: torch.ones(32)}, "names: tensor 3.0.linear.bias is unknown"),
    "heads differ": ("medusa", {}, {"1.1.weight": lambda t: t[:9]}, "shapes: the heads' output layers differ"),
    "a small block": ("medusa", {}, {"1.0.linear.weight": lambda t: t[:9]}, r"shapes: 1\.0\.linear\.weight is \[9, 32\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", ORIGINAL)
def test_a_planted_fault_in_an_original_medusa_folder_is_named(name: str, folder: Build, edit: Build) -> None:
    engine, fields, tensors, rule = ORIGINAL[name]
    path = folder(engine, "medusa")
    assert verify(path, engine).broken == []
    held = load_file(path / "medusa_lm_head.safetensors")
    edit(path, fields, {n: None if change is None else change(held.get(n)) for n, change in tensors.items()})
    assert any(matches(rule, line) for line in verify(path, engine).broken)


@pytest.mark.parametrize(("made_for", "kind", "engine", "rule"), [
    ("vllm", "medusa", "sglang", "engine: sglang does not load Medusa"),
    ("vllm", "eagle3", "medusa", "engine: medusa loads Medusa heads"),
    ("medusa", "medusa", "vllm", "model_type: None|architectures: None"),
    ("vllm", "eagle3", "speculators", "architectures: "),
    ("speculators", "eagle3", "sglang", "architectures: "),
])  # fmt: skip
def test_a_folder_for_another_engine(made_for: str, kind: str, engine: str, rule: str, folder: Build) -> None:
    assert matches(rule, verify(folder(made_for, kind), engine).broken[0])


@pytest.mark.parametrize(("kind", "name"), [("eagle3", "some-eagle-3"), ("medusa", "eagle3-like")])
def test_a_name_that_makes_vllm_guess_another_method(kind: str, name: str, folder: Build) -> None:
    path = folder("vllm", kind)
    moved = path.rename(path.with_name(name))
    assert [line.split(":")[0] for line in verify(moved, "vllm").broken] == ["path"]


def test_a_pickle_beside_the_weights(folder: Build) -> None:
    path = folder("vllm", "eagle3")
    (path / "optimizer.pt").write_bytes(b"")
    assert verify(path, "vllm").broken == ["pickles: optimizer.pt lies in the folder; safetensors only"]


# what only the run's head and its verifier tell: the rule and what to plant
AGAINST_A_RUN: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "SGLang's layers given vLLM's way (C07)": ("sglang", {"eagle_config": {KEY: [2, 4, 5]}}, {},
                                               r"layer ids: sglang hands over .* \[3, 5, 6\], the head reads \[2, 4, 5\]"),
    "layers beyond the last": ("vllm", {KEY: [2, 4, 9]}, {}, r"layer ids: vllm would capture .* \[2, 4, 9\] of 8"),
    "training length as positions (C22)": ("vllm", {"max_position_embeddings": 64}, {}, "positions: .* is 64, "),
    "another theta, both ways (C23)": ("vllm", {"rope_theta": 5e5, "rope_parameters.rope_theta": 5e5}, {}, "rope: .* turns"),
    "scaling lost, both ways (C24)": ("vllm", {"rope_scaling": "null", "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0}}, {}, "rope: .* otherwise"),
    "the normed residual": ("vllm", {"norm_before_residual": True}, {}, "logits: differ from the run's head"),
    "fc without its scale": ("vllm", {}, {"fc.weight": lambda t: t * 1.01}, "logits: differ"),
    "another norm": ("vllm", {"rms_norm_eps": 0.1}, {}, "logits: differ"),
    "q and k exchanged": ("vllm", {}, {"midlayer.self_attn.q_proj.weight": lambda t: -t}, "logits: differ"),
    "a table of zeros": ("vllm", {}, {"embed_tokens.weight": lambda t: torch.zeros(96, 32)}, "logits: differ"),
    "other ids": ("vllm", {}, {"d2t": lambda t: torch.tensor([4, 6, 6, 17, 91]), "t2d": lambda t: torch.zeros(96).index_fill(
        0, torch.tensor([4, 7, 8, 20, 95]), 1).bool()}, "logits: differ"),
}  # fmt: skip


@pytest.mark.parametrize("name", AGAINST_A_RUN)
def test_a_fault_that_only_the_run_shows(name: str, tiny: Build, tiny_eagle3: Build, export_to: Build, edit: Build) -> None:
    engine, fields, tensors, rule = AGAINST_A_RUN[name]
    verifier = tiny("llama3rope", num_hidden_layers=8)
    head = tiny_eagle3(verifier, target_ids=SOME, layers=(2, 4, 5))
    path = export_to(engine, head, verifier)
    held = load_file(path / "model.safetensors")
    edit(path, fields, {n: change(held.get(n)) for n, change in tensors.items()})
    assert verify(path, engine).broken == []  # by itself it looks whole
    broken = verify(path, engine, head, verifier).broken
    assert len(broken) == 1
    assert matches(rule, broken[0]), broken


def test_medusa_weights_that_differ_from_the_run(tiny: Build, tiny_medusa: Build, export_to: Build, edit: Build) -> None:
    verifier = tiny("llama")
    head = tiny_medusa(verifier, target_ids=SOME)
    path = export_to("vllm", head, verifier)
    weight = load_file(path / "model.safetensors")["lm_heads.1.weight"]
    edit(path, {}, {"lm_heads.1.weight": weight.roll(1, 0)})
    assert matches("logits: differ", verify(path, "vllm", head, verifier).broken[0])


def truncate(path: Path) -> None:
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-40])


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda f: f.rename(f.with_name("moved")), "no such folder"),
    "no config": (lambda f: (f / "config.json").unlink(), r"not a draft head: config\.json is missing"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "not readable JSON"),
    "a JSON list": (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"not a draft head: none of model\.safetensors, "),
    "truncated weights": (truncate, "not a whole safetensors file"),
    "a pickle alone": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "a pickle can run code"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, folder: Build) -> None:
    path = folder("vllm", "eagle3")
    damage, message = BAD[name]
    damage(path)
    with pytest.raises(UserError, match=message) as caught:
        verify(path, "vllm")
    assert "\n" not in str(caught.value)


def test_a_folder_for_another_verifier(tiny: Build, tiny_eagle3: Build, export_to: Build) -> None:
    verifier, other = tiny("llama"), tiny("llama", vocab_size=97)
    path = export_to("vllm", tiny_eagle3(verifier), verifier)
    with pytest.raises(UserError, match="made for another verifier: its vocab_size is 96, llama has 97"):
        verify(path, "vllm", tiny_eagle3(other), other)


def test_a_folder_of_another_kind(tiny: Build, tiny_eagle3: Build, tiny_medusa: Build, export_to: Build) -> None:
    verifier = tiny("llama", num_hidden_layers=8)
    path = export_to("vllm", tiny_eagle3(verifier, layers=(2, 4, 5)), verifier)
    with pytest.raises(UserError, match="holds another kind of head than the run's medusa"):
        verify(path, "vllm", tiny_medusa(verifier), verifier)


def test_an_unknown_engine(folder: Build) -> None:
    with pytest.raises(UserError, match="--engine ollama: unknown engine; known: vllm, sglang"):
        verify(folder("vllm", "eagle3"), "ollama")


def test_the_contracts_know_nothing_of_the_exporter() -> None:
    import headstart

    for path in (Path(headstart.__file__).parent / "export" / "contracts").glob("*.py"):
        source = path.read_text()
        for line in source.splitlines():
            if line.startswith(("from ..", "import headstart")) and not line.startswith("from ...errors"):
                pytest.fail(f"{path.name}: {line}")


def test_config_json_is_what_is_read(folder: Build) -> None:
    """The faults above are planted in files: a good folder's config.json is plain JSON."""
    assert json.loads((folder("vllm", "eagle3") / "config.json").read_text())["draft_vocab_size"] == 5
