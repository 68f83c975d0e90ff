"""From a verifier's name (hub id, folder, .gguf file, `builtin:`) to its transformers model and tokenizer."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ..errors import UserError, first_line
from .builtin import builtin_folder, builtin_tokenizer

transformers_logging.disable_progress_bar()


def resolve(spec: str) -> dict[str, str]:
    """The from_pretrained arguments of a verifier's name."""
    if spec.startswith("builtin:"):
        return {"pretrained_model_name_or_path": str(builtin_folder(spec.removeprefix("builtin:")))}
    path = Path(spec).expanduser()
    if spec.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"verifier {spec}: no such file")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    looks_local = spec.startswith((".", "/", "~")) or spec.count("/") > 1
    if looks_local and not path.is_dir():
        raise UserError(f"verifier {spec}: no such folder")
    return {"pretrained_model_name_or_path": str(path) if path.is_dir() else spec}


def load_model(spec: str, dtype: str | torch.dtype, device: str, bits: int | None = None) -> PreTrainedModel:
    """The transformers model of a verifier's name, on its device. Raises UserError when it cannot be loaded as it is."""
    place = resolve_device(device)
    source = resolve(spec)
    quantised = {} if bits is None else quantisation(bits, resolve_dtype(dtype, place), place, spec)
    try:
        config = None if "gguf_file" in source else load_config(source)
        options = quantised | ({"attn_implementation": "eager"} if needs_eager(config) else {})
        model, info = AutoModelForCausalLM.from_pretrained(
            **source, dtype=resolve_dtype(dtype, place), output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"verifier {spec}: cannot be loaded: {first_line(error)}") from error
    check_complete(model, info, spec)
    return model if quantised else model.to(place)


def quantisation(bits: int, dtype: torch.dtype, place: torch.device, spec: str) -> dict[str, Any]:
    """The from_pretrained arguments of bitsandbytes weights: 4 (nf4, as QLoRA) or 8 bits, all but the lm_head."""
    if place.type != "cuda":
        raise UserError(f"verifier {spec}: bits: {bits} needs a CUDA device, this is {place}; leave verifier.bits out")
    if find_spec("bitsandbytes") is None:
        raise UserError(f"verifier {spec}: bits: {bits} needs bitsandbytes; install it with: pip install bitsandbytes")
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    config = BitsAndBytesConfig(**(four if bits == 4 else {"load_in_8bit": True}))
    return {"quantization_config": config, "device_map": {"": place}}


def load_skeleton(spec: str, dtype: str | torch.dtype, device: str) -> PreTrainedModel:
    """The verifier's model without its weights (on the meta device), from its config.json alone."""
    source = resolve(spec)
    try:
        config = AutoConfig.from_pretrained(**source)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=resolve_dtype(dtype, resolve_device(device)))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"verifier {spec}: its configuration cannot be read: {first_line(error)}") from error


def load_tokenizer(spec: str) -> PreTrainedTokenizerBase:
    """The verifier's tokenizer. Raises UserError when there is none."""
    try:
        if spec.startswith("builtin:"):
            return AutoTokenizer.from_pretrained(builtin_tokenizer(spec.removeprefix("builtin:")))
        return AutoTokenizer.from_pretrained(**resolve(spec))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"verifier {spec}: its tokenizer cannot be loaded: {first_line(error)}") from error


def load_config(source: dict[str, str]) -> Any:
    return AutoConfig.from_pretrained(source["pretrained_model_name_or_path"]).get_text_config(decoder=True)


def needs_eager(config: Any) -> bool:
    """Attention soft-capping (Gemma 2) is not in the fused kernels."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device {device}: no CUDA device is visible; use device: cpu or auto")
    if device.startswith("cuda:") and int(device.removeprefix("cuda:")) >= (count := torch.cuda.device_count()):
        raise UserError(f"device {device}: the last CUDA device here is cuda:{count - 1}")
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("device mps: this machine has none; use device: cpu or auto")
    return torch.device(device)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """A name as torch's dtype; `auto` is bfloat16 where the device multiplies in it itself, float32 elsewhere."""
    if dtype == "auto":
        dtype = "bfloat16" if multiplies_in_bfloat16(device) else "float32"
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def multiplies_in_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = torch.cpu.get_capabilities()
    return device.type == "cpu" and any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def check_complete(model: PreTrainedModel, info: dict[str, Any], spec: str) -> None:
    """Refuse weights that transformers would have made up, or left untied against the configuration."""
    if missing := sorted(info["missing_keys"]):
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        raise UserError(f"verifier {spec}: weight {missing[0]}{more} is missing from its files")
    if model.config.get_text_config(decoder=True).tie_word_embeddings:
        head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        if head is not table and not torch.equal(head, table):
            raise UserError(f"verifier {spec}: its configuration ties lm_head to the embeddings, its files hold two different "
                            "tensors; set tie_word_embeddings in its config.json")  # fmt: skip
