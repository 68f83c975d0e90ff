"""Tiny seeded verifiers and heads that every test can build in milliseconds, without a hub and without a GPU."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: no test may reach a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from small_runs import make_run, verifier_folder  # noqa: F401  (fixtures)
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.heads.base import DraftHead
from headstart.heads.batch import Batch
from headstart.heads.eagle1 import Eagle1Config, Eagle1Head
from headstart.heads.eagle3 import Eagle3Config, Eagle3Head
from headstart.heads.medusa import MedusaConfig, MedusaHead
from headstart.heads.mtp import new_mtp
from headstart.heads.mtp_base import MtpConfig, MtpHead
from headstart.heads.verifier import Features, Verifier

torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,  # large, so that greedy text varies instead of repeating one token
    "bos_token_id": 1,
    "eos_token_id": 95,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 64}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
HYBRID = ["sliding_attention"] * 3 + ["full_attention"]
GEMMA = {"head_dim": 8, "sliding_window": 6, "tie_word_embeddings": False}  # tied, it repeats one token
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}

# family -> (model type, what differs from the common sizes)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "llama3rope": ("llama", GROUPED | {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", GROUPED),
    "qwen2_hybrid": ("qwen2", GROUPED | {"use_sliding_window": True, "sliding_window": 6, "layer_types": HYBRID}),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 24}),
    "gpt2": ("gpt2", {"n_inner": 64}),
    "gemma": ("gemma", GROUPED | {"head_dim": 8, "tie_word_embeddings": False}),
    "gemma2": ("gemma2", GROUPED | GEMMA | {"final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", GROUPED | GEMMA | {"layer_types": HYBRID}),
    "mistral": ("mistral", GROUPED | {"head_dim": 8, "sliding_window": 6}),
    "granite": ("granite", GROUPED | {"logits_scaling": 8.0, "embedding_multiplier": 12.0}),
    "cohere": ("cohere", GROUPED | {"logit_scale": 0.0625}),
    "olmo2": ("olmo2", GROUPED),
    "phi3": ("phi3", GROUPED),
    "stablelm": ("stablelm", GROUPED | {"partial_rotary_factor": 0.25}),
    "gpt_neox": ("gpt_neox", {"intermediate_size": 64}),
    "mixtral": ("mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", GROUPED | EXPERTS | {"head_dim": 8, "num_experts": 4, "decoder_sparse_step": 1}),
    "llama_biased": ("llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", GROUPED | {"tie_word_embeddings": True}),
    "llama_wide": ("llama", GROUPED | {"head_dim": 12}),
    "phi": ("phi", GROUPED | {"partial_rotary_factor": 0.5}),  # its lm_head has a bias
    "cohere2": ("cohere2", GROUPED | {"sliding_window": 6, "layer_types": HYBRID, "logit_scale": 0.25}),
    "olmo3": ("olmo3", GROUPED | {"sliding_window": 6, "layer_types": HYBRID}),
    "gpt_oss": ("gpt_oss", GROUPED | {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2,
                                      "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "deepseek_v3": ("deepseek_v3", {"num_key_value_heads": 4, "intermediate_size": 64, "head_dim": 4, "n_routed_experts": 4,
                                    "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
                                    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
                                    "v_head_dim": 8, "first_k_dense_replace": 1}),
}  # fmt: skip


def build_verifier(family: str, seed: int = 0, **overrides: Any) -> Verifier:
    """A random model of a family as a Verifier; `overrides` go into its config."""
    model_type, own = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **SIZES | own | overrides)
    unfused = model_type == "gpt_oss" or getattr(config, "attn_logit_softcapping", None) is not None
    attention = "eager" if unfused else "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return Verifier(model, None, family)


def randomise(head: DraftHead, seed: int, scale: float = 0.15) -> None:
    """Every parameter random, norms around one: nothing may cancel by being zero or equal."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(1 + noise if isinstance(_owner(head, name), nn.RMSNorm) else noise)


def _owner(module: nn.Module, parameter: str) -> nn.Module:
    return module.get_submodule(parameter.rpartition(".")[0])


