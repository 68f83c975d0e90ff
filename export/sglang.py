"""SGLang: EAGLE-3 and EAGLE-1 in the plain layouts; layer indices mean the output of a layer, one less than ours."""

from ..heads.eagle1 import Eagle1Head
from .eagle1 import eagle1_config, eagle1_notes, eagle1_tensors
from .eagle3 import eagle3_head, eagle3_tensors, has_default_layers, needs_shared_table, plain_config
from .layout import PLACEHOLDER, Export, Order

VERSIONS, NOTE = "SGLang 0.5", "topk above 1 grows a dynamic tree."


def export(order: Order) -> Export:
    return eagle1(order, order.head) if isinstance(order.head, Eagle1Head) else eagle3(order)


def eagle1(order: Order, head: Eagle1Head) -> Export:
    """SGLang builds fc with a bias and leaves it random unless the folder has one."""
    needs_shared_table(order, "sglang")
    config, tensors = eagle1_config(order, head, "LlamaForCausalLMEagle"), eagle1_tensors(order, head, bias=True)
    return Export(VERSIONS, config, tensors, serve(order, "EAGLE", 4), (NOTE, *eagle1_notes(head)))


def eagle3(order: Order) -> Export:
    head = eagle3_head(order, "sglang", "--to vllm")
    needs_shared_table(order, "sglang")
    config = plain_config(order, head)
    if not has_default_layers(head, order.verifier):
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in head.config.layers]}
    tensors = eagle3_tensors(order, head, "midlayer")
    return Export(VERSIONS, config, tensors, serve(order, "EAGLE3", head.config.depth), (NOTE,))


def serve(order: Order, algorithm: str, steps: int) -> str:
    return (
        f"python -m sglang.launch_server --model-path {order.verifier_name or PLACEHOLDER} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path THIS_FOLDER --speculative-num-steps {steps} --speculative-eagle-topk 8 "
        "--speculative-num-draft-tokens 32"
    )
