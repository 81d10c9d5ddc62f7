"""The kinds of runs that are recorded with real engines, as data. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WARM_UP, MIDDLE, END = 2, 5, 8
"""Steps before the recording begins, until an extra checkpoint, and until it ends."""
AFTER = 3
"""Steps of a run that goes on from a restored state."""


BASED, BARE = ("based.chain",), ("bare.chain",)


@dataclass(frozen=True)
class Kind:
    """How a small model is trained. Torch's wrappers save as DCP, DeepSpeed in its own format."""

    name: str
    engine: Literal["plain", "ddp", "fsdp2", "tp", "fsdp1", "deepspeed", "pipeline", "experts", "megatron"] = "plain"
    shards: int = 1
    """Ranks over which the batch is divided, and every parameter but under DDP."""
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = "FULL_SHARD"
    flat: bool = False
    """Does FSDP1's optimizer step flat parameters, and not views of them?"""
    stage: int = 0
    sub_group: int = 20_000
    """Elements of a part of ZeRO 3's, which it steps one after another."""
    offload: bool = False
    fp32_sums: bool = False
    """Does DeepSpeed add gradients up in float32? Then it has another optimizer."""
    optimizer: Literal["adamw-fused", "adamw", "sgd", "cpu-adam"] = "adamw-fused"
    scaler: bool = False
    """fp16's: two of the recorded steps are skipped."""
    dtype: Literal["bf16", "fp16"] = "bf16"
    """Of DeepSpeed's and Megatron's model; fp16's first steps overflow, since the loss scale begins too high."""
    loss_scale: tuple[int, int] = (21, 2)
    """DeepSpeed's at first, as a power of two, and after how many steps it is raised."""
    mixed: bool = False
    """Does FSDP2 compute in bfloat16?"""
    megatron: str = ""
    """The kind of `megatron_jobs` that Megatron core trains."""
    zoo: str = ""
    """The kind of `engines` that DeepSpeed trains."""
    divided: bool = False
    """Does each rank step some of the parameters?"""
    tied: bool = False
    threads: int = 1
    compression: Literal["", "topk", "int8"] = ""
    """What the hook of DDP sends of gradients."""
    chains: tuple[str, ...] = ("based.chain", "bare.chain")
    """With the engine's own checkpoint at the start, or without."""
    end: int = END
    """The last step."""

    @property
    def dp(self) -> int:
        return self.shards * self.replicas

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp


KINDS = {
    kind.name: kind
    for kind in (
        Kind("plain", tied=True, threads=2),
        Kind("scaler_fused", scaler=True, chains=BARE),
        Kind("scaler_sgd", scaler=True, optimizer="sgd", chains=BASED),
        Kind("ddp", "ddp", 2, tied=True),
        Kind("ddp_scaler", "ddp", 2, scaler=True, optimizer="adamw", chains=BARE),
        Kind("ddp_topk", "ddp", 2, tied=True, compression="topk"),
        Kind("ddp_int8", "ddp", 2, compression="int8", optimizer="adamw", end=15),  # integers are larger at first
        Kind("fsdp2", "fsdp2", 2),
        Kind("fsdp2_w3", "fsdp2", 3, optimizer="sgd", tied=True, chains=BARE),
        Kind("hsdp_2x2", "fsdp2", 2, replicas=2, tied=True),
        Kind("fsdp2_tp_2x2", "fsdp2", 2, tp=2, optimizer="adamw", mixed=True),
        Kind("tp", "tp", tp=2, optimizer="adamw", chains=BASED),
        Kind("divided", "ddp", 2, divided=True, tied=True, chains=BASED),
        Kind("pipeline_2x2", "pipeline", 2, pp=2, chains=BARE),
        Kind("experts", "experts", 2, chains=BARE),
        Kind("fsdp1", "fsdp1", 2, tied=True, chains=BASED),
        Kind("fsdp1_flat_2x2", "fsdp1", 2, replicas=2, strategy="HYBRID_SHARD", flat=True, chains=BARE),
        Kind("fsdp1_whole", "fsdp1", 2, strategy="NO_SHARD", optimizer="sgd", chains=BARE),
        Kind("megatron_2x2", "megatron", tp=2, pp=2, megatron="llama_tp2_pp2", chains=BASED),
        Kind("megatron_buckets", "megatron", 2, megatron="llama_dp2_buckets", chains=BARE),
        Kind("megatron_fp32", "megatron", tp=2, megatron="gpt_fp32_tp2", chains=BARE),
        Kind("megatron_tied", "megatron", pp=2, megatron="gpt_tied_pp2", chains=BARE),
        Kind("megatron_plain", "megatron", tp=2, megatron="llama_tp2_plain", chains=BARE),
        Kind("megatron_experts", "megatron", 2, megatron="moe_ep2"),
        Kind("megatron_fp16", "megatron", dtype="fp16", megatron="llama_fp16", chains=BARE),
        Kind("zero0", "deepspeed", 2, chains=BARE),
        Kind("zero1", "deepspeed", 2, stage=1),
        Kind("zero1_fp32_sums", "deepspeed", 2, stage=1, fp32_sums=True, optimizer="sgd", chains=BASED),
        Kind("zero2", "deepspeed", 2, stage=2, optimizer="adamw"),
        Kind("zero1_fp16", "deepspeed", 2, stage=1, dtype="fp16"),
        Kind("zero1_experts", "deepspeed", 2, zoo="z1_bf16_moe4_ep2_dp2", chains=BASED),
        Kind("zero0_pipeline", "deepspeed", pp=2, zoo="z0_fp32_pp2_dp1_untied", chains=BARE),
        Kind("zero3", "deepspeed", 2, stage=3, threads=2),
        Kind("zero2_offload", "deepspeed", 2, stage=2, offload=True, optimizer="cpu-adam", chains=BARE),
        Kind("zero3_offload", "deepspeed", 2, stage=3, offload=True, optimizer="cpu-adam", chains=BARE),
    )
}

LOADED = {
    kind.name: kind for kind in (Kind("megatron_experts_fp16", "megatron", 2, dtype="fp16", megatron="moe_ep2_fp16"),)
}
"""Kinds that are saved and loaded, but not recorded."""
