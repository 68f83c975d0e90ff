"""MTP heads that start from the verifier's own modules, against transformers' decoder layers around the paper's formula."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from headstart.build_heads import build_mtp
from headstart.errors import UserError
from headstart.heads.batch import Batch
from headstart.heads.mtp_base import MtpHead
from headstart.heads.verifier import Verifier
from headstart.training.sections.head import MtpSection

Build = Callable[..., Any]
LAYERS = 4
LAYER = {"llama": (LlamaDecoderLayer, LlamaRotaryEmbedding), "qwen2": (Qwen2DecoderLayer, Qwen2RotaryEmbedding)}
NAMES = {  # prefix, norm of the embedding, norm of the hidden state, projection, last norm
    "deepseek": ("model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": ("model.mtp_layers.{i}.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}


@pytest.fixture
def checkpoint(tiny: Build, tmp_path: Path) -> Callable[..., Path]:
    """`checkpoint(family, naming, modules=1, shards=False)`: a verifier's folder with random modules in its files."""

    def write(family: str, naming: str, modules: int = 1, shards: bool = False) -> Path:
        verifier = tiny(family, num_nextn_predict_layers=modules)
        folder = tmp_path / f"{family}-{naming}"
        verifier.model.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))).save_pretrained(folder)
        generator = torch.Generator().manual_seed(11)
        extra: dict[str, Tensor] = {}
        prefix, embedding, hidden, projection, last = NAMES[naming]
        for i in range(modules):
            start = prefix.format(n=LAYERS + i, i=i)
            shapes = {name: tensor.shape for name, tensor in verifier.model.model.layers[0].state_dict().items()}
            shapes |= {f"{name}.weight": torch.Size([32]) for name in (embedding, hidden, last)}
            shapes[f"{projection}.weight"] = torch.Size([32, 64])
            for name, shape in shapes.items():
                noise = torch.randn(shape, generator=generator)
                extra[start + name] = 1 + 0.2 * noise if "norm" in name else 0.2 * noise
            if naming == "deepseek":
                extra[start + "self_attn.rotary_emb.inv_freq"] = torch.ones(4)
                extra[start + "embed_tokens.weight"] = verifier.embedding_table.detach().clone()
                extra[start + "shared_head.head.weight"] = verifier.lm_head.weight.detach().clone()
        if not shards:
            save_file(load_file(folder / "model.safetensors") | extra, folder / "model.safetensors", {"format": "pt"})
            return folder
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        save_file(extra, folder / "b.safetensors", {"format": "pt"})
        places = dict.fromkeys(load_file(folder / "a.safetensors"), "a.safetensors") | dict.fromkeys(extra, "b.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        return folder

    return write


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def naive_states(folder: Path, family: str, naming: str, verifier: Verifier, ids: Tensor, modules: int) -> list[Tensor]:
    """Outputs [T - k, d] of module k at t, before and after its last norm's weight is applied: only the latter is returned."""
    tensors, config = tensors_of(folder), verifier.config
    make, rotary = LAYER[family]
    prefix, embedding_norm, hidden_norm, projection, last = NAMES[naming]
    hidden = verifier.features(ids[None]).last[0]
    found = []
    for i in range(modules):
        start = prefix.format(n=LAYERS + i, i=i)
        own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        layer = make(config, 0)
        layer.load_state_dict({name: own[name] for name in layer.state_dict()})
        size = len(ids) - 1 - i
        embedded = rms(tensors["model.embed_tokens.weight"][ids[1 + i :]], own[f"{embedding_norm}.weight"], 1e-6)
        normed = rms(hidden[:size], own[f"{hidden_norm}.weight"], 1e-6)
        parts = [embedded, normed] if naming == "deepseek" else [normed, embedded]
        x = (torch.cat(parts, -1) @ own[f"{projection}.weight"].T)[None]
        positions = torch.arange(size)[None]
        cos_sin = rotary(config)(x, positions)
        mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
        with torch.no_grad():
            out = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=cos_sin)
        hidden = (out[0] if isinstance(out, tuple) else out).reshape(size, -1)
        found.append(rms(hidden, own[f"{last}.weight"], 1e-6))
    return found


def start(folder: Path, **section: Any) -> tuple[Verifier, MtpHead]:
    verifier = Verifier.load(str(folder), device="cpu")
    return verifier, build_mtp(MtpSection(start="verifier", **section), verifier, [])


