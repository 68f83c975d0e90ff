"""The verifier's facts, states and logits against transformers itself, family by family, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.errors import UserError
from headstart.heads.verifier import Verifier

Build = Callable[..., Any]
FAMILIES = ["llama", "llama3rope", "qwen2", "qwen2_hybrid", "qwen3", "gpt2", "gemma2", "gemma3", "mistral", "granite",
            "cohere", "olmo2", "phi3", "stablelm", "gpt_neox", "mixtral", "qwen3_moe"]  # fmt: skip


@pytest.fixture
def save(tiny: Build, tmp_path: Path) -> Callable[..., Path]:
    """`save(family, shard="5GB", **config)`: a tiny verifier and a word-level tokenizer in a folder."""

    def write(family: str = "llama", shard: str = "5GB", **overrides: Any) -> Path:
        folder = tmp_path / "verifier"
        tiny(family, **overrides).model.save_pretrained(folder, max_shard_size=shard)
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w2"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w95").save_pretrained(folder)
        return folder

    return write


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_logits_are_those_of_transformers(family: str, tiny: Build, ids_of: Build) -> None:
    verifier = tiny(family)
    ids = torch.tensor([ids_of(1, 11), ids_of(2, 11)])
    with torch.no_grad():
        own = verifier.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    features = verifier.features(ids, (3, 0, 1, 2, 1))
    for slot, layer in enumerate((3, 0, 1, 2, 1)):  # in the order asked, twice where asked twice
        assert torch.equal(features.layers[..., 32 * slot : 32 * slot + 32], own.hidden_states[layer])
    assert torch.equal(features.last, own.hidden_states[-1])
    assert features.choice is None
    assert verifier.features(ids).layers.shape == (2, 11, 0)
    rebuilt = verifier.logits(features.last)
    assert (rebuilt - own.logits).abs().max() < 1e-4
    some = torch.tensor([95, 3, 40])
    assert (verifier.logits(features.last, some) - own.logits[..., some]).abs().max() < 1e-4
    assert (verifier.logits(features.last).softmax(-1) - own.logits.softmax(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_case_21_embeddings_are_what_enters_the_first_layer(family: str, tiny: Build, ids_of: Build) -> None:
    verifier = tiny(family)
    ids = torch.tensor([ids_of(3, 9)])
    own = verifier.model(input_ids=ids, output_hidden_states=True).hidden_states[0]
    assert torch.allclose(verifier.embed(ids), own, atol=1e-6)
    factor = {"gemma2": 32**0.5, "gemma3": 32**0.5, "granite": 12.0}.get(family, 1.0)
    table = verifier.model.get_input_embeddings().weight
    assert torch.allclose(verifier.embed(ids), table[ids] * factor, rtol=1e-3)


def test_padding_never_reaches_the_real_positions(tiny: Build, batch_of: Build, ids_of: Build) -> None:
    rows = [ids_of(4, 3), ids_of(5, 9)]
    for family in FAMILIES:
        verifier = tiny(family)
        together = verifier.features(batch_of(rows, [[], []], pad=95).ids, (1, 3))
        for b, row in enumerate(rows):
            alone = verifier.features(torch.tensor([row]), (1, 3))
            assert torch.isfinite(together.last[b, : len(row)]).all()
            scale = max(1.0, alone.layers.abs().max().item())
            assert (together.last[b, : len(row)] - alone.last[0]).abs().max() < 1e-5 * scale, family
            assert (together.layers[b, : len(row)] - alone.layers[0]).abs().max() < 1e-5 * scale, family


def test_facts_name_the_sizes_that_heads_are_built_from(tiny: Build) -> None:
    llama, qwen3, gpt2, gemma3 = (tiny(family).facts for family in ("llama", "qwen3", "gpt2", "gemma3"))
    assert (llama.hidden_size, llama.vocab_size, llama.num_hidden_layers) == (32, 96, 4)
    assert (llama.num_attention_heads, llama.num_key_value_heads, llama.head_dim) == (4, 2, 8)
    assert (llama.intermediate_size, llama.max_position_embeddings, llama.stop_ids) == (64, 256, (95,))
    assert qwen3.head_dim == 24
    assert (gpt2.num_key_value_heads, gpt2.head_dim, gpt2.intermediate_size, gpt2.rope_parameters) == (4, 8, 64, None)
    assert gemma3.rope_parameters == {"rope_type": "default", "rope_theta": 1_000_000.0}
    assert tiny("llama", vocab_size=100).facts.vocab_size == 100


def test_stop_ids_are_the_whole_list_and_may_be_none(tiny: Build) -> None:
    assert tiny("llama", eos_token_id=[95, 7]).facts.stop_ids == (95, 7)
    assert tiny("llama", eos_token_id=None).facts.stop_ids == ()


def test_the_generation_config_decides_the_stop_ids(tiny: Build) -> None:
    model = tiny("llama").model
    model.generation_config.eos_token_id = [11, 12]
    assert Verifier(model, None, "x").facts.stop_ids == (11, 12)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_case_21_a_nested_text_config_is_found(family: str, tiny: Build, ids_of: Build) -> None:
    """A multimodal Gemma 3 keeps its sizes in text_config and its decoder layers one level deeper."""
    if family == "llama":
        config = AutoConfig.for_model("mistral3", text_config=tiny("mistral").config.to_dict(),
                                      vision_config=vision("pixtral"), image_token_index=90)  # fmt: skip
        kind = "Mistral3ForConditionalGeneration"
    else:
        text = tiny("gemma3").config.to_dict()
        config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision("siglip_vision_model"),
                                      mm_tokens_per_image=4, image_token_index=90)  # fmt: skip
        kind = "Gemma3ForConditionalGeneration"
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    verifier = Verifier(model, None, kind)
    assert (verifier.facts.hidden_size, verifier.facts.vocab_size, len(verifier.layers)) == (32, 96, 4)
    ids = torch.tensor([ids_of(6, 8)])
    own = model(input_ids=ids).logits
    assert (verifier.logits(verifier.features(ids).last) - own).abs().max() < 1e-4


def vision(kind: str) -> dict[str, Any]:
    return {"model_type": kind, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 4}  # fmt: skip


class OddlyScaled(LlamaForCausalLM):
    """Scales its logits where no configuration says so."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 0.125
        return out


