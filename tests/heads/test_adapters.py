"""Verifiers with a LoRA adapter, against weights merged by hand: W + alpha / rank * B A."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from headstart.errors import UserError
from headstart.heads.adapters import load_adapter, new_adapter
from headstart.heads.loading import quantisation
from headstart.heads.verifier import Verifier

Build = Callable[..., Any]
RANK, ALPHA = 4, 6
TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]


@pytest.fixture(autouse=True)
def old_name() -> None:
    """peft asks transformers for a property by its old name."""
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")


def write_adapter(verifier: Verifier, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A LoRA with random weights, made and saved by peft alone."""
    import peft

    fields: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    handle = peft.get_peft_model(copy.deepcopy(verifier.model), peft.LoraConfig(**fields | changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in handle.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    handle.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def merged(verifier: Verifier, folder: Path) -> Verifier:
    """The same model with W + alpha / rank * B A in each place that the adapter's file names."""
    model = copy.deepcopy(verifier.model)
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = ALPHA / RANK
    for name, down in tensors.items():
        if "lora_A" in name:
            up = tensors[name.replace("lora_A", "lora_B")]
            layer = model.get_submodule(name.removeprefix("base_model.model.").partition(".lora_A")[0])
            layer.weight.data += scale * up @ down
    return Verifier(model, None, "merged")


def adapted(verifier: Verifier, folder: Path) -> Verifier:
    model = copy.deepcopy(verifier.model)
    return Verifier(model, None, verifier.name, load_adapter(model, str(folder), verifier.name))


def states(verifier: Verifier, ids: Tensor) -> Tensor:
    features = verifier.features(ids, (1, 3))
    return torch.cat([features.last, features.layers], -1)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(96, (2, 11), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "cohere"])
def test_case_56_merged_and_unmerged_features_are_the_same(family: str, tiny: Build, ids: Tensor, tmp_path: Path) -> None:
    base = tiny(family, initializer_range=0.2)  # states of a size at which 1e-4 means something in float32
    folder = write_adapter(base, tmp_path / "adapter")
    its, whole = adapted(base, folder), merged(base, folder)
    assert (states(its, ids) - states(whole, ids)).abs().max() < 1e-4
    assert (states(its, ids) - states(base, ids)).abs().max() > 0.1
    assert its.architecture == base.architecture
    assert (its.name, its.adapter.name) == (base.name, str(folder))
    assert not any(parameter.requires_grad for parameter in its.model.parameters())
    with its.adapter.off():
        assert torch.equal(states(its, ids), states(base, ids))
    assert not any(parameter.requires_grad for parameter in its.model.parameters())
    assert (states(its, ids) - states(whole, ids)).abs().max() < 1e-4


def test_a_verifier_and_its_adapter_from_folders(tiny: Build, ids: Tensor, tmp_path: Path) -> None:
    """The way of recipes, with weights laid out for the CPU; greedy decoding in a cache, too."""
    from tokenizers import Tokenizer, models

    base = tiny("llama", initializer_range=0.2)
    base.model.save_pretrained(tmp_path / "base")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))).save_pretrained(tmp_path / "base")
    folder = write_adapter(base, tmp_path / "adapter")
    its, whole = Verifier.load(str(tmp_path / "base"), adapter=str(folder), device="cpu"), merged(base, folder)
    assert (states(its, ids) - states(whole, ids)).abs().max() < 1e-4
    prompts = [ids[0].tolist(), ids[1, :7].tolist()]
    kept = [verifier.prefill(prompts, verifier.new_cache(2, 16))[0].last for verifier in (its, whole)]
    assert (kept[0][0] - kept[1][0]).abs().max() < 1e-4


def test_case_39_the_fingerprint_knows_the_adapter(tiny: Build, tmp_path: Path) -> None:
    """Its weights, and its alpha, which no weight shows; not the folder that it lies in."""
    base = tiny("llama")
    one = write_adapter(base, tmp_path / "one")
    same = write_adapter(base, tmp_path / "same")
    other = write_adapter(base, tmp_path / "other", seed=1)
    louder = write_adapter(base, tmp_path / "louder", lora_alpha=ALPHA + 1)
    prints = [base.fingerprint, *(adapted(base, folder).fingerprint for folder in (one, other, louder))]
    assert len(set(prints)) == 4
    assert adapted(base, same).fingerprint == prints[1]