def pruned(vocab_size: int, seed: int = 7) -> torch.Tensor:
    """Half of the vocabulary, sorted, without id 0 and with the last one."""
    order = torch.randperm(vocab_size - 2, generator=torch.Generator().manual_seed(seed)) + 1
    return torch.cat([order[: vocab_size // 2 - 1], torch.tensor([vocab_size - 1])]).sort().values


def build_medusa(verifier: Verifier, seed: int = 1, target_ids: torch.Tensor | None = None, **fields: Any) -> MedusaHead:
    """A Medusa head with random weights: 3 heads, 1 block, own lm_heads, hard targets, the whole vocabulary."""
    facts = verifier.facts
    size = facts.vocab_size if target_ids is None else len(target_ids)
    values: dict[str, Any] = {"heads": 3, "blocks": 1, "lm_head": "own", "targets": "hard", "decay": 0.8}
    sizes = {"hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size, "draft_vocab_size": size}
    head = MedusaHead(MedusaConfig(**values | sizes | fields), target_ids)
    randomise(head, seed)
    return head


def build_eagle3(verifier: Verifier, seed: int = 2, target_ids: torch.Tensor | None = None, **fields: Any) -> Eagle3Head:
    """An EAGLE-3 head with random weights: states 1, 2, 3, four steps, half of the vocabulary (see `pruned`)."""
    facts = verifier.facts
    ids = pruned(facts.vocab_size) if target_ids is None else target_ids
    values: dict[str, Any] = {"layers": (1, 2, 3), "depth": 4, "decay": 0.8, "draft_vocab_size": len(ids)}
    head = Eagle3Head(Eagle3Config(**values | layer_sizes(verifier) | fields), ids)
    randomise(head, seed)
    with torch.no_grad():
        head.input_scale.copy_(torch.linspace(0.5, 1.5, head.fc.in_features))
        head.fc.weight *= 0.06  # a tiny verifier's states are large: without this the residual drowns the attention
    return head


def layer_sizes(verifier: Verifier) -> dict[str, Any]:
    """The config fields of a head's decoder layers."""
    names = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
             "rms_norm_eps", "max_position_embeddings", "rope_parameters")  # fmt: skip
    return {name: getattr(verifier.facts, name) for name in names}


def build_eagle1(verifier: Verifier, seed: int = 3, target_ids: torch.Tensor | None = None, **fields: Any) -> Eagle1Head:
    """An EAGLE-1 head with random weights, without noise, over the whole vocabulary."""
    size = verifier.facts.vocab_size if target_ids is None else len(target_ids)
    values: dict[str, Any] = {"depth": 1, "decay": 1.0, "cross_entropy": 0.1, "top_tokens": 0, "noise": 0.0,
                              "noise_by_length": False, "draft_vocab_size": size}  # fmt: skip
    head = Eagle1Head(Eagle1Config(**values | layer_sizes(verifier) | fields), target_ids)
    randomise(head, seed)
    return head


def build_mtp(
    verifier: Verifier, form: str = "recursive", seed: int = 4, target_ids: torch.Tensor | None = None, **fields: Any
) -> MtpHead:
    """A multi-token prediction head with random weights, four deep, over the whole vocabulary."""
    size = verifier.facts.vocab_size if target_ids is None else len(target_ids)
    values: dict[str, Any] = {"form": form, "depth": 4, "decay": 0.6, "weight": 1.0, "draft_vocab_size": size}
    head = new_mtp(MtpConfig(**values | layer_sizes(verifier) | fields), target_ids)
    randomise(head, seed)
    return head


def random_ids(seed: int, length: int, vocab_size: int = SIZES["vocab_size"]) -> list[int]:
    """Token ids without the stop and padding ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size - 1, (length,), generator=generator).tolist()


def build_batch(rows: Sequence[Sequence[int]], spans: Sequence[Sequence[tuple[int, int]]], pad: int = 0) -> Batch:
    """Right-padded rows; spans [start, end) of each row are answers."""
    size = max(map(len, rows))
    ids = torch.full((len(rows), size), pad)
    mask = torch.zeros(len(rows), size, dtype=torch.bool)
    for b, (row, its) in enumerate(zip(rows, spans, strict=True)):
        ids[b, : len(row)] = torch.tensor(row)
        for start, end in its:
            assert 0 <= start < end <= len(row)
            mask[b, start:end] = True
    return Batch(ids, mask, torch.tensor([len(row) for row in rows]))


def build_features(verifier: Verifier, batch: Batch, layers: Sequence[int] = ()) -> Features:
    """What training reads, taken from transformers itself: hidden_states and the argmax of the model's own logits."""
    with torch.no_grad():
        out = verifier.model(input_ids=batch.ids, output_hidden_states=True, use_cache=False)
    states = out.hidden_states
    answers_next = torch.cat([batch.mask[:, 1:], torch.zeros_like(batch.mask[:, :1])], 1)
    choice = torch.where(answers_next, out.logits.argmax(-1), -1)
    side_by_side = torch.cat([states[i] for i in layers], -1) if layers else states[-1][..., :0]
    return Features(states[-1], side_by_side, choice)


@pytest.fixture
def ids_of() -> Callable[..., list[int]]:
    """`ids_of(seed, length)`: random token ids."""
    return random_ids


@pytest.fixture
def batch_of() -> Callable[..., Batch]:
    """`batch_of(rows, spans, pad=0)`: a right-padded batch with answer spans [start, end)."""
    return build_batch


@pytest.fixture
def features_of() -> Callable[..., Features]:
    """`features_of(verifier, batch, layers=())`: last states, layer states and choices, by transformers alone."""
    return build_features


@pytest.fixture
def tiny() -> Callable[..., Verifier]:
    """`tiny(family, seed=0, **config)`: a random verifier."""
    return build_verifier


@pytest.fixture
def tiny_medusa() -> Callable[..., MedusaHead]:
    """`tiny_medusa(verifier, seed=1, target_ids=None, **config)`: a random Medusa head that fits the verifier."""
    return build_medusa


@pytest.fixture
def tiny_eagle3() -> Callable[..., Eagle3Head]:
    """`tiny_eagle3(verifier, seed=2, target_ids=None, **config)`: a random EAGLE-3 head that fits the verifier."""
    return build_eagle3


@pytest.fixture
def tiny_eagle1() -> Callable[..., Eagle1Head]:
    """`tiny_eagle1(verifier, seed=3, target_ids=None, **config)`: a random EAGLE-1 head that fits the verifier."""
    return build_eagle1


@pytest.fixture
def tiny_mtp() -> Callable[..., MtpHead]:
    """`tiny_mtp(verifier, form="recursive", seed=4, target_ids=None, **config)`: a random multi-token prediction head."""
    return build_mtp


@pytest.fixture
def sizes() -> dict[str, Any]:
    """The config fields that every tiny verifier shares."""
    return dict(SIZES)


@pytest.fixture
def half_vocabulary() -> torch.Tensor:
    """48 of 96 verifier ids, sorted, with the stop token 95."""
    return pruned(SIZES["vocab_size"])


@pytest.fixture
def keep_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Tensor.float()` leaves float64 alone, so that a loss that asks for float32 states can be checked in float64."""
    to_float = torch.Tensor.float

    def float_unless_double(x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype == torch.float64 else to_float(x)

    monkeypatch.setattr(torch.Tensor, "float", float_unless_double)
