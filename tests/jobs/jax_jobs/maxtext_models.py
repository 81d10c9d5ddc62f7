"""Small models that both transformers and MaxText compute: the entries of their configurations, and weights.

Nothing here needs jax, torch or MaxText.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np

SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_GEMMA: Mapping[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_LATENT: Mapping[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "llama3.1": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {**_LLAMA_3, "original_max_position_embeddings": 8192},
    },
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "gemma": {**_GEMMA, "model_type": "gemma", "architectures": ["GemmaForCausalLM"]},
    "gemma2": {
        **_GEMMA,
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": 16,
        "sliding_window": 4096,
    },
    "gemma3": {
        **_GEMMA,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 8,
        "query_pre_attn_scalar": 16,
        "sliding_window": 1024,
        "rope_theta": 1000000.0,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
    "deepseek_v2": {
        **_LATENT,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "topk_method": "greedy",
    },
    "deepseek_v3": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "head_dim": 8,
        "q_lora_rank": 20,
        "n_group": 2,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    },
}
"""By a name of their own; config.json is these entries after `SIZES`."""


def config_of(name: str) -> dict[str, Any]:
    return {**SIZES, **CONFIGS[name]}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The weight with this name in transformers: multiples of 2**-18 in (-1, 1), the same wherever it is made."""
    random = np.random.default_rng(crc32(name.encode()))
    return (random.integers(1 - (1 << 18), 1 << 18, shape) / (1 << 18)).astype(np.float32)
