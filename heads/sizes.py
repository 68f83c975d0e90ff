"""How many parameters a verifier and a head have, and what they cost. Works on models without storage (meta) too."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from .base import DraftHead
from .facts import find_layers


@dataclass(frozen=True)
class VerifierSizes:
    """Numbers of parameters. layer: of the largest decoder layer; active: what one token runs through, the embedding's
    look-up not counted (of a mixture of experts: the chosen ones)."""

    total: int
    layers: int
    layer: int
    active: int

    @property
    def outside(self) -> int:
        """Embedding, last norm and lm_head."""
        return self.total - self.layers


def verifier_sizes(model: PreTrainedModel) -> VerifierSizes:
    config = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder()
    by_layer = [count(layer) for layer in find_layers(decoder, config.num_hidden_layers)]
    lm_head = model.get_output_embeddings().weight
    language = count(decoder) + (0 if lm_head is model.get_input_embeddings().weight else lm_head.numel())
    looked_up = 0 if lm_head is model.get_input_embeddings().weight else model.get_input_embeddings().weight.numel()
    return VerifierSizes(
        total=language,
        layers=sum(by_layer),
        layer=max(by_layer),
        active=language - looked_up - idle_experts(decoder, config),
    )


def idle_experts(decoder: nn.Module, config: object) -> int:
    """Parameters of the experts that a token does not choose."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((number for name in names if (number := getattr(config, name, None))), None)
    if experts is None:
        return 0
    chosen = getattr(config, "num_experts_per_tok", experts)
    held = sum(p.numel() for name, p in decoder.named_parameters() if ".experts." in name)
    return held - held * chosen // experts


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def flops_a_label(head: DraftHead) -> float:
    """FLOPs of training on one label of one depth: 6 for every parameter it runs through (2 forward, 4 backward); of an
    output layer that is the verifier's, frozen, 4 (2 forward, 2 back to the state). Attention scores are not counted."""
    mine = head.own_state()  # no adapter of the verifier (Medusa-2)
    own = sum(p.numel() for name, p in head.named_parameters() if name in mine and p.requires_grad)
    has_output = any("lm_head" in name for name, _ in head.named_parameters())
    return 6 * own / (head.depth or 1) + (0 if has_output else 4 * len(head.target_ids) * head.config.hidden_size)
