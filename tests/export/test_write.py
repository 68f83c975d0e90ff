"""Exported folders, byte by byte and by a forward pass written here from the formulas: what an engine would draft with them."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headstart.errors import UserError
from headstart.export.layout import adapted, public_name
from headstart.heads.verifier import Verifier

Build = Callable[..., Any]
SOME = torch.tensor([3, 7, 8, 20, 95])
LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj", "hidden_norm", "input_layernorm", "post_attention_layernorm")  # fmt: skip


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def spin(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate x [heads, D]: dimension i and i + D/2 are a pair that turns by position / theta ** (2 i / D)."""
    half = x.shape[-1] // 2
    out = x.clone()
    for i in range(half):
        angle = position / theta ** (2 * i / (2 * half))
        c, s = math.cos(angle), math.sin(angle)
        out[:, i] = x[:, i] * c - x[:, i + half] * s
        out[:, i + half] = x[:, i + half] * c + x[:, i] * s
    return out


def draft_logits(config: dict[str, Any], t: dict[str, Tensor], layer: str, states: Tensor, table: Tensor, ids: list[int],
                 start: int, steps: int) -> Tensor:  # fmt: skip
    """Logits [V] of each of `steps` drafts from `start`, position by position as a serving engine does it; -inf where the
    draft vocabulary has no column. The residual is the hidden state before its norm: norm_before_residual false."""
    assert config["norm_before_residual"] is False
    fields = config.get("transformer_layer_config", config)
    d, eps, theta = fields["head_dim"], fields["rms_norm_eps"], fields["rope_parameters"]["rope_theta"]
    w = {name: t[f"{layer}.{name}.weight"] for name in LAYER}
    keys: list[Tensor] = []
    values: list[Tensor] = []
    hidden = torch.empty(0)
    found = []
    for position in range(start + steps):
        hidden = t["fc.weight"] @ states[position] if position <= start else hidden
        x = torch.cat([norm(table[ids[position + 1]], w["input_layernorm"], eps), norm(hidden, w["hidden_norm"], eps)])
        q = spin((w["self_attn.q_proj"] @ x).view(-1, d), position, theta)
        keys.append(spin((w["self_attn.k_proj"] @ x).view(-1, d), position, theta))
        values.append((w["self_attn.v_proj"] @ x).view(-1, d))
        share = len(q) // len(keys[0])
        mixed = []
        for h in range(len(q)):
            scores = torch.stack([q[h] @ key[h // share] for key in keys]) / math.sqrt(d)
            mixed.append(sum(p * value[h // share] for p, value in zip(scores.softmax(0), values, strict=True)))
        out = hidden + w["self_attn.o_proj"] @ torch.cat(mixed)
        z = norm(out, w["post_attention_layernorm"], eps)
        gate = w["mlp.gate_proj"] @ z
        out = out + w["mlp.down_proj"] @ (gate * torch.sigmoid(gate) * (w["mlp.up_proj"] @ z))
        hidden = out
        if position >= start:
            logits = torch.full((fields["vocab_size"],), -math.inf)
            for column, row in enumerate(t["lm_head.weight"] @ norm(out, t["norm.weight"], eps)):
                logits[column + t["d2t"][column]] = row
            found.append(logits)
    return torch.stack(found)


def eagle1_states(config: dict[str, Any], t: dict[str, Tensor], last: Tensor, table: Tensor, ids: list[int], start: int,
                  steps: int) -> Tensor:  # fmt: skip
    """What goes into the verifier's lm_head, [steps, d]: fc of embedding and state is the residual and, without a norm, what
    attention reads; the layer's output is the next state."""
    d, eps, theta = config["head_dim"], config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]
    names = [name for name in LAYER if name not in ("hidden_norm", "input_layernorm")]
    w = {name: t[f"layers.0.{name}.weight"] for name in names}
    keys: list[Tensor] = []
    values: list[Tensor] = []
    found: list[Tensor] = []
    for position in range(start + steps):
        hidden = last[position] if position <= start else found[-1]
        x = t["fc.weight"] @ torch.cat([table[ids[position + 1]], hidden]) + t.get("fc.bias", torch.zeros(1))
        q = spin((w["self_attn.q_proj"] @ x).view(-1, d), position, theta)
        keys.append(spin((w["self_attn.k_proj"] @ x).view(-1, d), position, theta))
        values.append((w["self_attn.v_proj"] @ x).view(-1, d))
        share = len(q) // len(keys[0])
        mixed = []
        for h in range(len(q)):
            scores = torch.stack([q[h] @ key[h // share] for key in keys]) / math.sqrt(d)
            mixed.append(sum(p * value[h // share] for p, value in zip(scores.softmax(0), values, strict=True)))
        out = x + w["self_attn.o_proj"] @ torch.cat(mixed)
        z = norm(out, w["post_attention_layernorm"], eps)
        gate = w["mlp.gate_proj"] @ z
        out = out + w["mlp.down_proj"] @ (gate * torch.sigmoid(gate) * (w["mlp.up_proj"] @ z))
        if position >= start:
            found.append(out)
    return torch.stack(found)


def really_drafted(head: Any, verifier: Verifier, ids: list[int], start: int, steps: int) -> Tensor:
    """log q [steps, V] of the head's own drafting session, level by level."""
    features = verifier.features(torch.tensor([ids[: start + 1]]), head.needs)
    session = head.begin(verifier, 1, 64)
    found = [session.observe(features, torch.tensor([ids[1 : start + 2]]), [start + 1])[0]]
    for step in range(1, steps):
        found.append(session.expand(torch.tensor([[ids[start + 1 + step]]]), torch.tensor([[step - 2]]))[0, 0])
    out = torch.full((steps, verifier.facts.vocab_size), -math.inf)
    out[:, head.target_ids] = torch.stack(found)
    return out


@pytest.mark.parametrize(("engine", "layer", "layers"), [
    ("vllm", "midlayer", (1, 2, 3)), ("sglang", "midlayer", (1, 2, 3)), ("speculators", "layers.0", (1, 2, 3)),
    ("eagle", "midlayer", (2, 4, 5)), ("tensorrt-llm", "midlayer", (2, 4, 5)),
])  # fmt: skip
def test_the_exported_tensors_draft_what_the_head_drafts(
    engine: str,
    layer: str,
    layers: tuple[int, ...],
    tiny: Build,
    tiny_eagle3: Build,
    export_to: Build,
    read: Build,
    ids_of: Build,
) -> None:
    verifier = tiny("qwen3", num_hidden_layers=8)  # its head_dim is not hidden size / heads
    head = tiny_eagle3(verifier, layers=layers)
    config, tensors = read(export_to(engine, head, verifier))
    ids = ids_of(3, 14)
    hidden = verifier.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    states = torch.cat([hidden[i][0] for i in layers], -1)
    table = verifier.model.get_input_embeddings().weight
    theirs = draft_logits(config, tensors, layer, states, table, ids, 7, 4).log_softmax(-1)
    ours = really_drafted(head, verifier, ids, 7, 4)
    kept = ours.isfinite()
    assert torch.equal(kept, theirs.isfinite())
    assert (ours[kept] - theirs[kept]).abs().max() < 2e-5
    assert ours[kept].std() > 0.3  # not the uniform distribution


@pytest.mark.parametrize("engine", ["vllm", "sglang", "eagle"])
def test_case_49_the_exported_eagle1_tensors_draft_what_the_head_drafts(
    engine: str, tiny: Build, tiny_eagle1: Build, export_to: Build, read: Build, ids_of: Build
) -> None:
    verifier = tiny("qwen3")
    head = tiny_eagle1(verifier, target_ids=torch.arange(96))
    config, tensors = read(export_to(engine, head, verifier))
    ids = ids_of(3, 14)
    last = verifier.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    table = verifier.model.get_input_embeddings().weight
    states = eagle1_states(config, tensors, last, table, ids, 7, 4)
    theirs = verifier.model.get_output_embeddings()(states).log_softmax(-1)
    assert (really_drafted(head, verifier, ids, 7, 4) - theirs).abs().max() < 5e-5


def test_case_49_eagle1_names(tiny: Build, tiny_eagle1: Build, export_to: Build, read: Build) -> None:
    verifier = tiny("qwen3")
    head = tiny_eagle1(verifier)
    golden = {
        "fc.weight": [32, 64], "layers.0.self_attn.q_proj.weight": [96, 32], "layers.0.self_attn.k_proj.weight": [48, 32],
        "layers.0.self_attn.v_proj.weight": [48, 32], "layers.0.self_attn.o_proj.weight": [32, 96],
        "layers.0.mlp.gate_proj.weight": [64, 32], "layers.0.mlp.up_proj.weight": [64, 32],
        "layers.0.mlp.down_proj.weight": [32, 64], "layers.0.post_attention_layernorm.weight": [32],
    }  # fmt: skip
    architectures = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "eagle": "LlamaForCausalLM"}
    for engine, architecture in architectures.items():
        folder = export_to(engine, head, verifier)
        config, tensors = read(folder)
        bias = {} if engine == "vllm" else {"fc.bias": [32]}  # vLLM fails on one, the others leave it random
        assert {name: list(tensor.shape) for name, tensor in tensors.items()} == golden | bias
        assert not bool(tensors.get("fc.bias", torch.zeros(1)).any())
        assert config["architectures"] == [architecture]
        assert "draft_vocab_size" not in config
        pruned = "drafts from the verifier's whole vocabulary of 96; the run drafted from"
        assert (pruned in (folder / "SERVING.md").read_text()) is (len(head.target_ids) < 96)
    assert '"method": "eagle"' in (export_to("vllm", head, verifier) / "SERVING.md").read_text()
    assert "--speculative-algorithm EAGLE " in (export_to("sglang", head, verifier) / "SERVING.md").read_text()


def test_the_other_meaning_of_norm_before_residual_drafts_something_else(
    tiny: Build, tiny_eagle3: Build, export_to: Build, read: Build, ids_of: Build
) -> None:
    """Were the residual the normed state, the field would have to be true: the two differ by far more than rounding."""
    verifier = tiny("llama")
    head = tiny_eagle3(verifier)
    config, tensors = read(export_to("vllm", head, verifier))
    assert config["norm_before_residual"] is False
    ids = ids_of(3, 14)
    hidden = verifier.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    states = torch.cat([hidden[i][0] for i in (1, 2, 3)], -1)
    other = dict(tensors)
    fused = states[:8] @ tensors["fc.weight"].T
    normed = torch.stack([norm(row, tensors["midlayer.hidden_norm.weight"], config["rms_norm_eps"]) for row in fused])
    other["fc.weight"], other["midlayer.hidden_norm.weight"] = torch.eye(32), torch.ones(32)  # residual = the normed state
    table = verifier.model.get_input_embeddings().weight
    theirs = draft_logits(config, other, "midlayer", normed, table, ids, 7, 1)[0].log_softmax(-1)
    ours = really_drafted(head, verifier, ids, 7, 1)[0]
    assert (ours - theirs)[ours.isfinite()].abs().max() > 0.05


def test_case_46_names_shapes_and_dtypes(tiny: Build, tiny_eagle3: Build, export_to: Build, read: Build) -> None:
    verifier = tiny("qwen3")
    head = tiny_eagle3(verifier, target_ids=SOME)
    config, tensors = read(export_to("vllm", head, verifier, dtype=torch.bfloat16))
    golden = {
        "fc.weight": [32, 96], "norm.weight": [32], "lm_head.weight": [5, 32], "d2t": [5], "t2d": [96],
        "midlayer.hidden_norm.weight": [32], "midlayer.input_layernorm.weight": [32],
        "midlayer.post_attention_layernorm.weight": [32], "midlayer.self_attn.q_proj.weight": [96, 64],
        "midlayer.self_attn.k_proj.weight": [48, 64], "midlayer.self_attn.v_proj.weight": [48, 64],
        "midlayer.self_attn.o_proj.weight": [32, 96], "midlayer.mlp.gate_proj.weight": [64, 32],
        "midlayer.mlp.up_proj.weight": [64, 32], "midlayer.mlp.down_proj.weight": [32, 64],
    }  # fmt: skip
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == golden
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    assert (dtypes.pop("d2t"), dtypes.pop("t2d")) == (torch.int64, torch.bool)
    assert set(dtypes.values()) == {torch.bfloat16}
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "embed_tokens.weight" not in tensors  # engines share the verifier's
    speculators = read(export_to("speculators", head, verifier, folder="other"))[1]
    assert speculators.keys() == {name.replace("midlayer", "layers.0") for name in golden}


def test_case_11_d2t_holds_offsets(tiny: Build, tiny_eagle3: Build, export_to: Build, read: Build) -> None:
    verifier = tiny("llama")
    _, tensors = read(export_to("sglang", tiny_eagle3(verifier, target_ids=torch.tensor([3, 7, 8, 20])), verifier))
    assert tensors["d2t"].tolist() == [3, 6, 6, 17]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == [3, 7, 8, 20]


def test_the_input_scale_is_folded_into_fc(tiny: Build, tiny_eagle3: Build, export_to: Build, read: Build) -> None:
    verifier = tiny("llama")
    head = tiny_eagle3(verifier)
    folded = read(export_to("vllm", head, verifier))[1]["fc.weight"]
    expected = head.fc.weight.double() * torch.linspace(0.5, 1.5, 96).double()[None]
    assert torch.equal(folded, expected.float())
    head.input_scale.fill_(1.0)
    assert torch.equal(read(export_to("vllm", head, verifier))[1]["fc.weight"], head.fc.weight)


def test_case_08_10_22_23_24_fields(tiny: Build, tiny_eagle3: Build, export_to: Build, read: Build) -> None:
    verifier = tiny("llama3rope", tie_word_embeddings=True)
    folder = export_to("vllm", tiny_eagle3(verifier), verifier)
    config, _ = read(folder)
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}  # fmt: skip
    assert config["rope_parameters"] == rope | {"rope_theta": 10_000.0}
    assert (config["rope_theta"], config["rope_scaling"]) == (10_000.0, rope)
    assert (config["head_dim"], config["max_position_embeddings"], config["num_hidden_layers"]) == (8, 256, 1)
    assert (config["vocab_size"], config["draft_vocab_size"], config["tie_word_embeddings"]) == (96, 48, False)
    modern = LlamaConfig.from_pretrained(folder)
    legacy = LlamaConfig(**{name: value for name, value in config.items() if name not in ("rope_parameters", "dtype")})
    for read_back in (modern, legacy):
        own = LlamaRotaryEmbedding(read_back).inv_freq
        assert torch.equal(own, verifier.decoder.rotary_emb.inv_freq)


def test_case_25_a_partly_rotating_verifier(tiny: Build, tiny_eagle3: Build, export_to: Build, read: Build) -> None:
    verifier = tiny("stablelm")
    config, _ = read(export_to("vllm", tiny_eagle3(verifier), verifier))
    assert "partial_rotary_factor" not in config["rope_parameters"]


def test_case_07_layer_indices_mean_what_the_engine_means(
    tiny: Build, tiny_eagle3: Build, export_to: Build, read: Build
) -> None:
    verifier = tiny("llama", num_hidden_layers=8)
    usual, other = tiny_eagle3(verifier, layers=(2, 4, 5)), tiny_eagle3(verifier, layers=(1, 3, 6))
    key = "eagle_aux_hidden_state_layer_ids"
    for engine in ("vllm", "sglang", "eagle", "tensorrt-llm"):
        config, _ = read(export_to(engine, usual, verifier))
        assert key not in config
        assert "eagle_config" not in config
    assert read(export_to("speculators", usual, verifier))[0][key] == [2, 4, 5]
    config, _ = read(export_to("vllm", other, verifier))
    assert (config[key], config["eagle_config"][key]) == ([1, 3, 6], [1, 3, 6])
    config, _ = read(export_to("sglang", other, verifier))
    assert config["eagle_config"][key] == [0, 2, 5]


def test_the_speculators_configuration(tiny: Build, tiny_eagle3: Build, export_to: Build, read: Build) -> None:
    verifier = tiny("qwen3")
    config, _ = read(export_to("speculators", tiny_eagle3(verifier), verifier))
    assert config["speculators_model_type"] == "eagle3"
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["norm_before_residual"] is False
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["speculators_config"] == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        "verifier": {"name_or_path": "owner/name", "architectures": ["Qwen3ForCausalLM"]},
    }


@pytest.mark.parametrize("family", ["gemma", "granite"])
def test_case_21_a_scaled_embedding_table_travels_along(
    family: str, tiny: Build, tiny_eagle3: Build, export_to: Build, read: Build
) -> None:
    verifier = tiny(family)
    head = tiny_eagle3(verifier)
    _, tensors = read(export_to("vllm", head, verifier))
    scale = {"gemma": 32**0.5, "granite": 12.0}[family]
    table = verifier.model.get_input_embeddings().weight * scale
    assert torch.allclose(tensors["embed_tokens.weight"], table, rtol=1e-6)
    for engine in ("sglang", "tensorrt-llm"):
        with pytest.raises(UserError, match="scales it; nearest alternative: --to vllm"):
            export_to(engine, head, verifier, folder=engine)


def medusa_as_vllm_loads_it(config: dict[str, Any], t: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """Logits [K, V] by the loader's rules: counts from the last matching key, biases only if told."""
    counts = {}
    for key, value in config.items():
        if "num" in key:
            counts["heads" if "heads" in key else "layers" if "layers" in key else key] = value
    found = []
    for h in range(counts["heads"]):
        z = hidden
        for block in range(counts["layers"]):
            y = t[f"blocks.{h}.layers.{block}.weight"] @ z
            y = y + t[f"blocks.{h}.layers.{block}.bias"] if config.get("medusa_fc_bias", False) else y
            z = z + y * torch.sigmoid(y)
        rows = t["lm_heads.0.weight" if config.get("original_lm_head") else f"lm_heads.{h}.weight"] @ z
        assert len(rows) == config["truncated_vocab_size"]
        assert "token_map" not in t  # it would stop the loader
        found.append(rows)
    return torch.stack(found)


@pytest.mark.parametrize("vocabulary", ["whole", "pruned"])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("family", ["llama", "granite"])
def test_case_48_medusa_for_vllm_gives_our_logits(
    family: str, lm_head: str, vocabulary: str, tiny: Build, tiny_medusa: Build, export_to: Build, read: Build, ids_of: Build
) -> None:
    """Granite divides its logits by 8: a shared lm_head carries that, an own one was started with it."""
    verifier = tiny(family)
    head = tiny_medusa(verifier, lm_head=lm_head, blocks=2, target_ids=SOME if vocabulary == "pruned" else None)
    config, tensors = read(export_to("vllm", head, verifier))
    assert [key for key in config if "num" in key] == ["num_heads", "num_hidden_layers"]
    assert (config["model_type"], config["architectures"]) == ("medusa", ["MedusaModel"])
    assert len([name for name in tensors if name.startswith("lm_heads")]) == (1 if lm_head == "shared" else 3)
    features = verifier.features(torch.tensor([ids_of(5, 9)]))
    session = head.begin(verifier, 1, 32)
    first = session.observe(features, torch.zeros(1, 9, dtype=torch.long), [9])
    ours = torch.full((3, 96), -math.inf)
    levels = [first, *(session.expand(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1))[:, 0] for _ in range(2))]
    ours[:, head.target_ids] = torch.cat(levels)
    raw = medusa_as_vllm_loads_it(config, tensors, features.last[0, -1])
    kept = ours.isfinite()
    assert raw[~kept].eq(0).all()
    theirs = raw.masked_fill(~kept, -math.inf).log_softmax(-1)
    assert (ours[kept] - theirs[kept]).abs().max() < 1e-5


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_medusa_in_the_original_layout(lm_head: str, tiny: Build, tiny_medusa: Build, export_to: Build, read: Build) -> None:
    verifier = tiny("llama")
    head = tiny_medusa(verifier, lm_head=lm_head, blocks=2)
    folder = export_to("medusa", head, verifier)
    config, tensors = read(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["SERVING.md", "config.json", "medusa_lm_head.safetensors"]
    assert config == {
        "medusa_num_heads": 3,
        "medusa_num_layers": 2,
        "base_model_name_or_path": "owner/name",
        "dtype": "float32",
    }
    expected = {f"{h}.{b}.linear.{part}" for h in range(3) for b in range(2) for part in ("weight", "bias")}
    assert tensors.keys() == expected | {f"{h}.2.weight" for h in range(3)}
    for h in range(3):
        assert torch.equal(tensors[f"{h}.1.linear.weight"], head.blocks[h][1].linear.weight)
        own = head.lm_heads[h].weight if lm_head == "own" else verifier.model.get_output_embeddings().weight
        assert torch.equal(tensors[f"{h}.2.weight"], own)


REFUSED = {
    ("sglang", "medusa"): r"this layout holds EAGLE-3 heads, this one is medusa; nearest alternative: --to vllm",
    ("speculators", "medusa"): r"this one is medusa; nearest alternative: --to vllm",
    ("tensorrt-llm", "medusa"): r"this one is medusa; nearest alternative: --to vllm \(TensorRT-LLM had Medusa",
    ("eagle", "medusa"): r"this one is medusa; nearest alternative: --to medusa",
    ("medusa", "eagle3"): r"this layout holds Medusa heads, this one is eagle3; nearest alternative: --to vllm",
    ("medusa", "pruned"): r"the whole vocabulary of 96, this head knows 5 tokens; nearest alternative: --to vllm",
    ("eagle", "layers"): r"reads the states \[2, 4, 5\], this head \[1, 3, 6\]; nearest alternative: --to vllm",
    ("tensorrt-llm", "layers"): r"reads \[2, 4, 5\], this head \[1, 3, 6\]; nearest alternative: --to vllm",
    ("speculators", "eagle1"): r"this layout holds EAGLE-3 heads, this one is eagle1; nearest alternative: --to vllm",
    ("tensorrt-llm", "eagle1"): r"this one is eagle1; nearest alternative: --to vllm",
    ("vllm", "mtp"): r"this layout holds EAGLE-3 heads, this one is mtp; nearest alternative: headstart eval",
    ("vllm", "fc_norm"): r"no place for the norms of EAGLE-3\.1",
    ("sglang", "norm_output"): r"no place for the norms of EAGLE-3\.1",
    ("vllm", "two"): r"build fc for 3 verifier states, this head reads 2; nearest alternative: train with three head\.layers",
    ("ollama", "eagle3"): r"unknown engine; known: vllm, sglang, speculators, eagle, medusa, tensorrt-llm",
}


@pytest.mark.parametrize(("engine", "which"), REFUSED)
def test_what_an_engine_cannot_serve_is_refused_with_the_nearest_alternative(
    engine: str, which: str, tiny: Build, tiny_medusa: Build, tiny_eagle3: Build, tiny_eagle1: Build, tiny_mtp: Build,
    export_to: Build, tmp_path: Path,
) -> None:  # fmt: skip
    verifier = tiny("llama", num_hidden_layers=8)
    head = {
        "medusa": lambda: tiny_medusa(verifier),
        "pruned": lambda: tiny_medusa(verifier, target_ids=SOME),
        "eagle3": lambda: tiny_eagle3(verifier, layers=(2, 4, 5)),
        "layers": lambda: tiny_eagle3(verifier, layers=(1, 3, 6)),
        "eagle1": lambda: tiny_eagle1(verifier),
        "mtp": lambda: tiny_mtp(verifier),
        "fc_norm": lambda: tiny_eagle3(verifier, layers=(2, 4, 5), fc_norm=True),
        "norm_output": lambda: tiny_eagle3(verifier, layers=(2, 4, 5), norm_output=True),
        "two": lambda: tiny_eagle3(verifier, layers=(1, 3)),
    }[which]()
    with pytest.raises(UserError, match=REFUSED[engine, which]) as caught:
        export_to(engine, head, verifier)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("engine", "kind"), [("speculators", "eagle3"), ("medusa", "medusa")])
def test_layouts_that_name_their_verifier_need_its_name(
    engine: str, kind: str, tiny: Build, tiny_medusa: Build, tiny_eagle3: Build, export_to: Build
) -> None:
    verifier = tiny("llama")
    head = tiny_medusa(verifier) if kind == "medusa" else tiny_eagle3(verifier)
    with pytest.raises(UserError, match="give its hub id: --verifier OWNER/NAME"):
        export_to(engine, head, verifier, name=None)


def named(name: str, adapter: str | None = None) -> Any:
    """A verifier of which only the names matter."""
    return SimpleNamespace(name=name, adapter=None if adapter is None else SimpleNamespace(name=adapter))


@pytest.mark.parametrize("name", ["builtin:smollm2-135m", "/models/llama", "./llama", "~/llama", "llama.gguf", "a/b/c"])
def test_case_60_paths_of_this_machine_are_no_names(name: str) -> None:
    assert public_name(named(name), None) is None
    assert public_name(named(name), "owner/name") == "owner/name"
    with pytest.raises(UserError, match="never by a path of this machine"):
        public_name(named("owner/name"), name)


def test_a_hub_id_is_a_name() -> None:
    assert public_name(named("HuggingFaceTB/SmolLM2-135M-Instruct"), None) == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_case_56_a_verifier_with_an_adapter_is_not_found_under_the_name_of_its_base() -> None:
    verifier = named("owner/base", "owner/lora")
    assert public_name(verifier, None) is None
    assert public_name(verifier, "owner/merged") == "owner/merged"
    with pytest.raises(UserError, match="that is the verifier without its adapter; give the hub id of the merged model"):
        public_name(verifier, "owner/base")
    assert "the base model owner/base with the LoRA adapter owner/lora:" in adapted("owner/base", "owner/lora")
    assert "the base model with the LoRA adapter of this run:" in adapted("/models/base", "/runs/x/head/adapter")


def test_an_earlier_export_is_replaced_and_nothing_else_is(
    tiny: Build, tiny_eagle3: Build, export_to: Build, read: Build
) -> None:
    verifier = tiny("llama")
    folder = export_to("speculators", tiny_eagle3(verifier), verifier)
    assert export_to("vllm", tiny_eagle3(verifier), verifier) == folder
    assert "speculators_config" not in read(folder)[0]
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds something else \(notes\.txt\)"):
        export_to("vllm", tiny_eagle3(verifier), verifier)
    assert (folder / "notes.txt").read_text() == "mine"


def test_others_may_read_it(tiny: Build, tiny_eagle3: Build, export_to: Build) -> None:
    folder = export_to("vllm", tiny_eagle3(tiny("llama")), tiny("llama"))
    assert {path.stat().st_mode & 0o444 for path in [folder, *folder.iterdir()]} == {0o444}


def test_a_place_that_cannot_be_written(tiny: Build, tiny_eagle3: Build, export_to: Build, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in ("file", "file/inside"):
        with pytest.raises(UserError, match="cannot be written"):
            export_to("vllm", tiny_eagle3(tiny("llama")), tiny("llama"), folder=folder)
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("folder", ["eagle-head", "My-EAGLE-3"])
def test_names_that_make_vllm_guess_wrong_are_refused(folder: str, tiny: Build, tiny_eagle3: Build, export_to: Build) -> None:
    with pytest.raises(UserError, match="for another method; nearest alternative: another name"):
        export_to("vllm", tiny_eagle3(tiny("llama")), tiny("llama"), folder=folder)


def test_serving_md_has_the_command(tiny: Build, tiny_eagle3: Build, tiny_medusa: Build, export_to: Build) -> None:
    verifier = tiny("llama", num_hidden_layers=8)
    head = tiny_eagle3(verifier, layers=(2, 4, 5))
    told = {engine: (export_to(engine, head, verifier) / "SERVING.md").read_text() for engine in (
        "vllm", "sglang", "speculators", "tensorrt-llm", "eagle")}  # fmt: skip
    assert ('vllm serve owner/name --speculative-config \'{"method": "eagle3", "model": "THIS_FOLDER", '
            '"num_speculative_tokens": 4}\'') in told["vllm"]  # fmt: skip
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path THIS_FOLDER" in told["sglang"]
    assert "\nvllm serve THIS_FOLDER\n" in told["speculators"]
    assert "decoding_type: Eagle3, max_draft_len: 4" in told["tensorrt-llm"]
    unnamed = (export_to("vllm", tiny_medusa(verifier), verifier, name=None) / "SERVING.md").read_text()
    assert "vllm serve VERIFIER " in unnamed
    assert "VERIFIER is the verifier, as the engine finds it." in unnamed
    assert '"method": "medusa"' in unnamed
