"""Small random models of each family, as data: nothing here imports transformers.

A family is one entry of `RANDOM`: a function of a random generator that gives entries of a config.json. Sizes are odd
and differ from each other, so that no two tensors have the same shape by chance, and no published model has them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hf_jobs.models import MODELS

Entries = dict[str, Any]
TOKENS = 64
"""The tests' batches hold smaller tokens, so every vocabulary is larger."""


def model(name: str) -> Entries:
    """The entries of a model: one of `MODELS`, or `FAMILY-SEED` for a random model of a family.

    `FAMILY-SEED-even` is one whose sizes are doubled, so that two ranks can share all that is split.
    """
    if name in MODELS:
        return MODELS[name]
    family, seed, *even = name.split("-")
    entries = RANDOM[family](random.Random(f"{family}-{seed}"))
    entries = {"model_type": family, "initializer_range": 0.1, **entries, "seed": int(seed)}
    return {key: 2 * value if even and key in _SPLIT else value for key, value in entries.items()}


def names(count: int, first: int = 0) -> list[str]:
    """`count` random models of each family."""
    return [f"{family}-{seed}" for family in RANDOM for seed in range(first, first + count)]


_SPLIT = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "n_embd", "n_head", "n_inner"),
}


def common(rng: random.Random, head_dims: tuple[int, ...] = (8, 12, 16)) -> Entries:
    """The sizes of every decoder: heads in groups, of a width that need not be the hidden size's share."""
    groups = rng.choice((1, 2, 3))
    heads = groups * rng.choice((2, 3))
    return {
        "vocab_size": rng.randrange(TOKENS + 1, 110),
        "hidden_size": heads * rng.choice((6, 10, 14)),
        "intermediate_size": rng.randrange(21, 70),
        "num_hidden_layers": rng.randrange(2, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": rng.choice(head_dims),
        "max_position_embeddings": 64,
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
        "tie_word_embeddings": rng.random() < 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(rng.randrange(500, 20000))},
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _without_head_dim(rng: random.Random) -> Entries:
    """Of models whose heads share the hidden size."""
    entries = common(rng)
    entries["hidden_size"] = entries["num_attention_heads"] * entries.pop("head_dim")
    return entries


def _experts(rng: random.Random, name: str = "num_experts") -> Entries:
    return {
        name: rng.choice((3, 5, 7)),
        "num_experts_per_tok": rng.choice((2, 3)),
        "moe_intermediate_size": rng.randrange(9, 33),
    }


def _dense_layers(rng: random.Random, layers: int) -> Entries:
    """Which layers of Qwen's models have no experts: listed ones, or all but each second one."""
    if rng.random() < 0.3:
        return {"decoder_sparse_step": 2}
    return {"mlp_only_layers": [i for i in range(layers) if rng.random() < 0.4][: layers - 1]}


def _windows(rng: random.Random, layers: int) -> Entries:
    kinds = [rng.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
    return {"layer_types": kinds, "sliding_window": rng.randrange(2, 7)}


def llama(rng: random.Random) -> Entries:
    biased = rng.random() < 0.3
    return {**common(rng), "attention_bias": biased, "mlp_bias": biased}


def mistral(rng: random.Random) -> Entries:
    return {**common(rng), "sliding_window": rng.choice((None, 3, 5))}


def qwen3(rng: random.Random) -> Entries:
    return common(rng)


def mixtral(rng: random.Random) -> Entries:
    experts = {"num_local_experts": rng.choice((3, 5)), "num_experts_per_tok": rng.choice((2, 3))}
    return {**common(rng), **experts, "sliding_window": rng.choice((None, 3, 5))}


def gpt2(rng: random.Random) -> Entries:
    heads = rng.choice((3, 4))
    sizes = {"n_embd": heads * rng.choice((8, 12)), "n_head": heads, "n_layer": rng.randrange(2, 5)}
    return {"vocab_size": rng.randrange(TOKENS + 1, 110), "n_positions": 32, "n_inner": rng.randrange(21, 70), **sizes}


def qwen2_moe(rng: random.Random) -> Entries:
    entries = _without_head_dim(rng)
    layers = entries["num_hidden_layers"]
    if rng.random() < 0.5:
        entries |= {**_windows(rng, layers), "use_sliding_window": True}
    shared = {"shared_expert_intermediate_size": rng.randrange(34, 50), "qkv_bias": rng.random() < 0.7}
    normalised = {"norm_topk_prob": rng.random() < 0.5}
    return {**entries, **_experts(rng), **shared, **normalised, **_dense_layers(rng, layers)}


def qwen3_moe(rng: random.Random) -> Entries:
    entries = common(rng)
    if rng.random() < 0.3:
        entries |= {"use_sliding_window": True, "sliding_window": rng.randrange(2, 7)}
    normalised = {"norm_topk_prob": rng.random() < 0.5}
    return {**entries, **_experts(rng), **normalised, **_dense_layers(rng, entries["num_hidden_layers"])}


def glm4_moe(rng: random.Random) -> Entries:
    entries, experts = common(rng), {"n_group": 1, "topk_group": 1, **_experts(rng, "n_routed_experts")}
    entries["rope_parameters"]["partial_rotary_factor"] = rng.choice((0.25, 0.5, 1.0))
    if rng.random() < 0.5:  # Megatron scores a group by as many experts as it may give, transformers always by two
        experts |= {"n_routed_experts": 9, "n_group": 3, "topk_group": 2, "num_experts_per_tok": rng.choice((4, 5))}
    return {
        **entries,
        **experts,
        "head_dim": rng.choice((16, 24)),
        "attention_bias": rng.random() < 0.5,
        "use_qk_norm": rng.random() < 0.5,
        "n_shared_experts": rng.choice((1, 2)),
        "first_k_dense_replace": rng.randrange(0, entries["num_hidden_layers"]),
        "routed_scaling_factor": rng.choice((1.0, 1.5, 2.5)),
        "num_nextn_predict_layers": 0 if entries["tie_word_embeddings"] else rng.choice((0, 1, 2)),
    }


def gpt_oss(rng: random.Random) -> Entries:
    entries = common(rng)
    if rng.random() < 0.5:
        entries["rope_parameters"] |= {
            "rope_type": "yarn",
            "factor": rng.choice((4.0, 32.0)),
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": rng.random() < 0.5,
        }
    experts = {"num_local_experts": rng.choice((3, 5, 7)), "num_experts_per_tok": rng.choice((2, 3))}
    limit = {"swiglu_limit": rng.choice((0.5, 7.0))}
    return {**entries, **experts, **limit, **_windows(rng, entries["num_hidden_layers"])}


def ernie4_5(rng: random.Random) -> Entries:
    return {**common(rng), "use_bias": rng.random() < 0.5}


def ernie4_5_moe(rng: random.Random) -> Entries:
    entries = _without_head_dim(rng)
    layers = entries["num_hidden_layers"]
    return {
        **entries,
        "moe_num_experts": rng.choice((3, 5)),
        "moe_k": 2,
        "moe_intermediate_size": rng.randrange(9, 33),
        "moe_num_shared_experts": rng.choice((1, 2)),
        "moe_layer_start_index": rng.randrange(0, layers),
        "moe_layer_interval": rng.choice((1, 2)),
    }


def phi3(rng: random.Random) -> Entries:
    entries = _without_head_dim(rng)
    entries["rope_parameters"]["partial_rotary_factor"] = 0.5  # one that rotates whole heads is a Llama
    return {**entries, "sliding_window": rng.choice((None, 3, 5))}


def olmo2(rng: random.Random) -> Entries:
    return {**_without_head_dim(rng), "attention_bias": rng.random() < 0.3}


def olmo3(rng: random.Random) -> Entries:
    entries = _without_head_dim(rng)
    rotary = {"full_attention": entries["rope_parameters"], "sliding_attention": dict(entries["rope_parameters"])}
    return {**entries, "rope_parameters": rotary, **_windows(rng, entries["num_hidden_layers"])}


def gemma(rng: random.Random) -> Entries:
    return {**common(rng), "tie_word_embeddings": True, "attention_bias": rng.random() < 0.3}


def _gemma_heads(rng: random.Random) -> Entries:
    """Logits with and without caps, and queries that are scaled by another number than their width."""
    caps = {"attn_logit_softcapping": rng.choice((None, 20.0)), "final_logit_softcapping": rng.choice((None, 30.0))}
    kinds = {"hidden_activation": rng.choice(("gelu_pytorch_tanh", "gelu"))}
    return {**gemma(rng), **caps, **kinds, "query_pre_attn_scalar": rng.randrange(5, 50)}


def gemma2(rng: random.Random) -> Entries:
    entries = _gemma_heads(rng)
    return {**entries, **_windows(rng, entries["num_hidden_layers"])}


def gemma3(rng: random.Random) -> Entries:
    entries = gemma2(rng)
    rotary = {"full_attention": entries["rope_parameters"], "sliding_attention": {"rope_type": "default"}}
    rotary["sliding_attention"] |= {"rope_theta": float(rng.randrange(100, 5000))}
    return {**entries, "rope_parameters": rotary}


def minimax_m2(rng: random.Random) -> Entries:
    entries = common(rng)
    entries["rope_parameters"]["partial_rotary_factor"] = rng.choice((0.5, 1.0))
    return {**entries, "num_local_experts": rng.choice((3, 5)), "num_experts_per_tok": rng.choice((2, 3))}


def hunyuan_dense(rng: random.Random) -> Entries:
    return {**common(rng), "attention_bias": rng.random() < 0.3}


def hunyuan_moe(rng: random.Random) -> Entries:
    return {**hunyuan_dense(rng), "num_experts": rng.choice((3, 5)), "moe_topk": rng.choice((1, 2))}


def llama4(rng: random.Random) -> Entries:
    experts = {"num_local_experts": rng.choice((3, 5)), "interleave_moe_layer_step": rng.choice((1, 2, 3))}
    return {**common(rng), **experts, "intermediate_size_mlp": rng.randrange(70, 90)}


def seed_oss(rng: random.Random) -> Entries:
    return {**common(rng), "attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}


def qwen_vision(rng: random.Random) -> Entries:
    text, tied = common(rng), rng.random() < 0.5
    text["rope_parameters"]["mrope_section"] = [2, 1, 1]
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 12}
    vision |= {"out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": [0]}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


def gemma3_vision(rng: random.Random) -> Entries:
    return {"text_config": gemma3(rng), "vision_config": _SMALL_EYES, "tie_word_embeddings": True}


def llama4_vision(rng: random.Random) -> Entries:
    eyes = {**_SMALL_EYES, "intermediate_size": 32, "vision_output_dim": 16}
    eyes |= {"projector_input_dim": 16, "projector_output_dim": 16}
    text = {**llama4(rng), "tie_word_embeddings": False}
    return {"text_config": text, "vision_config": eyes, "tie_word_embeddings": False}


_SMALL_EYES = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def deepseek_v2(rng: random.Random) -> Entries:
    """Multi-latent attention. Megatron scores a group of experts by as many as a token may have in it, V2 by one."""
    entries = common(rng)
    del entries["head_dim"]
    groups, chosen = rng.choice(((1, 1), (2, 1), (3, 2)))
    if rng.random() < 0.6:
        mscale, mscale_all = rng.choice(((1.0, 1.0), (0.707, 0.707), (1.0, 0.5), (None, None)))
        entries["rope_parameters"] |= {
            "rope_type": "yarn",
            "factor": rng.choice((4.0, 32.0)),
            "original_max_position_embeddings": rng.choice((16, 64)),
            "beta_fast": rng.choice((1.0, 32.0)),
            "beta_slow": 1.0,
            **({} if mscale is None else {"mscale": mscale, "mscale_all_dim": mscale_all}),
        }
    return {
        **entries,
        "num_key_value_heads": entries["num_attention_heads"],
        "rms_norm_eps": 1e-6,  # of the norms inside attention, in every model of transformers
        "q_lora_rank": rng.choice((None, 14, 20)),
        "kv_lora_rank": rng.choice((12, 28)),
        "qk_nope_head_dim": rng.choice((6, 10)),
        "qk_rope_head_dim": rng.choice((4, 8)),
        "v_head_dim": rng.choice((7, 16)),
        "n_routed_experts": groups * 3,
        "n_group": groups,
        "topk_group": chosen,
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
        "num_experts_per_tok": rng.choice((2, 3)) if chosen == 2 or groups == 1 else 1,
        "moe_intermediate_size": rng.randrange(9, 33),
        "n_shared_experts": rng.choice((1, 2, 3)),
        "first_k_dense_replace": rng.randrange(0, entries["num_hidden_layers"]),
        "routed_scaling_factor": rng.choice((1.0, 2.0)),
    }


def deepseek_v3(rng: random.Random) -> Entries:
    """V2 with another router: it scores a group by its best two. Layers for multi-token prediction are saved, too."""
    entries = deepseek_v2(rng)
    del entries["topk_method"]
    chosen = 2 * entries["topk_group"] if entries["n_group"] > 1 else rng.choice((1, 2, 3))
    return {
        **entries,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": chosen > 1,
        "routed_scaling_factor": rng.choice((1.0, 2.5)),
        "num_nextn_predict_layers": 0 if entries["tie_word_embeddings"] else rng.choice((0, 1, 2)),
    }


def qwen3_next(rng: random.Random) -> Entries:
    entries, keys = common(rng), rng.choice((1, 2, 3))
    kinds = [rng.choice(("linear_attention", "full_attention")) for _ in range(entries["num_hidden_layers"])]
    entries["rope_parameters"]["partial_rotary_factor"] = 0.5
    return {
        **entries,
        **_experts(rng),
        "layer_types": kinds,
        "shared_expert_intermediate_size": rng.randrange(34, 50),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * rng.choice((1, 2)),
        "linear_key_head_dim": rng.choice((3, 5)),
        "linear_value_head_dim": rng.choice((4, 7)),
        **_dense_layers(rng, len(kinds)),
    }


def mamba2(rng: random.Random) -> Entries:
    groups = rng.choice((1, 2, 3))
    heads, width = groups * rng.choice((2, 4)), rng.choice((4, 6))
    return {
        "vocab_size": rng.randrange(TOKENS + 1, 110),
        "hidden_size": heads * width // 2,
        "num_hidden_layers": rng.randrange(2, 5),
        "num_heads": heads,
        "head_dim": width,
        "n_groups": groups,
        "state_size": rng.choice((3, 5)),
        "use_conv_bias": True,  # as in Megatron
        "tie_word_embeddings": rng.random() < 0.3,
    }


def nemotron_h(rng: random.Random) -> Entries:
    entries = common(rng)
    del entries["rms_norm_eps"], entries["num_hidden_layers"], entries["rope_parameters"]
    del entries["tie_word_embeddings"]  # transformers ignores it in this family
    groups = rng.choice((1, 2, 3))
    further = [rng.choice(("linear_attention", "full_attention", "mlp", "moe")) for _ in range(rng.randrange(1, 4))]
    kinds = ["linear_attention", "full_attention", rng.choice(("mlp", "moe")), *further]
    return {
        **entries,
        "layers_block_type": kinds,
        "n_groups": groups,
        "mamba_num_heads": groups * rng.choice((2, 3)),
        "mamba_head_dim": rng.choice((4, 6)),
        "ssm_state_size": rng.choice((3, 5)),
        "n_routed_experts": rng.choice((3, 5)),
        "moe_intermediate_size": rng.randrange(9, 33),
        "moe_shared_expert_intermediate_size": rng.randrange(34, 50),
        "num_experts_per_tok": 2,
        "routed_scaling_factor": rng.choice((1.0, 2.5)),
    }


RANDOM: dict[str, Callable[[random.Random], Entries]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": _without_head_dim,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "gpt2": gpt2,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "qwen3_next": qwen3_next,
    "mamba2": mamba2,
    "nemotron_h": nemotron_h,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "ernie4_5": ernie4_5,
    "ernie4_5_moe": ernie4_5_moe,
    "phi3": phi3,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "minimax_m2": minimax_m2,
    "hunyuan_v1_dense": hunyuan_dense,
    "hunyuan_v1_moe": hunyuan_moe,
    "llama4_text": llama4,
    "seed_oss": seed_oss,
    "qwen2_5_vl": qwen_vision,
    "qwen3_vl": qwen_vision,
    "gemma3": gemma3_vision,
    "llama4": llama4_vision,
}
NOT_IN_MEGATRON = (
    *("ernie4_5_moe", "olmo2", "olmo3", "gemma", "gemma2", "gemma3_text", "minimax_m2"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "llama4_text", "seed_oss", "qwen2_5_vl", "qwen3_vl", "gemma3", "llama4"),
    "qwen3_next",
)
"""Families that no arguments of Megatron core describe."""
