"""TensorRT-LLM: EAGLE-3 in the plain layout; it casts d2t to int32 itself."""

from .eagle3 import default_layers, eagle3_head, eagle3_tensors, has_default_layers, needs_shared_table, plain_config
from .layout import PLACEHOLDER, Export, Order, refusal


def export(order: Order) -> Export:
    head = eagle3_head(order, "tensorrt-llm", "--to vllm (TensorRT-LLM had Medusa in its removed engine path only)")
    needs_shared_table(order, "tensorrt-llm")
    if not has_default_layers(head, order.verifier):
        its, mine = list(default_layers(order.verifier)), list(head.config.layers)
        raise refusal("tensorrt-llm", f"a folder cannot name its states; it reads {its}, this head {mine}", "--to vllm")
    options = f"{{decoding_type: Eagle3, max_draft_len: {head.config.depth}, speculative_model: THIS_FOLDER}}"
    command = (
        f'echo "speculative_config: {options}" > options.yaml\n'
        f"trtllm-serve {order.verifier_name or PLACEHOLDER} --extra_llm_api_options options.yaml"
    )
    return Export("TensorRT-LLM 1.2", plain_config(order, head), eagle3_tensors(order, head, "midlayer"), command)
