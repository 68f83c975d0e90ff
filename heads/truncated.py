"""The verifier's own first layers, with its final norm and lm_head, as a smaller model. Weights are shared, not copied."""

import copy

from torch import Tensor, nn

from ..errors import UserError
from .packed import PackedLinear
from .verifier import Verifier


def check_layers(verifier: Verifier, layers: int) -> None:
    """Raises UserError unless 1 <= layers < the verifier's."""
    whole = verifier.facts.num_hidden_layers
    if not 1 <= layers < whole:
        raise UserError(f"truncated: {layers} layers; verifier {verifier.name} has {whole}, so from 1 to {whole - 1} can draft")


def first_layers(verifier: Verifier, layers: int) -> Verifier:
    """A Verifier of the first `layers` decoder layers, some but not all. Raises UserError."""
    check_layers(verifier, layers)
    model, whole = verifier.model, verifier.facts.num_hidden_layers
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [module.packed for module in model.modules() if isinstance(module, PackedLinear)]
    short = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    config = short.config.get_text_config(decoder=True)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    decoder = short.get_decoder()
    for name, module in decoder.named_children():
        if isinstance(module, nn.ModuleList) and len(module) == whole:
            setattr(decoder, name, module[:layers])
    return Verifier(short, verifier.tokenizer, f"{verifier.name}, first {layers} layers")
