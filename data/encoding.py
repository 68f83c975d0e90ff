"""Hidden states as they lie on disk: bfloat16, float32, or one byte a value with a float32 scale for each row."""

import torch
from torch import Tensor

STORED = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"float8": 448.0, "int8": 127.0}  # what a row's largest magnitude becomes


def encode(states: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """Values [..., d] of type STORED[dtype] and, for the one-byte types, scales [...]: states = values * scale, nearly."""
    if dtype not in LARGEST:
        return states.to(STORED[dtype]), None
    exact = states.float()
    scale = exact.abs().amax(-1) / LARGEST[dtype]
    scale = torch.where(scale > 0, scale, 1.0)
    values = exact / scale[..., None]
    return (values.round() if dtype == "int8" else values).to(STORED[dtype]), scale


def decode(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """States [..., d] of the given type."""
    return values.to(dtype) if scale is None else (values.float() * scale[..., None]).to(dtype)


def row_bytes(width: int, dtype: str) -> int:
    """Bytes of one row of `width` values, its scale included."""
    return width * STORED[dtype].itemsize + (4 if dtype in LARGEST else 0)
