"""What a bug report needs to know: versions, device and cores."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from . import __version__

PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "pydantic",
    "numpy",
    "gguf",
    "datasets",
    "peft",
    "deepspeed",
    "wandb",
)


def facts() -> dict[str, str | int | None]:
    """Versions (None: not installed), device and usable cores."""
    return {
        "headstart": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: version_of(name) for name in PACKAGES},
        "device": device(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device() -> str:
    try:
        import torch
    except Exception as error:  # a broken torch is just what this verb is for
        return f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return "cpu"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"cuda: {', '.join(names)}"
