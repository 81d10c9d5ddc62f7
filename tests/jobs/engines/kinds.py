"""The zoo: every kind of DeepSpeed checkpoint that our tests read, as data.

A kind says how a tiny model is trained; `train.py` trains it for real. Nothing here imports torch, so a test
module can be parametrised over the zoo without paying for it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Options = Mapping[str, object]


@dataclass(frozen=True)
class Kind:
    """How one checkpoint of the zoo was trained.

    The model is "gpt" (plain modules; may hold experts, or be cut by DeepSpeed's AutoTP) or "megatron" (its own
    tensor parallelism, grouped-query attention, SwiGLU, padded vocabulary; a `PipelineModule` where `pp` says so).
    """

    name: str
    stage: int = 1
    dtype: Literal["fp32", "fp16", "bf16"] = "bf16"
    dp: int = 2
    tp: int = 1
    pp: int = 1
    ep: int = 1
    model: Literal["gpt", "megatron"] = "gpt"
    pipeline: bool = False
    autotp: bool = False
    experts: int = 0
    tied: bool = False
    frozen: bool = False
    groups: int = 2
    optimizer: str = "torch-adamw"
    accumulate_fp32: bool = False
    zero: Options = field(default_factory=dict, hash=False)
    config: Options = field(default_factory=dict, hash=False)
    client_state: Literal["plain", "rich", "bare"] = "plain"
    steps: int = 5
    hidden: int = 64
    layers: int = 2
    loads: bool = True
    """Whether DeepSpeed 0.19.8 can load what it saved; elsewhere it stops with an error."""

    @property
    def world(self) -> int:
        """The number of processes; expert parallelism divides data parallelism and adds none."""
        return self.dp * self.tp * self.pp

    @property
    def compiled(self) -> str | None:
        """The DeepSpeed operator which g++ has to build (half a minute, once per machine), if any."""
        return COMPILED.get(self.optimizer)


COMPILED = {"fused-adamw": "FusedAdamBuilder", "cpu-adamw": "CPUAdamBuilder", "cpu-lion": "CPULionBuilder"}

ELASTIC: Options = {"elastic_checkpoint": True}
BF16_MASTERS: Options = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
}
LEGACY_STREAM: Options = {"checkpoint": {"tag_validation": "FAIL", "checkpoint_serialization": False}}
LOSS_SCALE_TOO_HIGH: Options = {
    "fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}
}
OFFLOAD: Options = {"offload_optimizer": {"device": "cpu"}}
ROUND_ROBIN: Options = {"round_robin_gradients": True}

STAGES_AND_DTYPES = [
    Kind(f"z{stage}_{dtype}_dp2", stage=stage, dtype=dtype)
    for stage in (0, 1, 2, 3)
    for dtype in ("fp32", "fp16", "bf16")
]

DATA_PARALLEL = [
    Kind("z0_fp32_dp1", 0, "fp32", dp=1),
    Kind("z1_bf16_dp1", 1, dp=1),
    Kind("z2_bf16_dp1", 2, dp=1),
    Kind("z3_bf16_dp1", 3, dp=1),
    Kind("z1_bf16_dp3", 1, dp=3),
    Kind("z2_bf16_dp3", 2, dp=3),
    Kind("z3_bf16_dp3", 3, dp=3),
    Kind("z1_bf16_dp4", 1, dp=4),
    Kind("z2_fp32_dp4", 2, "fp32", dp=4),
    Kind("z3_bf16_dp4", 3, dp=4),
    Kind("z3_bf16_dp4_hpz2", 3, dp=4, zero={"zero_hpz_partition_size": 2}),
]

BF16_OPTIMIZER = [
    Kind("z1_bf16opt_dp2", accumulate_fp32=True),
    Kind("z1_bf16opt_dp4", dp=4, accumulate_fp32=True),
    Kind("z1_bf16opt_dp3_tied_frozen", dp=3, accumulate_fp32=True, tied=True, frozen=True),
]

TIED_AND_FROZEN = [
    Kind("z0_bf16_dp2_tied_frozen", 0, tied=True, frozen=True),
    Kind("z1_bf16_dp2_tied_frozen", 1, tied=True, frozen=True),
    Kind("z2_bf16_dp2_tied_frozen", 2, tied=True, frozen=True),
    Kind("z3_bf16_dp2_tied_frozen", 3, tied=True, frozen=True),
    Kind("z3_bf16_dp4_tied_frozen", 3, dp=4, tied=True, frozen=True),
]

GROUPS = [
    Kind("z1_bf16_dp2_one_group", 1, groups=1),
    Kind("z1_bf16_dp2_three_groups", 1, groups=3),
    Kind("z3_bf16_dp2_one_group", 3, groups=1),
    Kind("z3_bf16_dp2_three_groups", 3, groups=3),
]

FLAT_ORDER = [
    Kind("z1_bf16_dp2_round_robin", 1, zero=ROUND_ROBIN),
    Kind("z2_bf16_dp2_round_robin", 2, zero=ROUND_ROBIN),
    Kind("z2_bf16_dp4_round_robin", 2, dp=4, zero=ROUND_ROBIN),
    Kind("z1_bf16_dp2_aligned", 1, zero={"parameter_alignment": True}),
    Kind("z2_bf16_dp3_aligned", 2, dp=3, zero={"parameter_alignment": True}),
    Kind("z1_bf16_dp2_elastic", 1, zero=ELASTIC, loads=False),
    Kind("z2_bf16_dp3_elastic", 2, dp=3, zero=ELASTIC, loads=False),
    Kind("z3_bf16_dp2_sub_groups", 3, zero={"sub_group_size": 9000}),
    Kind("z3_bf16_dp4_sub_groups", 3, dp=4, zero={"sub_group_size": 9000}),
]

OPTIMIZERS = [
    Kind("z0_fp32_dp2_fused", 0, "fp32", optimizer="fused-adamw"),
    Kind("z0_fp16_dp2_fused", 0, "fp16", optimizer="fused-adamw"),
    Kind("z0_bf16_dp2_fused", 0, optimizer="fused-adamw"),
    Kind("z1_bf16_dp2_fused", 1, optimizer="fused-adamw"),
    Kind("z1_bf16_dp2_elastic_fused", 1, optimizer="fused-adamw", zero=ELASTIC),
    Kind("z1_bf16opt_dp2_fused", 1, optimizer="fused-adamw", accumulate_fp32=True),
    Kind("z3_bf16_dp2_fused", 3, optimizer="fused-adamw"),
    Kind("z2_bf16_dp2_offload", 2, optimizer="cpu-adamw", zero=OFFLOAD),
    Kind("z3_bf16_dp2_offload", 3, optimizer="cpu-adamw", zero=OFFLOAD),
    Kind("z2_bf16_dp2_offload_lion", 2, optimizer="cpu-lion", zero=OFFLOAD),
    Kind("z1_bf16_dp2_bf16_states", 1, config=BF16_MASTERS),
    Kind("z2_bf16_dp2_bf16_states", 2, config=BF16_MASTERS),
    Kind("z3_bf16_dp2_bf16_states", 3, config=BF16_MASTERS),
    Kind("z1_bf16_dp2_amsgrad", 1, optimizer="torch-amsgrad"),
    Kind("z1_bf16_dp2_sgd", 1, optimizer="torch-sgd"),
    Kind("z3_bf16_dp2_sgd", 3, optimizer="torch-sgd"),
    Kind("z1_bf16_dp2_lion", 1, optimizer="own-lion"),
    Kind("z3_bf16_dp2_lion", 3, optimizer="own-lion"),
    Kind("z1_bf16_dp2_adagrad", 1, optimizer="torch-adagrad", groups=1),
    Kind("z3_bf16_dp2_adagrad", 3, optimizer="torch-adagrad", groups=1, loads=False),
    Kind("z1_bf16_dp2_muon", 1, optimizer="muon"),
    Kind("z1_bf16_dp3_muon", 1, dp=3, optimizer="muon"),
    Kind("z1_bf16opt_dp2_muon", 1, optimizer="muon", accumulate_fp32=True),
    Kind("z2_bf16_dp2_muon", 2, optimizer="muon"),
    Kind("z3_bf16_dp2_muon", 3, optimizer="muon", zero={"reduce_scatter": False}),
    Kind("z1_fp16_dp2_skipped_steps", 1, "fp16", config=LOSS_SCALE_TOO_HIGH, steps=7),
]

CONTAINERS = [
    Kind("z1_bf16_dp2_legacy_stream", 1, config=LEGACY_STREAM),
    Kind("z3_bf16_dp2_legacy_stream", 3, config=LEGACY_STREAM),
    Kind("z1_bf16_dp2_no_universal_info", 1, client_state="bare"),
    Kind("z3_bf16_dp2_no_universal_info", 3, client_state="bare"),
    Kind("z1_bf16_dp2_rich_client_state", 1, client_state="rich"),
    Kind("z3_bf16_dp2_rich_client_state", 3, client_state="rich"),
]

MODEL_PARALLEL = [
    Kind("z1_bf16opt_pp2_dp2", 1, pp=2, model="megatron", pipeline=True, layers=3, tied=True, accumulate_fp32=True),
    Kind("z1_bf16_pp2_dp2", 1, pp=2, model="megatron", pipeline=True, layers=3, tied=True),
    Kind("z1_bf16_pp4_dp1", 1, dp=1, pp=4, model="megatron", pipeline=True, tied=True, layers=5),
    Kind("z0_bf16_pp2_dp2", 0, pp=2, model="megatron", pipeline=True, layers=3, tied=True, loads=False),
    Kind("z0_fp32_pp2_dp1_untied", 0, "fp32", dp=1, pp=2, model="megatron", pipeline=True, layers=3),
    Kind("z1_bf16_tp2_dp2", 1, tp=2, model="megatron", tied=True),
    Kind("z1_bf16opt_tp2_dp1", 1, dp=1, tp=2, model="megatron", tied=True, accumulate_fp32=True),
    Kind("z2_fp16_tp2_dp2", 2, "fp16", tp=2, model="megatron", tied=True),
    Kind("z1_fp32_tp2_dp2_untied", 1, "fp32", tp=2, model="megatron"),
    Kind("z0_fp32_tp2_dp2_untied", 0, "fp32", tp=2, model="megatron"),
    Kind("z1_bf16_tp4_dp1", 1, dp=1, tp=4, model="megatron", tied=True),
    Kind("z1_bf16opt_tp2_pp2_dp1", 1, dp=1, tp=2, pp=2, model="megatron", pipeline=True, layers=3, tied=True,
         accumulate_fp32=True),
    Kind("z1_bf16_tp2_pp2_dp1_untied", 1, dp=1, tp=2, pp=2, model="megatron", pipeline=True, layers=3),
    Kind("z1_bf16_megatron_dp2", 1, model="megatron", tied=True),
    Kind("z1_bf16_autotp2_dp2", 1, tp=2, autotp=True),
    Kind("z2_bf16_autotp2_dp2", 2, tp=2, autotp=True),
    Kind("z3_bf16_autotp2_dp2", 3, tp=2, autotp=True),
]  # fmt: skip

EXPERTS = [
    Kind("z0_bf16_moe4_ep2_dp2", 0, ep=2, experts=4),
    Kind("z1_bf16_moe4_ep2_dp2", 1, ep=2, experts=4),
    Kind("z1_bf16opt_moe4_ep1_dp2", 1, ep=1, experts=4, accumulate_fp32=True),
    Kind("z1_bf16opt_moe4_ep2_dp2", 1, ep=2, experts=4, accumulate_fp32=True),
    Kind("z1_bf16opt_moe4_ep2_dp4", 1, dp=4, ep=2, experts=4, accumulate_fp32=True),
    Kind("z2_bf16_moe4_ep1_dp2", 2, ep=1, experts=4),
    Kind("z2_bf16_moe4_ep2_dp2", 2, ep=2, experts=4),
    Kind("z2_bf16_moe4_ep2_dp4", 2, dp=4, ep=2, experts=4),
]

EVERY_KIND = (
    *STAGES_AND_DTYPES,
    *DATA_PARALLEL,
    *BF16_OPTIMIZER,
    *TIED_AND_FROZEN,
    *GROUPS,
    *FLAT_ORDER,
    *OPTIMIZERS,
    *CONTAINERS,
    *MODEL_PARALLEL,
    *EXPERTS,
)
_ONLY_READ = """\
z0_fp32_dp1 z1_bf16_dp1 z2_bf16_dp1 z3_bf16_dp1 z1_bf16_dp3 z2_bf16_dp3 z3_bf16_dp3 z1_bf16_dp4 z2_fp32_dp4
z3_bf16_dp4 z3_bf16_dp4_hpz2 z3_bf16_dp2_tied_frozen z1_bf16_dp2_three_groups z3_bf16_dp2_one_group
z1_bf16_dp2_elastic z2_bf16_dp3_elastic z0_fp32_dp2_fused z0_bf16_dp2_fused z1_bf16_dp2_elastic_fused
z1_bf16opt_dp2_fused z3_bf16_dp2_fused z3_bf16_dp2_offload z2_bf16_dp2_offload_lion z3_bf16_dp2_bf16_states
z3_bf16_dp2_sgd z1_bf16_dp2_lion z1_bf16_dp2_adagrad z2_bf16_dp2_muon z3_bf16_dp2_legacy_stream
z1_bf16_dp2_no_universal_info z3_bf16_dp2_no_universal_info z1_bf16opt_pp2_dp2 z0_bf16_pp2_dp2 z1_bf16opt_tp2_dp1
z0_fp32_tp2_dp2_untied z1_bf16_tp2_pp2_dp1_untied z0_bf16_moe4_ep2_dp2 z1_bf16_moe4_ep2_dp2
z1_bf16opt_moe4_ep1_dp2 z1_bf16opt_moe4_ep2_dp2 z1_bf16opt_moe4_ep2_dp4 z2_bf16_moe4_ep1_dp2 z2_bf16_moe4_ep2_dp2
z2_bf16_moe4_ep2_dp4
"""
ONLY_READ = frozenset(_ONLY_READ.split())
"""Kinds that no test resumes: they are not trained on after they are saved, and have no losses to compare with."""
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
"""What torch builds DeepSpeed's operators with."""
KINDS: dict[str, Kind] = {kind.name: kind for kind in EVERY_KIND if COMPILER or not kind.compiled}
