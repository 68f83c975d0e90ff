"""Read published heads: EAGLE-1 and EAGLE-3 in the plain layouts, EAGLE-3 in speculators', Medusa in the original and vLLM's.

Shapes: d hidden size, Q draft vocabulary, V verifier vocabulary.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..heads.base import DraftHead, check_fits
from ..heads.eagle1 import Eagle1Config, Eagle1Head
from ..heads.eagle3 import Eagle3Config, Eagle3Head
from ..heads.medusa import MedusaConfig, MedusaHead
from ..heads.verifier import Verifier
from .contracts import eagle1, eagle3, medusa
from .contracts.fields import head_dim_of, kv_heads_of, rope_of
from .contracts.folder import Folder, read_folder

DEPTH, DECAY = 7, 0.8  # what no layout tells: steps of the training-time test, and the loss weights


def read_head(path: Path, verifier: Verifier, engine: str, allow_pickle: bool = False) -> DraftHead:
    """The head of a published folder, float32 on the CPU. engine: whose layer indices an EAGLE-3 folder holds.

    Raises UserError when there is none, it is damaged, made for another verifier, or does what our heads do not.
    """
    folder = read_folder(path, allow_pickle)
    if folder.is_medusa:
        return read_medusa(folder, verifier).eval()
    folder = without_prefix(folder)
    head = read_eagle1(folder, verifier) if folder.is_eagle1 else read_eagle3(folder, verifier, engine)
    return head.eval()


def read_eagle1(folder: Folder, verifier: Verifier) -> Eagle1Head:
    missing = [name for name in eagle3.SIZES if not isinstance(folder.layer.get(name), int | float)]
    if missing:
        raise UserError(f"{folder.path}: no EAGLE-1 head: config.json has no {', '.join(missing)}")
    expected = eagle1.expected_shapes(folder, bias=False)
    check_shapes(folder, expected)
    bias = folder.tensors.get("fc.bias")
    if bias is not None and bool(bias.any()):
        raise UserError(f"{folder.path}: its fc has a bias; heads here, and vLLM, have none")
    for name in sorted(folder.tensors.keys() - expected.keys() - {"fc.bias", "embed_tokens.weight"}):
        raise UserError(f"{folder.path}: tensor {name} is unknown")
    sizes = layer_sizes(folder, verifier, folder.layer["vocab_size"])
    config = Eagle1Config(depth=1, decay=1.0, cross_entropy=0.1, top_tokens=0, noise=0.1, noise_by_length=False, **sizes)
    check_fits(config, verifier.facts, verifier.name)
    check_table(folder, verifier)
    head = Eagle1Head(config)
    own = {name.replace("layers.0.", "layer."): folder.tensors[name].float() for name in expected}
    head.load_state_dict(own | {"target_ids": head.target_ids})
    return head


def layer_sizes(folder: Folder, verifier: Verifier, drafted: int) -> dict[str, Any]:
    """The fields that heads with a decoder layer share."""
    layer = folder.layer
    same = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size", "rms_norm_eps")
    return {name: layer[name] for name in same} | {
        "draft_vocab_size": drafted,
        "num_key_value_heads": kv_heads_of(layer),
        "head_dim": head_dim_of(layer),
        "max_position_embeddings": layer.get("max_position_embeddings") or verifier.facts.max_position_embeddings,
        "rope_parameters": rope_of(layer),
    }


def read_eagle3(folder: Folder, verifier: Verifier, engine: str) -> Eagle3Head:
    engine = "speculators" if folder.is_speculators else engine
    if engine not in eagle3.ENGINES:
        raise UserError(f"--engine {engine}: unknown engine; known: {', '.join(eagle3.ENGINES)}")
    for reason in inexpressible(folder, engine):
        raise UserError(f"{folder.path}: {reason}")
    prefix = eagle3.prefix_of(folder)
    expected = eagle3.expected_shapes(folder, prefix)
    check_shapes(folder, expected)
    ids = draft_ids(folder)
    config = Eagle3Config(
        layers=eagle3.captured_layers(folder, eagle3.ENGINES[engine], verifier.facts.num_hidden_layers),
        depth=speculative_tokens(folder.config) or DEPTH,
        decay=DECAY,
        **layer_sizes(folder, verifier, len(ids)),
    )
    n = verifier.facts.num_hidden_layers
    if len(config.layers) != eagle3.STATES or not all(1 <= i < n for i in config.layers):
        raise UserError(f"{folder.path}: its layer indices mean the states entering {list(config.layers)}; a verifier of {n} "
                        "layers needs three between 1 and the last")  # fmt: skip
    check_fits(config, verifier.facts, verifier.name)
    check_table(folder, verifier)
    head = Eagle3Head(config, ids)
    own = {name.replace(f"{prefix}.", "midlayer."): folder.tensors[name].float() for name in expected}
    head.load_state_dict(own | {"target_ids": ids, "input_scale": torch.ones_like(head.input_scale)})
    return head


def without_prefix(folder: Folder) -> Folder:
    """Some trainers keep `model.` before every name but the lm_head's."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in folder.tensors.items()}
    return Folder(folder.path, folder.config, tensors, folder.weights)


