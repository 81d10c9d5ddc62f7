"""When runs are saved and published. Nothing here imports torch."""

from typing import Any

STEPS = (2, 3, 5)
AFTER = 2
"""Steps after the last save."""
FREE = 6
"""Steps after which nobody waits until they are published."""


def megatron_config() -> dict[str, Any]:
    """The configuration of transformers for Megatron's `llama_tp2_pp2`, with fewer tokens than rows of the tables."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
