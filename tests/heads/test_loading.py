"""From names to devices and precisions."""

import pytest
import torch

from headstart.errors import UserError, first_line
from headstart.heads.loading import resolve_device, resolve_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ({}, torch.float32),
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"bf16": True}, torch.bfloat16),  # ARM
    ],
)
def test_auto_is_bfloat16_where_the_cpu_multiplies_in_it(
    has: dict[str, bool], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert resolve_dtype("auto", CPU) == expected


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_named_precision_is_that_one(name: str) -> None:
    assert resolve_dtype(name, CPU) == resolve_dtype(getattr(torch, name), CPU) == getattr(torch, name)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(UserError, match=r"^device cuda:1: no CUDA device is visible; use device: cpu or auto$"):
        resolve_device("cuda:1")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"^device mps: this machine has none; use device: cpu or auto$"):
        resolve_device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match=r"^device cuda:2: the last CUDA device here is cuda:1$"):
        resolve_device("cuda:2")


@pytest.mark.parametrize(
    ("said", "told"),
    [("one\ntwo", "one"), ("\n  one of: \n\n two\nthree", "one of: two"), ("", "ValueError"), (" \n", "ValueError")],
)
def test_what_a_library_says_becomes_one_line(said: str, told: str) -> None:
    assert first_line(ValueError(said)) == told
