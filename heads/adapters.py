"""LoRA adapters of verifiers: loaded from what peft saves, made anew, switched off for a while, and saved as peft does.

peft puts its layers into the transformers model in place, so the model stays what it was for everybody else. Weights are not
merged: merging rounds them to the verifier's precision, and a trained adapter must be told from the original at any time.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from ..errors import UserError, first_line

ALL_PROJECTIONS = "all-linear"  # peft's name for every linear layer but the lm_head: those of attention and MLP


class Adapter:
    """An adapter in its place. handle: peft's own view of the model; name: where it came from."""

    def __init__(self, handle: Any, name: str) -> None:
        self.handle, self.name = handle, name

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.handle.get_base_model().named_parameters() if "lora_" in name}

    @property
    def scaling(self) -> dict[str, float]:
        """By layer: what its product is multiplied with, the one number that no weight shows."""
        layers = self.handle.get_base_model().named_modules()
        found = {name: getattr(layer, "scaling", None) for name, layer in layers}
        return {name: scale["default"] for name, scale in found.items() if isinstance(scale, dict)}

    @contextmanager
    def off(self) -> Iterator[None]:
        """The verifier without the adapter."""
        learning = [weight.requires_grad for weight in self.weights.values()]
        try:
            with self.handle.disable_adapter():
                yield
        finally:  # peft lets every adapter learn that it switches on
            for weight, learns in zip(self.weights.values(), learning, strict=True):
                weight.requires_grad_(learns)

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """With the adapter's dropout, which is for training alone."""
        dropouts = [layer for name, layer in self.handle.named_modules() if "lora_dropout" in name]
        try:
            for layer in dropouts:
                layer.train()
            yield
        finally:
            for layer in dropouts:
                layer.eval()

    def save(self, folder: Path) -> None:
        """A folder that peft loads: adapter_config.json and adapter_model.safetensors."""
        from peft import get_peft_model_state_dict

        folder.mkdir(parents=True, exist_ok=True)
        tensors = get_peft_model_state_dict(self.handle, save_embedding_layers=False)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = copy(self.handle.peft_config["default"])
        config.inference_mode = True
        if isinstance(config.target_modules, set):
            config.target_modules = sorted(config.target_modules)
        config.save_pretrained(str(folder))


def new_adapter(
    model: PreTrainedModel, verifier: str, rank: int, alpha: float, dropout: float, targets: Sequence[str] | None
) -> Adapter:
    """An adapter that changes nothing yet and is to be trained; targets: names of linear layers, None is all of them."""
    peft = import_peft()
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, task_type="CAUSAL_LM", base_model_name_or_path=verifier,
        target_modules=ALL_PROJECTIONS if targets is None else list(targets),
    )  # fmt: skip
    try:
        with peft_warnings():
            handle = peft.PeftModelForCausalLM(model, config)
    except ValueError as error:
        raise UserError(f"adapter of verifier {verifier}: {first_line(error)}") from None
    handle.eval()
    adapter = Adapter(handle, "new")
    check_spares_tables(model, "new")
    return adapter


def load_adapter(model: PreTrainedModel, source: str, verifier: str) -> Adapter:
    """Put a saved LoRA adapter (a folder, or a hub id) into the verifier's model, frozen.

    Raises UserError when there is none, it is no LoRA, or it was made for another model.
    """
    peft = import_peft()
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "adapter_config.json").is_file():
            raise UserError(f"adapter {source}: not a peft adapter: adapter_config.json is missing")
    elif source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UserError(f"adapter {source}: no such folder")
    place = str(path) if path.is_dir() else source
    try:
        kind = str(peft.PeftConfig.from_pretrained(place).peft_type).rpartition(".")[2]
        stored = len(peft.load_peft_weights(place, device="cpu"))
    except Exception as error:  # what peft raises of damaged folders, and the hub of absent ones, is of many kinds
        raise UserError(f"adapter {source}: cannot be loaded: {telling_line(error)}") from None
    if kind != "LORA":
        raise UserError(f"adapter {source}: it is {kind}; verifiers here take LORA")
    try:
        with peft_warnings():
            handle = peft.PeftModel.from_pretrained(model, place)
    except UserWarning as error:
        missing = str(error).partition("['")[2].partition("'")[0]
        raise UserError(f"adapter {source}: does not fit verifier {verifier}: {missing} is missing") from None
    except Exception as error:
        raise UserError(f"adapter {source}: does not fit verifier {verifier}: {telling_line(error)}") from None
    if stored != len(peft.get_peft_model_state_dict(handle, save_embedding_layers=False)):
        raise UserError(f"adapter {source}: does not fit verifier {verifier}: it has weights for layers that are not there")
    check_spares_tables(model, source)
    handle.eval()
    return Adapter(handle, source)


def check_spares_tables(model: PreTrainedModel, source: str) -> None:
    """Heads and exports read rows of the lm_head and the embeddings themselves."""
    for name, module in (("lm_head", model.get_output_embeddings()), ("embeddings", model.get_input_embeddings())):
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise UserError(f"adapter {source}: it changes the {name}, whose rows draft heads read; merge it into the verifier "
                            "first (peft: merge_and_unload) and name the merged model")  # fmt: skip


@contextmanager
def peft_warnings() -> Iterator[None]:
    """Weights that an adapter lacks are an error; that peft asks transformers for a thing of old is nobody's concern."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        yield


def telling_line(error: Exception) -> str:
    """Of a long message, the line that says what does not fit."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "size mismatch" in line), lines[0])


def import_peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError("adapters need peft; install it with: pip install 'headstart[peft]'") from None
    return peft
