"""Kinds of runs of real Megatron core: the model, how it is cut, what is saved. Nothing here imports torch."""

from dataclasses import dataclass, field
from typing import Any

LLAMA: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}
GPT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 24,
    "ffn_hidden_size": 52,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "add_bias_linear": True,
    "normalization": "LayerNorm",
}
MOE: dict[str, Any] = {**LLAMA, "num_layers": 2, "num_moe_experts": 4, "moe_router_topk": 2}
DEEPSEEK: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 48,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "rope_type": "rope",
    "rotary_scaling_factor": 1.0,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_shared_expert_intermediate_size": 40,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
    "mtp_num_layers": 1,
}


@dataclass(frozen=True)
class Kind:
    """One run: its ranks, its model, its optimizer."""

    model: dict[str, Any]
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    dp: int = 1
    tied: bool = False
    vocabulary: int = 64
    distributed: bool = True
    """Is the optimizer's state kept in flat buffers, shared by data-parallel ranks?"""
    bucket: int | None = None
    """Elements that end a bucket; None: there is one, unless a tied table has its own."""
    dtype: str = "bf16"
    wrapped: bool = False
    """Do keys of distributed checkpoints begin with `module.`, as those of NeMo do?"""
    more: dict[str, Any] = field(default_factory=dict)
    """Other fields of the model's configuration, such as uneven stages."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """Fields of the optimizer's configuration that say how the loss scale changes."""
    truth: str = ""
    """Whose values are the same: a kind that differs only in how it is cut."""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


KINDS: dict[str, Kind] = {
    "llama": Kind(LLAMA),
    "llama_plain": Kind(LLAMA, distributed=False),
    "llama_tp2_pp2": Kind(LLAMA, tp=2, pp=2),
    "llama_tp2_plain": Kind(LLAMA, tp=2, distributed=False),
    "llama_vpp": Kind(LLAMA, pp=2, vpp=2, truth="llama"),
    "llama_uneven": Kind(LLAMA, pp=2, wrapped=True, more={"num_layers_in_first_pipeline_stage": 1}),
    "llama_dp2_buckets": Kind(LLAMA, dp=2, bucket=4000, truth="llama"),
    "gpt_tied_tp2": Kind(GPT, tp=2, tied=True, vocabulary=72),
    "gpt_tied": Kind(GPT, tied=True, vocabulary=72),
    "gpt_tied_pp2": Kind(GPT, pp=2, tied=True, vocabulary=72, truth="gpt_tied"),
    "gpt_fp32_tp2": Kind(GPT, tp=2, tied=True, vocabulary=72, dtype="fp32", distributed=False),
    "gpt": Kind(GPT, vocabulary=75),
    "gpt_dp3_buckets": Kind(GPT, dp=3, bucket=3000, vocabulary=75, truth="gpt"),
    "moe": Kind(MOE),
    "moe_ep2": Kind(MOE, ep=2, dp=2),
    "deepseek": Kind(DEEPSEEK),
    "deepseek_tp2_pp2": Kind(DEEPSEEK, tp=2, pp=2),
    "deepseek_tp2_ep2": Kind(DEEPSEEK, tp=2, ep=2),
    "deepseek_vpp_ep2": Kind(DEEPSEEK, pp=2, vpp=2, ep=2, dp=2),
}
