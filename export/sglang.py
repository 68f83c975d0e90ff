"""SGLang: EAGLE-3 in the plain layout; layer indices mean the output of a layer, one less than ours."""

from .eagle3 import eagle3_head, eagle3_tensors, has_default_layers, needs_shared_table, plain_config
from .layout import PLACEHOLDER, Export, Order


def export(order: Order) -> Export:
    head = eagle3_head(order, "sglang", "--to vllm")
    needs_shared_table(order, "sglang")
    config = plain_config(order, head)
    if not has_default_layers(head, order.verifier):
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in head.config.layers]}
    command = (
        f"python -m sglang.launch_server --model-path {order.verifier_name or PLACEHOLDER} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path THIS_FOLDER --speculative-num-steps {head.config.depth} --speculative-eagle-topk 8 "
        "--speculative-num-draft-tokens 32"
    )
    return Export("SGLang 0.5", config, eagle3_tensors(order, head, "midlayer"), command,
                  ("topk above 1 grows a dynamic tree.",))  # fmt: skip
