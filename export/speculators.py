"""The speculators layout: a folder that names its verifier, so that `vllm serve FOLDER` needs nothing else."""

from .eagle3 import eagle3_head, eagle3_tensors, llama_fields
from .layout import Export, Order, needs_name

VERSION = "0.9.0"  # of the layout


def export(order: Order) -> Export:
    head = eagle3_head(order, "speculators", "--to vllm")
    name = needs_name(order, "speculators")
    proposal = {"proposal_type": "greedy", "speculative_tokens": head.config.depth}
    config = {
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": llama_fields(head.config),
        "draft_vocab_size": head.config.draft_vocab_size,
        "norm_before_residual": False,  # true when absent; our residual is the hidden state before hidden_norm
        "eagle_aux_hidden_state_layer_ids": list(head.config.layers),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": [order.verifier.architecture]},
        },
        "tie_word_embeddings": False,
        "dtype": order.dtype_name,
    }
    return Export("vLLM and speculators 0.9", config, eagle3_tensors(order, head, "layers.0"), "vllm serve THIS_FOLDER",
                  (f"vLLM finds the verifier, {name}, in this folder's config.json.",))  # fmt: skip
