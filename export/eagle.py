"""The EAGLE repository's own EAGLE-3 layout. Its code always captures the default states."""

from .eagle3 import default_layers, eagle3_head, eagle3_tensors, has_default_layers, plain_config
from .layout import PLACEHOLDER, Export, Order, refusal


def export(order: Order) -> Export:
    head = eagle3_head(order, "eagle", "--to medusa")
    if not has_default_layers(head, order.verifier):
        its, mine = list(default_layers(order.verifier)), list(head.config.layers)
        raise refusal("eagle", f"its code reads the states {its}, this head {mine}", "--to vllm")
    command = (
        f"EaModel.from_pretrained(base_model_path='{order.verifier_name or PLACEHOLDER}', ea_model_path='THIS_FOLDER', "
        "use_eagle3=True)"
    )
    return Export("the EAGLE repository", plain_config(order, head), eagle3_tensors(order, head, "midlayer"), command)
