"""vLLM: EAGLE-3 and EAGLE-1 in the plain layouts, Medusa in vLLM's own (0.32 and older)."""

import json

from ..heads.eagle1 import Eagle1Head
from ..heads.medusa import MedusaHead
from .eagle1 import eagle1_config, eagle1_notes, eagle1_tensors
from .eagle3 import eagle3_head, eagle3_tensors, has_default_layers, plain_config
from .layout import PLACEHOLDER, Export, Order
from .medusa import vllm_config, vllm_tensors


def export(order: Order) -> Export:
    if isinstance(order.head, MedusaHead):
        return medusa(order, order.head)
    return eagle1(order, order.head) if isinstance(order.head, Eagle1Head) else eagle3(order)


def eagle1(order: Order, head: Eagle1Head) -> Export:
    """vLLM builds fc without a bias and fails on one."""
    config, tensors = eagle1_config(order, head, "LlamaForCausalLM"), eagle1_tensors(order, head, bias=False)
    notes = ("vLLM drafts chains. Without a method it guesses one from the path: name it.", *eagle1_notes(head))
    return Export("vLLM 0.32 and newer", config, tensors, serve(order, "eagle", 4), notes)


def eagle3(order: Order) -> Export:
    head = eagle3_head(order, "vllm", "headstart eval, which decodes with every head")
    config = plain_config(order, head)
    if not has_default_layers(head, order.verifier):
        layers = list(head.config.layers)  # vLLM means the state entering a layer, as we do
        config["eagle_aux_hidden_state_layer_ids"] = layers
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
    return Export("vLLM 0.32 and newer", config, eagle3_tensors(order, head, "midlayer"),
                  serve(order, "eagle3", head.config.depth),
                  ("vLLM drafts chains. Without a method it guesses one from the path: name it.",))  # fmt: skip


def medusa(order: Order, head: MedusaHead) -> Export:
    command, notes = serve(order, "medusa", head.config.heads), ["vLLM drafts a chain of each head's likeliest token."]
    if head.config.draft_vocab_size < head.config.vocab_size:
        notes.append(f"The heads know {head.config.draft_vocab_size} tokens; rows of the others are zero.")
    versions = "vLLM 0.32 and older (0.33 has no Medusa)"
    return Export(versions, vllm_config(order, head), vllm_tensors(order, head), command, tuple(notes))


def serve(order: Order, method: str, tokens: int) -> str:
    speculative = json.dumps({"method": method, "model": "THIS_FOLDER", "num_speculative_tokens": tokens})
    return f"vllm serve {order.verifier_name or PLACEHOLDER} --speculative-config '{speculative}'"
