"""The models that the tests of Hugging Face's formats save, as data: nothing here imports transformers."""

from __future__ import annotations

from typing import Any

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    # More than ten layers: in the alphabet, layer 10 comes before layer 2.
    "llama_tied": {"model_type": "llama", **SMALL, "num_hidden_layers": 11, "tie_word_embeddings": True},
    "llama_biases": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", **SMALL},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 16, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 3},
    "gpt2": {"model_type": "gpt2", "vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4},
}
SHARD = "20KB"
STEPS = 4
