"""The parts of a Llama-like decoder layer that draft heads share: RMS norm, rotary positions, attention, gated MLP.

Shapes: B rows, T tokens, H heads, G key/value heads, D head size, d hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class RotaryPositions(nn.Module):
    """cos and sin of the verifier's own rotary embedding (scaling included), over the whole head size."""

    def __init__(self, head_dim: int, parameters: dict[str, Any] | None, max_position_embeddings: int) -> None:
        super().__init__()
        parameters = {"rope_type": "default", "rope_theta": 10_000.0} | (parameters or {})
        parameters.pop("partial_rotary_factor", None)  # the draft layer rotates every dimension
        config = LlamaConfig(
            hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=parameters,
            max_position_embeddings=max_position_embeddings,
        )  # fmt: skip
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [B, T] -> cos, sin: [B, 1, T, D]."""
        cos, sin = self.rotary(torch.zeros((), device=positions.device), positions)
        return cos[:, None], sin[:, None]


def rotate(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_BHTD.chunk(2, -1)
    return x_BHTD * cos + torch.cat([-second, first], -1) * sin


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query projections; `project` and `attend` are apart because training attends in a form of its own."""

    def __init__(self, inputs: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.q_proj = nn.Linear(inputs, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def split(self, x_BTh: Tensor) -> Tensor:
        """[B, T, n·D] -> [B, n, T, D]."""
        return x_BTh.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self.split(self.q_proj(x)), cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(self.split(self.k_proj(x)), cos, sin), self.split(self.v_proj(x))

    def merge(self, x_BHTD: Tensor) -> Tensor:
        return self.o_proj(x_BHTD.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """A layer after its attention input is made: attention, norm, MLP, with residuals. How the input is made differs.

    norms: names of RMS norms [d] that the input needs; `inputs`: size of what q, k and v read.
    """

    input_layernorm: nn.RMSNorm
    hidden_norm: nn.RMSNorm

    def __init__(
        self, inputs: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, eps: float,
        norms: Sequence[str],
    ) -> None:  # fmt: skip
        super().__init__()
        for name in norms:
            self.add_module(name, nn.RMSNorm(hidden, eps))
        self.self_attn = Attention(inputs, hidden, heads, kv_heads, head_dim)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = Mlp(hidden, intermediate)

    def finish(self, residual: Tensor, attended_BHTD: Tensor) -> Tensor:
        residual = residual + self.self_attn.merge(attended_BHTD)
        return residual + self.mlp(self.post_attention_layernorm(residual))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of q [B, H, T, D] over k, v [B, G, S, D] under an additive mask [B, 1, T, S]; None is causal, with T = S."""
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
