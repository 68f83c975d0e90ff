"""Multi-token prediction modules that a verifier's files bring and transformers leaves out, read as blocks of an MtpHead.

Known names: model.layers.{n + i}.* behind the verifier's n layers (DeepSeek-V3, GLM-4-MoE), with enorm, hnorm, eh_proj over
cat(embedding, hidden) and shared_head; model.mtp_layers.{i}.* (MiMo), with token_layernorm, hidden_layernorm, input_proj over
cat(hidden, embedding) and final_layernorm. The layer inside must be a Llama-like one of the verifier's sizes.

Shapes: d hidden size, V rows of the verifier's lm_head.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from ..errors import UserError, first_line
from .loading import resolve
from .mtp_base import MtpHead
from .verifier import Verifier

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # in a config: how many modules there are
OURS = {
    "enorm": "embedding_norm", "hnorm": "hidden_norm", "shared_head.norm": "norm",
    "token_layernorm": "embedding_norm", "hidden_layernorm": "hidden_norm", "final_layernorm": "norm",
}  # fmt: skip
TABLES = {"embed_tokens.weight", "shared_head.head.weight"}  # the verifier's own once more, or heads here cannot follow
FOREIGN = {
    r"\.experts\.|mlp\.gate\.|shared_expert": "a mixture of experts",
    r"_a_proj|_b_proj|kv_a_": "latent attention (MLA)",
    r"[qk]_norm": "norms of queries and keys",
}  # patterns of tensors that a Llama-like layer does not have


def read_own_modules(verifier: Verifier, count: int) -> list[dict[str, Tensor]]:
    """State dicts of the first `count` modules, for Blocks with `joins`. Raises UserError where there are none such."""
    config, layers = verifier.config, verifier.facts.num_hidden_layers
    there = next((number for name in COUNTS if (number := getattr(config, name, None))), 0)
    if there < count:
        raise refusal(verifier, f"it brings {there} modules (by its config's {COUNTS[0]}), the recipe asks for {count}")
    found = read_tensors(verifier.name, re.compile(rf"model\.(layers\.({'|'.join(str(layers + i) for i in range(there))})|"
                                                   r"mtp_layers\.\d+)\.|mtp\.").match)  # fmt: skip
    if any(name.startswith("mtp.") for name in found):
        raise refusal(verifier, "its modules (mtp.*) have gated attention and norms of another kind")
    if getattr(config, "hidden_act", "silu") != "silu":
        raise refusal(verifier, f"its activation is {config.hidden_act}")
    if (verifier.facts.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        raise refusal(verifier, "its layers turn a part of each head only")
    modules = []
    for i in range(count):
        behind = f"model.layers.{layers + i}."
        prefix = behind if f"{behind}eh_proj.weight" in found else f"model.mtp_layers.{i}."
        own = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
        if not own:
            raise refusal(verifier, f"its config tells of {there} modules, but its files hold no {prefix}*")
        modules.append(as_block(own, verifier, i))
    return modules


def as_block(own: dict[str, Tensor], verifier: Verifier, number: int) -> dict[str, Tensor]:
    """One module's tensors, float32, under the names of our Block."""
    for pattern, what in FOREIGN.items():
        if any(re.search(pattern, name) for name in own):
            raise refusal(verifier, f"its module {number} has {what}")
    for name in TABLES & own.keys():
        its = verifier.embedding_table if name == "embed_tokens.weight" else verifier.lm_head.weight
        if own[name].shape != its.shape or not torch.allclose(own[name].float(), its.float().cpu(), rtol=1e-2, atol=1e-4):
            raise refusal(verifier, f"its module {number} has a {name} that is not the verifier's")
    block = {}
    for name, tensor in own.items():
        stem, _, kind = name.rpartition(".")
        if name == "eh_proj.weight":
            embedding, hidden = tensor.float().chunk(2, 1)
            block["proj.weight"] = torch.cat([hidden, embedding], 1)
        elif name == "input_proj.weight":
            block["proj.weight"] = tensor.float()
        elif stem in OURS:
            block[f"{OURS[stem]}.{kind}"] = tensor.float()
        elif name not in TABLES and not name.endswith("rotary_emb.inv_freq"):  # old files hold what is computed
            block[f"layer.{name}"] = tensor.float()
    return block


def fill(head: MtpHead, modules: list[dict[str, Tensor]], verifier: Verifier) -> None:
    """Copy the modules into the head's blocks, tensor by tensor."""
    for number, (block, own) in enumerate(zip(head.blocks, modules, strict=True)):
        wanted = block.state_dict()
        for name in sorted(wanted.keys() | own.keys()):
            if name not in own or name not in wanted:
                raise refusal(verifier, f"its module {number} has {'no' if name in wanted else 'a'} {name}")
            if own[name].shape != wanted[name].shape:
                sizes = f"{list(own[name].shape)}, not {list(wanted[name].shape)} as its other layers"
                raise refusal(verifier, f"its module {number} has a {name} of {sizes}")
        block.load_state_dict(own)


def has_bias(modules: list[dict[str, Tensor]]) -> bool:
    return any(name.endswith("q_proj.bias") for name in modules[0])


def read_tensors(spec: str, wanted: Callable[[str], object]) -> dict[str, Tensor]:
    """Of a verifier's safetensors files, the tensors whose names are wanted; only files with such a tensor are opened."""
    source = resolve(spec)
    if "gguf_file" in source:
        raise UserError(f"verifier {spec}: head.start: a .gguf file is not searched for modules; name the original folder")
    place = source["pretrained_model_name_or_path"]
    found: dict[str, Tensor] = {}
    try:
        index = cached_file(place, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
        files = {"model.safetensors"}
        if index is not None:
            places: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            files = {file for name, file in places.items() if wanted(name)}
        for file in sorted(files):
            with safe_open(cached_file(place, file), "pt") as tensors:
                found |= {name: tensors.get_tensor(name) for name in tensors.keys() if wanted(name)}  # noqa: SIM118
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"verifier {spec}: head.start: its files cannot be read: {first_line(error)}") from None
    return found


def refusal(verifier: Verifier, reason: str) -> UserError:
    return UserError(f"verifier {verifier.name}: head.start: {reason}; heads here cannot start from that, leave head.start out")
