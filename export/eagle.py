"""The EAGLE repository's own layouts. Its EAGLE-3 code always captures the default states."""

from ..heads.eagle1 import Eagle1Head
from .eagle1 import eagle1_config, eagle1_notes, eagle1_tensors
from .eagle3 import default_layers, eagle3_head, eagle3_tensors, has_default_layers, plain_config
from .layout import PLACEHOLDER, Export, Order, refusal

REPOSITORY = "the EAGLE repository"


def export(order: Order) -> Export:
    if isinstance(order.head, Eagle1Head):
        config, tensors = eagle1_config(order, order.head, "LlamaForCausalLM"), eagle1_tensors(order, order.head, bias=True)
        return Export(REPOSITORY, config, tensors, load(order, "False"), eagle1_notes(order.head))
    head = eagle3_head(order, "eagle", "--to medusa")
    if not has_default_layers(head, order.verifier):
        its, mine = list(default_layers(order.verifier)), list(head.config.layers)
        raise refusal("eagle", f"its code reads the states {its}, this head {mine}", "--to vllm")
    return Export(REPOSITORY, plain_config(order, head), eagle3_tensors(order, head, "midlayer"), load(order, "True"))


def load(order: Order, eagle3: str) -> str:
    return (
        f"EaModel.from_pretrained(base_model_path='{order.verifier_name or PLACEHOLDER}', ea_model_path='THIS_FOLDER', "
        f"use_eagle3={eagle3})"
    )
