"""config.json of published verifiers, as far as sizes go, and how many parameters their language models have."""

from typing import Any

LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_ROPE, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "num_key_value_heads": 8, "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "rope_theta": 1000000,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": 128,
    "num_key_value_heads": 8,
}  # fmt: skip

# folder of the recipes -> (config, parameters of the language model, parameters a token runs through)
TRUE: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama-3.1-8b": (
        LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        8_030_261_248,
        7_504_924_672,
    ),
    "llama-3.1-70b": (
        LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        70_553_706_496,
        69_503_033_344,
    ),
    "qwen3-8b": (
        QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
        8_190_735_360,
        7_568_405_504,
    ),
    "qwen3-32b": (
        QWEN3 | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
        32_762_123_264,
        31_984_210_944,
    ),
    "qwen3-30b-a3b": (
        QWEN3
        | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
           "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768,
           "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "norm_topk_prob": True},
        30_532_122_624,
        3_041_867_776,
    ),
    "mistral-7b": (
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 32768, "hidden_size": 4096,
         "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "rope_theta": 1000000.0, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "sliding_window": None,
         "tie_word_embeddings": False},
        7_248_023_552,
        7_113_805_824,
    ),
    "gemma-3-12b": (
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
         "text_config": {"model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360,
                         "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
                         "sliding_window": 1024, "max_position_embeddings": 131072,
                         "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
         "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                           "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896, "patch_size": 14}},
        11_766_034_176,
        11_766_034_176,
    ),
    "vicuna-7b": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
         "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
        6_738_415_616,
        6_607_343_616,
    ),
}  # fmt: skip
