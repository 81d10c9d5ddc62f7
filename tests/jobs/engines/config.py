"""The DeepSpeed configuration of a kind."""

from __future__ import annotations

from typing import Any

from engines.kinds import Kind
from engines.model import BATCH

RATE = 2e-3
DECAYS = (0.1, 0.0, 0.03)
"""Weight decay of the first, second and third parameter group."""

_ADAM = {"lr": RATE, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": DECAYS[0]}
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch-adamw": {"type": "AdamW", "params": {**_ADAM, "torch_adam": True}},
    "torch-amsgrad": {"type": "AdamW", "params": {**_ADAM, "torch_adam": True, "amsgrad": True}},
    "fused-adamw": {"type": "AdamW", "params": _ADAM},
    "cpu-adamw": {"type": "AdamW", "params": _ADAM},
    "cpu-lion": {"type": "Lion", "params": {"lr": RATE / 5, "betas": [0.9, 0.99], "weight_decay": DECAYS[0]}},
    "torch-sgd": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": DECAYS[0]}},
    "torch-adagrad": {"type": "Adagrad", "params": {"lr": RATE, "weight_decay": DECAYS[0]}},
    "muon": {"type": "Muon", "params": {**_ADAM, "torch_adam": True, "muon_lr": RATE * 5, "momentum": 0.9}},
}
_AUTOTP = [
    {"patterns": [r".*\.(out|down)\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
]


def config(kind: Kind, universal: bool = False) -> dict[str, Any]:
    """What `deepspeed.initialize` is given; `universal` if a universal checkpoint is to be loaded."""
    micro_batches = 2 if kind.pipeline else 1
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // kind.dp // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**6,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": kind.stage, **kind.zero},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": RATE / 10, "warmup_max_lr": RATE, "warmup_num_steps": 20},
        },
        "checkpoint": {"tag_validation": "FAIL"},
    }
    if kind.optimizer in _OPTIMIZERS:
        out["optimizer"] = _OPTIMIZERS[kind.optimizer]
    if kind.stage == 3:
        # Small parameters stay whole on every rank, large ones do not: both ways occur.
        out["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    if kind.dtype == "bf16":
        out["bf16"] = {"enabled": True}
    if kind.dtype == "fp16":
        out["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 3}
    if kind.accumulate_fp32:
        out["data_types"] = {"grad_accum_dtype": "fp32"}
    if kind.autotp:
        out["tensor_parallel"] = {
            "autotp_size": kind.tp,
            "partition_config": {"use_default_specs": False, "layer_specs": _AUTOTP},
        }
    out.update(kind.config)
    if universal:
        out["checkpoint"] = {**out["checkpoint"], "load_universal": True}
    return out