def inexpressible(folder: Folder, engine: str) -> Iterator[str]:
    """What our EAGLE-3 head does not do, or cannot be told from the folder."""
    layer, config = folder.layer, folder.config
    missing = [name for name in eagle3.SIZES if not isinstance(layer.get(name), int | float)]
    if missing:
        yield f"no EAGLE-3 head: config.json has no {', '.join(missing)}"
        return
    if "fc.weight" not in folder.tensors or "lm_head.weight" not in folder.tensors:
        kind = "fc" if "fc.weight" not in folder.tensors else "lm_head"
        yield f"no EAGLE-3 head: tensor {kind}.weight is missing"
    if layer.get("num_hidden_layers", 1) != 1:
        yield f"its draft model has {layer['num_hidden_layers']} layers; heads here have one"
    if eagle3.norm_before_residual(folder, eagle3.ENGINES[engine]):
        yield "its residual is the normed hidden state (norm_before_residual); heads here keep the one before the norm"
    for name in ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias", "bias"):
        if config.get(name) or layer.get(name):
            yield f"{name} is true; no published head with such a part can be read"
    if config.get("target_hidden_size") not in (None, layer["hidden_size"]):
        yield "its hidden size differs from the verifier's; heads here share it"
    if layer.get("hidden_act", "silu") != "silu":
        yield f"its activation is {layer['hidden_act']}; heads here use silu"
    known = eagle3.expected_shapes(folder, eagle3.prefix_of(folder)).keys() | {"d2t", "t2d", "embed_tokens.weight"}
    for name in sorted(folder.tensors.keys() - known):
        yield f"tensor {name} is unknown"


def check_shapes(folder: Folder, expected: dict[str, list[int]]) -> None:
    for name, shape in expected.items():
        if name not in folder.tensors:
            raise UserError(f"{folder.path}: tensor {name} is missing")
        if list(folder.tensors[name].shape) != shape:
            raise UserError(f"{folder.path}: tensor {name} is {list(folder.tensors[name].shape)}, config.json says {shape}")


def draft_ids(folder: Folder) -> Tensor:
    """[Q], the verifier id of every draft id. d2t holds offsets."""
    rows, size = folder.config.get("draft_vocab_size") or folder.layer["vocab_size"], folder.layer["vocab_size"]
    d2t = folder.tensors.get("d2t")
    if d2t is None:
        if rows != size:
            raise UserError(f"{folder.path}: drafts {rows} of {size} tokens, but tensor d2t, which says which, is missing")
        return torch.arange(size)
    if list(d2t.shape) != [rows]:
        raise UserError(f"{folder.path}: tensor d2t is {list(d2t.shape)}, draft_vocab_size is {rows}")
    ids = d2t.long() + torch.arange(rows)
    for fault in eagle3.check_offsets(
        ids, folder.tensors.get("t2d", torch.zeros(size).index_fill(0, ids % size, 1).bool()), size
    ):
        raise UserError(f"{folder.path}: {fault}")
    return ids


def speculative_tokens(config: dict[str, Any]) -> int | None:
    try:
        return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def check_table(folder: Folder, verifier: Verifier) -> None:
    """An embedding table of its own would be lost: heads here read the verifier's."""
    table = folder.tensors.get("embed_tokens.weight")
    if table is None:
        return
    ids = torch.arange(verifier.facts.vocab_size, device=verifier.device)
    if list(table.shape) != [len(ids), verifier.facts.hidden_size] or not torch.allclose(
        verifier.embed(ids).float().cpu(), table.float(), rtol=1e-2, atol=1e-4
    ):
        raise UserError(f"{folder.path}: its embedding table is not the verifier's; heads here share the verifier's")


def read_medusa(folder: Folder, verifier: Verifier) -> MedusaHead:
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in folder.tensors.items()}
    engine = "medusa" if "medusa_num_heads" in folder.config else "vllm"
    weights = "medusa_lm_head.safetensors" if engine == "medusa" else "model.safetensors"
    folder = Folder(folder.path, folder.config, tensors, weights)
    faults = ("names:", "shapes:", "fields: medusa", "fields: hidden", "fields: vocab", "token_map:", "counts:")
    for fault in medusa.broken_rules(folder, engine):
        if fault.startswith(faults):
            raise UserError(f"{folder.path}: {fault}")
    parsed = medusa.parse(folder, engine)
    rows, size = parsed.outputs[0].shape
    ids = torch.arange(rows) if parsed.target_ids is None else parsed.target_ids.long()
    config = MedusaConfig(
        hidden_size=size,
        vocab_size=folder.config.get("vocab_size", rows) if engine == "vllm" else rows,
        heads=len(parsed.blocks),
        blocks=len(parsed.blocks[0]),
        lm_head="own",
        targets="hard",
        decay=DECAY,
        draft_vocab_size=rows,
    )
    check_fits(config, verifier.facts, verifier.name)
    shared = engine == "vllm" and bool(folder.config.get("original_lm_head", False))
    return fill_medusa(config, ids, parsed, verifier, shared)


def fill_medusa(config: MedusaConfig, ids: Tensor, parsed: medusa.Parsed, verifier: Verifier, shared: bool) -> MedusaHead:
    """A shared output layer that is the verifier's own stays shared; any other becomes each head's own."""
    if shared:
        whole = MedusaHead(config.model_copy(update={"lm_head": "shared"}), ids)
        its = whole.to(verifier.device).verifier_weight(verifier).cpu().to(parsed.outputs[0].dtype)
        if torch.equal(its, parsed.outputs[0]):
            config = whole.config
    head = MedusaHead(config, ids)
    own = {"target_ids": ids}
    for h, blocks in enumerate(parsed.blocks):
        for b, (weight, bias) in enumerate(blocks):
            own[f"blocks.{h}.{b}.linear.weight"] = weight.float()
            own[f"blocks.{h}.{b}.linear.bias"] = torch.zeros(len(weight)) if bias is None else bias.float()
        if config.lm_head == "own":
            own[f"lm_heads.{h}.weight"] = parsed.outputs[h].float()
    head.load_state_dict(own)
    return head
