"""Models of Megatron core of every family that transformers has, too: their arguments. Nothing here imports torch."""

from typing import Any

INPUT = [[7 * (12 * row + i) % 64 for i in range(12)] for row in range(2)]
"""A batch of tokens that every model's vocabulary holds."""

COMMON: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 12,
    "max_position_embeddings": 64,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "swiglu": True,
    "bias_gelu_fusion": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": True,
    "num_experts": None,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "window_size": None,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "vocab_size": 90,
    "tokenizer_type": "NullTokenizer",
    "make_vocab_size_divisible_by": 16,
    "padded_vocab_size": 96,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "world_size": 1,
    "transformer_impl": "local",
}
GPT2: dict[str, Any] = {
    **COMMON,
    "group_query_attention": False,
    "num_query_groups": 1,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "untie_embeddings_and_output_weights": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "llama_wide_heads": {**COMMON, "kv_channels": 20, "rotary_base": 500000},
    "llama_biases": {**COMMON, "add_bias_linear": True, "add_qkv_bias": True},
    "llama_tied_linear": {
        **COMMON,
        "untie_embeddings_and_output_weights": False,
        "rotary_seq_len_interpolation_factor": 2.0,
    },
    "llama3": {
        **COMMON,
        "use_rope_scaling": True,
        "rope_scaling_factor": 32.0,
        "rotary_base": 500000,
        "max_position_embeddings": 131072,
    },
    "mistral": {**COMMON, "window_size": (4, 0)},
    "qwen2": {**COMMON, "add_qkv_bias": True, "rotary_base": 1000000, "layernorm_epsilon": 1e-6},
    "qwen3": {**COMMON, "qk_layernorm": True, "kv_channels": 16},
    "mixtral": {**COMMON, "num_experts": 3, "moe_ffn_hidden_size": 40, "rotary_base": 1000000},
    "gpt2": GPT2,
    "gpt2_fused": {**GPT2, "bias_gelu_fusion": True},
    "gpt2_untied": {**GPT2, "untie_embeddings_and_output_weights": True},
}
EXPECTED: dict[str, str] = {
    "llama_wide_heads": "llama",
    "llama_biases": "llama",
    "llama_tied_linear": "llama",
    "llama3": "llama",
    "gpt2_fused": "gpt2",
    "gpt2_untied": "gpt2",
}
"""The `model_type` where it is not the kind's own name."""
