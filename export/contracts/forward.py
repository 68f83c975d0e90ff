"""What an engine computes from the tensors of a folder, written from the formulas alone: the other side of the comparison.

Shapes: T tokens, d hidden size, n states read, Q draft vocabulary, K drafted tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .fields import head_dim_of, rope_of


def rotary(layer: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, head_dim], from the folder's fields as a transformers-based engine reads them."""
    rope, size = rope_of(dict(layer)), head_dim_of(dict(layer))
    factor = 1.0
    if rope["rope_type"] == "default":
        inverse = rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    else:
        config = LlamaConfig(hidden_size=size, num_attention_heads=1, head_dim=size, rope_parameters=rope,
                             max_position_embeddings=layer["max_position_embeddings"])  # fmt: skip
        inverse, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    angles = positions.float()[:, None] * inverse[None]
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * factor, angles.sin() * factor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [heads, T, head_dim], rotated by halves."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def eagle3_layer(
    tensors: Mapping[str, Tensor], layer: Mapping[str, Any], hidden: Tensor, embeddings: Tensor, norm_before_residual: bool
) -> Tensor:
    """The draft layer over a whole sequence: hidden, embeddings [T, d] -> outputs before the final norm [T, d].

    tensors: the layer's, without a prefix. norm_before_residual: the residual is the *normed* hidden state.
    """
    eps = layer["rms_norm_eps"]
    normed = rms_norm(hidden, tensors["hidden_norm.weight"], eps)
    residual = normed if norm_before_residual else hidden
    x = torch.cat([rms_norm(embeddings, tensors["input_layernorm.weight"], eps), normed], -1)
    return decoder_layer(tensors, layer, residual, x)


def decoder_layer(tensors: Mapping[str, Tensor], layer: Mapping[str, Any], residual: Tensor, x: Tensor) -> Tensor:
    """Causal attention that reads x [T, i], and the MLP, on the residual stream [T, d]. tensors: without a prefix."""
    eps, length = layer["rms_norm_eps"], len(residual)
    size = head_dim_of(dict(layer))
    cos, sin = rotary(layer, torch.arange(length))

    def heads(name: str) -> Tensor:
        return (x @ tensors[f"self_attn.{name}_proj.weight"].T).view(length, -1, size).transpose(0, 1)

    q, k, v = turn(heads("q"), cos, sin), turn(heads("k"), cos, sin), heads("v")
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(-1, -2) / size**0.5
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
    out = residual + mixed @ tensors["self_attn.o_proj.weight"].T
    z = rms_norm(out, tensors["post_attention_layernorm.weight"], eps)
    gated = functional.silu(z @ tensors["mlp.gate_proj.weight"].T) * (z @ tensors["mlp.up_proj.weight"].T)
    return out + gated @ tensors["mlp.down_proj.weight"].T


def eagle3_chain(
    tensors: Mapping[str, Tensor], layer: Mapping[str, Any], prefix: str, norm_before_residual: bool, states: Tensor,
    embeddings: Tensor, ids: Sequence[int], start: int, steps: int,
) -> Tensor:  # fmt: skip
    """Logits [K, Q] of drafting from position `start` with the given tokens: step k predicts token start + 2 + k.

    states: [T, n * d], the verifier's; embeddings: the table [V, d] of the draft layer; ids: at least start + 1 + K tokens.
    """
    own = {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}
    parts = {name.removeprefix(f"{prefix}."): tensor for name, tensor in own.items()}
    hidden = states[: start + 1].float() @ own["fc.weight"].T
    logits = []
    for step in range(steps):
        following = torch.tensor(list(ids[1 : start + 2 + step]))
        out = eagle3_layer(parts, layer, hidden, embeddings[following].float(), norm_before_residual)[-1:]
        logits.append(rms_norm(out, own["norm.weight"], layer["rms_norm_eps"])[0] @ own["lm_head.weight"].T)
        hidden = torch.cat([hidden, out])
    return torch.stack(logits)


def eagle1_chain(
    tensors: Mapping[str, Tensor], layer: Mapping[str, Any], last: Tensor, embeddings: Tensor, ids: Sequence[int], start: int,
    steps: int,
) -> Tensor:  # fmt: skip
    """What EAGLE-1 gives the verifier's lm_head, [K, d], when drafting from `start` with the given tokens.

    last: [T, d], the verifier's states after its final norm; embeddings and ids as in `eagle3_chain`.
    """
    own = {name.removeprefix("layers.0."): tensor.float() for name, tensor in tensors.items()}
    hidden = last[: start + 1].float()
    outputs = []
    for step in range(steps):
        following = torch.tensor(list(ids[1 : start + 2 + step]))
        joined = functional.linear(torch.cat([embeddings[following].float(), hidden], -1), own["fc.weight"], own.get("fc.bias"))
        out = decoder_layer(own, layer, joined, joined)[-1:]
        outputs.append(out[0])
        hidden = torch.cat([hidden, out])
    return torch.stack(outputs)


def medusa_logits(blocks: Sequence[tuple[Tensor, Tensor | None]], output: Tensor, hidden: Tensor) -> Tensor:
    """Logits [T, Q] of one head: residual blocks (weight, bias) over hidden [T, d], then its output layer [Q, d]."""
    z = hidden.float()
    for weight, bias in blocks:
        z = z + functional.silu(functional.linear(z, weight.float(), None if bias is None else bias.float()))
    return z @ output.float().T