@pytest.mark.parametrize(("family", "naming"), [("llama", "deepseek"), ("qwen2", "mimo"), ("llama", "mimo")])
@pytest.mark.parametrize("form", ["recursive", "sequential"])
def test_first_drafts_are_those_of_the_verifiers_module(
    form: str, family: str, naming: str, checkpoint: Build, ids_of: Build
) -> None:
    folder = checkpoint(family, naming)
    verifier, head = start(folder, form=form, depth=1)
    assert head.config.attention_bias is (family == "qwen2")
    ids = torch.tensor(ids_of(3, 14))
    (state,) = naive_states(folder, family, naming, verifier, ids, 1)
    expected = torch.log_softmax(state @ verifier.lm_head.weight.T, -1)
    batch = Batch(ids[None], torch.ones(1, 14, dtype=torch.bool), torch.tensor([14]))
    where = (torch.arange(14) < 13)[None]
    found = head.first_draft(batch, verifier.features(ids[None]), verifier, where)
    assert torch.allclose(found, expected, atol=2e-4)
    assert (expected.max(-1).values - expected.min(-1).values).min() > 1  # no flat distributions


def test_two_modules_in_two_files(checkpoint: Build, ids_of: Build) -> None:
    """The loss of both depths, each module reading the one before; recursion goes on from the first of them."""
    folder = checkpoint("llama", "deepseek", modules=2, shards=True)
    verifier, head = start(folder, form="sequential", depth=2)
    ids = torch.tensor(ids_of(4, 12))
    states = naive_states(folder, "llama", "deepseek", verifier, ids, 2)
    mask = (torch.arange(12) >= 4)[None]
    batch = Batch(ids[None], mask, torch.tensor([12]))
    found = head.loss(batch, verifier.features(ids[None]), verifier)
    for i, state in enumerate(states):
        log_q = torch.log_softmax(state @ verifier.lm_head.weight.T, -1)
        terms = [-log_q[t, ids[t + 2 + i]] for t in range(12 - 2 - i) if mask[0, t + 2 + i]]
        assert found.counts[i].item() == len(terms)
        assert found.sums[i].item() == pytest.approx(torch.stack(terms).sum().item(), rel=1e-4)
    _, recursive = start(folder, form="recursive", depth=4)
    assert torch.equal(recursive.mtp[0].proj.weight, head.mtp[0].proj.weight)


Fault = Callable[[Path, dict[str, Tensor]], str]


def experts(folder: Path, tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.4.mlp.experts.0.gate_proj.weight"] = torch.zeros(4, 32)
    return "its module 0 has a mixture of experts"


def latent(folder: Path, tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.4.self_attn.kv_a_proj_with_mqa.weight"] = torch.zeros(4, 32)
    return r"its module 0 has latent attention \(MLA\)"


def normed(folder: Path, tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.4.self_attn.q_norm.weight"] = torch.zeros(8)
    return "its module 0 has norms of queries and keys"


def unknown(folder: Path, tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.4.self_attn.o_proj.bias"] = torch.zeros(32)
    return "its module 0 has a layer.self_attn.o_proj.bias"


def lacking(folder: Path, tensors: dict[str, Tensor]) -> str:
    del tensors["model.layers.4.hnorm.weight"]
    return "its module 0 has no hidden_norm.weight"


def other_size(folder: Path, tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.4.mlp.down_proj.weight"] = torch.zeros(32, 48)
    return r"its module 0 has a layer.mlp.down_proj.weight of \[32, 48\], not \[32, 64\] as its other layers"


def other_table(folder: Path, tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.4.shared_head.head.weight"] += 1
    return "its module 0 has a shared_head.head.weight that is not the verifier's"


def qwen(folder: Path, tensors: dict[str, Tensor]) -> str:
    tensors["mtp.fc.weight"] = torch.zeros(32, 64)
    return r"its modules \(mtp\.\*\) have gated attention"


def no_files(folder: Path, tensors: dict[str, Tensor]) -> str:
    for name in [name for name in tensors if name.startswith("model.layers.4.")]:
        del tensors[name]
    return r"its config tells of 1 modules, but its files hold no model\.mtp_layers\.0\.\*"


def no_count(folder: Path, tensors: dict[str, Tensor]) -> str:
    config = json.loads((folder / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    return r"it brings 0 modules \(by its config's num_nextn_predict_layers\), the recipe asks for 1"


FAULTS = [experts, latent, normed, unknown, lacking, other_size, other_table, qwen, no_files, no_count]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_modules_that_are_none_of_ours_are_refused(fault: Fault, checkpoint: Build) -> None:
    folder = checkpoint("llama", "deepseek")
    tensors = load_file(folder / "model.safetensors")
    reason = fault(folder, tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"^verifier {folder}: head.start: {reason}") as caught:
        start(folder)
    assert "\n" not in str(caught.value)


def test_parallel_modules_are_others() -> None:
    with pytest.raises(ValueError, match="form must be sequential or recursive"):
        MtpSection(form="parallel", start="verifier")