def test_peft_loads_what_is_saved(tiny: Build, ids: Tensor, tmp_path: Path) -> None:
    import peft

    base = tiny("llama")
    model = copy.deepcopy(base.model)
    torch.manual_seed(0)
    fresh = new_adapter(model, "owner/base", rank=2, alpha=4, dropout=0.5, targets=None)
    verifier = Verifier(model, None, "base", fresh)
    assert {name.split(".")[-4] for name in fresh.weights} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert torch.equal(states(verifier, ids), states(base, ids))  # it starts as nothing, and without its dropout
    with torch.no_grad():
        for weight in fresh.weights.values():
            weight.copy_(torch.randn_like(weight) * 0.2)
    fresh.save(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["inference_mode"]) == ("owner/base", True)
    handle = peft.PeftModel.from_pretrained(copy.deepcopy(base.model), str(tmp_path / "saved"))
    with torch.no_grad():
        theirs = handle(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    assert torch.allclose(verifier.features(ids).last, theirs, atol=1e-5)


def missing_config(base: Verifier, tiny: Build, folder: Path) -> str:
    (folder / "adapter_config.json").unlink()
    return "not a peft adapter: adapter_config.json is missing"


def no_folder(base: Verifier, tiny: Build, folder: Path) -> str:
    folder.rename(folder.with_name("elsewhere"))
    return "no such folder"


def another_size(base: Verifier, tiny: Build, folder: Path) -> str:
    write_adapter(tiny("llama", hidden_size=64), folder)
    return "does not fit verifier llama: size mismatch for "


def fewer_layers(base: Verifier, tiny: Build, folder: Path) -> str:
    write_adapter(tiny("llama", num_hidden_layers=3), folder)
    return r"does not fit verifier llama: \S*layers.3.self_attn.q_proj.lora_A\S* is missing"


def more_layers(base: Verifier, tiny: Build, folder: Path) -> str:
    write_adapter(tiny("llama", num_hidden_layers=5), folder)
    return "does not fit verifier llama: it has weights for layers that are not there"


def other_family(base: Verifier, tiny: Build, folder: Path) -> str:
    write_adapter(tiny("gpt_neox"), folder, target_modules=["query_key_value"])
    return "does not fit verifier llama: Target modules {'query_key_value'} not found in the base model"


def broken_file(base: Verifier, tiny: Build, folder: Path) -> str:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    return "cannot be loaded: "


def no_weights(base: Verifier, tiny: Build, folder: Path) -> str:
    (folder / "adapter_model.safetensors").unlink()
    return "cannot be loaded: "


def changes_lm_head(base: Verifier, tiny: Build, folder: Path) -> str:
    write_adapter(base, folder, target_modules=["q_proj", "lm_head"])
    return "it changes the lm_head, whose rows draft heads read; merge it into the verifier first"


def no_lora(base: Verifier, tiny: Build, folder: Path) -> str:
    config = json.loads((folder / "adapter_config.json").read_text())
    kept = {"peft_type": "LOHA", **{k: config[k] for k in ("base_model_name_or_path", "task_type", "r", "target_modules")}}
    (folder / "adapter_config.json").write_text(json.dumps(kept))
    return "it is LOHA; verifiers here take LORA"


FAULTS = [missing_config, no_folder, another_size, fewer_layers, more_layers, other_family, broken_file, no_weights,
          changes_lm_head, no_lora]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_adapter_is_one_line(fault: Build, tiny: Build, tmp_path: Path) -> None:
    base = tiny("llama")
    folder = write_adapter(base, tmp_path / "adapter")
    expected = fault(base, tiny, folder)
    with pytest.raises(UserError, match=f"^adapter {folder}: {expected}") as caught:
        load_adapter(copy.deepcopy(base.model), str(folder), base.name)
    assert "\n" not in str(caught.value)


def test_an_adapter_that_no_hub_has(tiny: Build) -> None:
    with pytest.raises(UserError, match=r"^adapter owner/lora: cannot be loaded: .*adapter_config.json") as caught:
        load_adapter(tiny("llama").model, "owner/lora", "llama")
    assert "\n" not in str(caught.value)


def test_bits_need_a_gpu_and_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.heads.loading.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^verifier owner/name: bits: 8 needs bitsandbytes; install it with: pip install "):
        quantisation(8, torch.bfloat16, torch.device("cuda"), "owner/name")
    with pytest.raises(UserError, match=r"^verifier owner/name: bits: 4 needs a CUDA device, this is cpu"):
        Verifier.load("owner/name", device="cpu", bits=4)


def test_a_weight_of_another_dtype_is_kept_in_float32(tiny: Build, tmp_path: Path) -> None:
    """What is trained is float32, also where a file holds less."""
    base = tiny("llama")
    folder = write_adapter(base, tmp_path / "adapter")
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    base.model.to(torch.bfloat16)
    its = adapted(base, folder)
    assert {weight.dtype for weight in its.adapter.weights.values()} == {torch.float32}
    assert its.dtype == torch.bfloat16