class HalvingHead(nn.Linear):
    """An lm_head that is more than its weight, as a quantised or wrapped one may be."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


def test_case_20_logits_scaled_in_an_unknown_way_are_refused_with_the_ratio(tiny: Build) -> None:
    model = OddlyScaled(tiny("llama").model.config)
    with pytest.raises(UserError, match=r"verifier odd: logits .*own/rebuilt 0\.125") as caught:
        Verifier(model, None, "odd")
    assert "\n" not in str(caught.value)


def test_case_20_a_head_that_is_more_than_its_weight_is_refused_or_right(tiny: Build, ids_of: Build) -> None:
    """Some columns of the logits are read from the weight alone, so the weight alone must give them."""
    model = tiny("llama").model
    head = HalvingHead(32, 96, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    try:
        verifier = Verifier(model, None, "halved")
    except UserError as error:
        assert "0.5" in str(error)  # noqa: PT017
        return
    ids, some = torch.tensor([ids_of(1, 6)]), torch.tensor([4, 50])
    own = model(input_ids=ids).logits[..., some]
    assert (verifier.logits(verifier.features(ids).last, some) - own).abs().max() < 1e-4


def test_case_19_a_softcap_and_case_20_known_scales_are_rebuilt(tiny: Build, ids_of: Build) -> None:
    ids = torch.tensor([ids_of(7, 8)])
    for family, rebuild in (
        ("gemma2", lambda raw: 5.0 * torch.tanh(raw / 5.0)),
        ("granite", lambda raw: raw / 8.0),
        ("cohere", lambda raw: raw * 0.0625),
    ):
        verifier = tiny(family)
        raw = verifier.model.lm_head(verifier.features(ids).last)
        own = verifier.model(input_ids=ids).logits
        assert (own - raw).abs().max() > 0.1
        assert (rebuild(raw) - own).abs().max() < 1e-5
        assert (verifier.logits(verifier.features(ids).last).softmax(-1) - own.softmax(-1)).abs().max() < 1e-5
        assert torch.equal(raw.argmax(-1), own.argmax(-1))  # why a greedy test would not notice


def test_an_lm_head_with_a_bias_is_rebuilt(tiny: Build, ids_of: Build) -> None:
    model = tiny("llama").model
    head = nn.Linear(32, 96)
    model.lm_head = head
    verifier = Verifier(model, None, "biased")
    ids, some = torch.tensor([ids_of(8, 6)]), torch.tensor([95, 1])
    own = model(input_ids=ids).logits[..., some]
    assert (verifier.logits(verifier.features(ids).last, some) - own).abs().max() < 1e-5


LINEAR: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "qwen3_next": {"num_key_value_heads": 2, "intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "head_dim": 8,
                   "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                   "linear_value_head_dim": 8},
    "lfm2": {"num_key_value_heads": 2, "intermediate_size": 64, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "jamba": {"num_key_value_heads": 2, "intermediate_size": 64, "num_experts": 2, "attn_layer_period": 2,
              "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "bamba": {"num_key_value_heads": 2, "intermediate_size": 64, "attn_layer_indices": [1, 3], "mamba_n_heads": 8,
              "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1},
    "falcon_h1": {"num_key_value_heads": 2, "intermediate_size": 64, "mamba_d_ssm": 32, "mamba_n_heads": 4,
                  "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1},
    "recurrent_gemma": {"num_key_value_heads": 2, "intermediate_size": 64, "lru_width": 32, "attention_window_size": 8,
                        "head_dim": 8},
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
}  # fmt: skip


@pytest.mark.parametrize("model_type", LINEAR)
def test_case_32_states_that_cannot_be_rolled_back_are_refused(model_type: str) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
             "bos_token_id": 1, "eos_token_id": 95, "pad_token_id": 0, "max_position_embeddings": 64}  # fmt: skip
    if model_type.startswith("mamba") or model_type == "rwkv":
        sizes = {key: size for key, size in sizes.items() if key not in ("num_attention_heads", "max_position_embeddings")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | LINEAR[model_type]))
    with pytest.raises(UserError, match=model_type) as caught:
        Verifier(model, None, model_type)
    assert "\n" not in str(caught.value)


def test_case_08_a_hidden_size_that_heads_do_not_divide_is_refused(tiny: Build) -> None:
    model = tiny("llama").model
    model.config.num_attention_heads, model.config.head_dim = 5, None
    with pytest.raises(UserError, match="hidden size 32 is not divisible by 5 heads"):
        Verifier(model, None, "x")


@pytest.mark.parametrize(("shard", "tied"), [("5GB", True), ("5GB", False), ("20KB", False)], ids=["tied", "untied", "sharded"])
def test_case_09_every_way_of_saving_loads_the_same_logits(
    shard: str, tied: bool, save: Callable[..., Path], tiny: Build, ids_of: Build
) -> None:
    folder = save(shard=shard, tie_word_embeddings=tied)
    assert (len(list(folder.glob("*.safetensors"))) > 1) is (shard == "20KB")
    verifier = Verifier.load(str(folder), device="cpu")
    ids = torch.tensor([ids_of(9, 7)])
    own = tiny("llama", tie_word_embeddings=tied).model(input_ids=ids).logits
    assert torch.equal(verifier.logits(verifier.features(ids).last), own)
    assert torch.equal(verifier.lm_head.weight, verifier.model.get_input_embeddings().weight) is tied
    assert verifier.tokenizer is not None


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.2.mlp.up_proj.weight", "model.norm.weight"])
def test_case_09_a_missing_weight_is_refused_and_never_random(name: str, save: Callable[..., Path]) -> None:
    folder = save(tie_word_embeddings=False)
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(UserError, match=name.replace(".", r"\.")) as caught:
        Verifier.load(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_weight_of_another_shape_is_refused(save: Callable[..., Path]) -> None:
    folder = save()
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight|size|shape") as caught:
        Verifier.load(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["truncated", "empty"])
def test_a_damaged_weight_file_is_refused_in_one_line(damage: str, save: Callable[..., Path]) -> None:
    folder = save()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2] if damage == "truncated" else b"")
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        Verifier.load(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for spec, message in (
        (str(tmp_path / "nowhere"), "no such folder"),
        (str(tmp_path / "nothing.gguf"), "no such file"),
        (str(tmp_path / "empty"), "cannot be loaded"),
        ("builtin:nothing", "unknown builtin verifier; there is: smollm2-135m"),
        ("somebody/never-downloaded", "cannot be loaded"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            Verifier.load(spec, device="cpu")
        assert "\n" not in str(caught.value)
        assert spec in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_missing_device_is_refused(save: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="no CUDA device is visible"):
        Verifier.load(str(save()), device="cuda")


def test_case_23_a_configuration_of_the_older_schema_keeps_its_theta(save: Callable[..., Path], ids_of: Build) -> None:
    import json

    folder = save(rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    ids = torch.tensor([ids_of(10, 9)])
    new = Verifier.load(str(folder), device="cpu")
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    old = Verifier.load(str(folder), device="cpu")
    assert new.facts.rope_parameters["rope_theta"] == old.facts.rope_parameters["rope_theta"] == 500_000.0
    assert torch.equal(new.features(ids).last, old.features(ids).last)


def test_the_fingerprint_feels_weights_configuration_and_template(tiny: Build) -> None:
    base = tiny("llama").fingerprint
    assert tiny("llama").fingerprint == base
    assert tiny("llama", seed=1).fingerprint != base
    assert tiny("llama", max_position_embeddings=128).fingerprint != base
    one_weight = tiny("llama")
    one_weight.model.lm_head.weight[5, 5] += 1e-3
    assert one_weight.fingerprint != base
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    words.chat_template = "{{ messages }}"
    assert Verifier(tiny("llama").model, words, "x").fingerprint != base


def test_the_verifier_is_frozen_and_in_eval_mode(tiny: Build, ids_of: Build) -> None:
    model = tiny("llama").model.train().requires_grad_(True)
    verifier = Verifier(model, None, "x")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not verifier.features(torch.tensor([ids_of(1, 4)]), (1,)).layers.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_weight_types_pass_their_own_check(dtype: torch.dtype, tiny: Build, ids_of: Build) -> None:
    verifier = Verifier(tiny("llama").model.to(dtype), None, "x")
    cache = verifier.new_cache(2, 12)
    features, _ = verifier.prefill([ids_of(1, 4), ids_of(2, 7)], cache)
    assert features.last.dtype == verifier.dtype == dtype
    assert torch.isfinite(features.last).all()


def test_a_prompt_that_comes_several_times_is_read_once(tiny: Callable[..., Verifier], monkeypatch: pytest.MonkeyPatch) -> None:
    """And every copy's states, ids and cache are those of a prompt of its own."""
    verifier = tiny("llama")
    prompts = [[5, 6, 7], [9], [5, 6, 7], [5, 6, 7], [9], [11, 12]]
    read: list[int] = []
    decode = Verifier.decode
    monkeypatch.setattr(Verifier, "decode", lambda self, ids, *given: read.append(len(ids)) or decode(self, ids, *given))
    cache = verifier.new_cache(len(prompts), 8)
    features, ids = verifier.prefill(prompts, cache, (1, 2))
    assert read == [3]
    assert cache.lengths == [3, 1, 3, 3, 1, 2]
    one, depth = torch.ones(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long)
    after = verifier.decode(torch.tensor([[20 + i] for i in range(6)]), one, depth, cache)
    for row, prompt in enumerate(prompts):
        alone = verifier.features(torch.tensor([[*prompt, 20 + row]]), (1, 2))
        assert ids[row, : len(prompt)].tolist() == prompt
        torch.testing.assert_close(features.last[row, : len(prompt)], alone.last[0, :-1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(features.layers[row, : len(prompt)], alone.layers[0, :-1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(after.last[row, 0], alone.last[0, -1], atol=1e-5, rtol=1e-4)
