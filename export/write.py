"""Write an export: config.json, one safetensors file and SERVING.md, all of them or none."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from ..errors import UserError
from ..heads.files import replace_folder, writing
from . import eagle, medusa, sglang, speculators, tensorrt_llm, vllm
from .layout import PLACEHOLDER, Export, Order, adapted, refusal

ENGINES: dict[str, Callable[[Order], Export]] = {
    "vllm": vllm.export,
    "sglang": sglang.export,
    "speculators": speculators.export,
    "eagle": eagle.export,
    "medusa": medusa.export,
    "tensorrt-llm": tensorrt_llm.export,
}
OWN_FILES = {"config.json", "model.safetensors", "medusa_lm_head.safetensors", "SERVING.md"}


def write_export(order: Order, engine: str, folder: Path) -> Export:
    """Export the head into a folder: a new one, or one that holds an earlier export."""
    if engine not in ENGINES:
        raise UserError(f"--to {engine}: unknown engine; known: {', '.join(ENGINES)}")
    export = ENGINES[engine](order)
    if order.verifier.adapter is not None:
        export = replace(export, notes=(*export.notes, adapted(order.verifier.name, order.verifier.adapter.name)))
    check_name(folder, engine, order)
    check_room(folder)

    def write(target: Path) -> None:
        save_file(export.tensors, target / export.weights, metadata={"format": "pt"})
        (target / export.weights).chmod(0o644)  # safetensors makes it private
        (target / "config.json").write_text(json.dumps(export.config, indent=2) + "\n", encoding="utf-8")
        (target / "SERVING.md").write_text(serving(export, order), encoding="utf-8")

    replace_folder(folder, write)
    return export


def check_room(folder: Path) -> None:
    with writing(folder):
        strangers = sorted(path.name for path in folder.iterdir() if path.name not in OWN_FILES) if folder.exists() else []
    if strangers:
        raise UserError(f"{folder} holds something else ({strangers[0]}); choose another folder")


def check_name(folder: Path, engine: str, order: Order) -> None:
    """vLLM guesses the method from a path: "eagle-" means EAGLE-1, "eagle3" EAGLE-3, whatever the folder holds."""
    name = folder.absolute().name.lower()
    if engine != "vllm":
        return
    guessed = "eagle1" if "eagle-" in name else "eagle3" if "eagle3" in name else order.head.kind
    if guessed != order.head.kind:
        raise refusal(engine, f"vLLM takes a folder named {folder.name} for another method", "another name for --output")


def serving(export: Export, order: Order) -> str:
    head, verifier = order.head, order.verifier_name or order.verifier.name
    size = sum(tensor.numel() * tensor.element_size() for tensor in export.tensors.values())
    whose = "" if order.verifier_name else f"\n{PLACEHOLDER} is the verifier, as the engine finds it.\n"
    notes = "".join(f"- {note}\n" for note in (
        f"{head.kind} head for {verifier}, {order.dtype_name}, {size} bytes of tensors.",
        *export.notes,
        "The verifier decides every token; the head only changes how fast they come.",
    ))  # fmt: skip
    return f"# Serving this draft head\n\nFor {export.engine}:\n\n```\n{export.command}\n```\n{whose}\n{notes}"
