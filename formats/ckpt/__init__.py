"""Checkpoints of distributed training: open, inspect, edit, compare and save them.

Nothing in this package prints, exits or reads the environment. A module is imported at the first use of its names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.chains.block_changes import block_changes, save_partially
    from ckpt.chains.chain import Chain
    from ckpt.chains.compact import Retention
    from ckpt.chains.lost_blocks import RankSet
    from ckpt.chains.partial import recover_partially
    from ckpt.chains.trials import Evaluation
    from ckpt.chains.write import AppendResult, DeltaPolicy
    from ckpt.combine import average, ema_weights, merge_lora
    from ckpt.compare import Diff, diff
    from ckpt.copying.copy import Copy, copy
    from ckpt.copying.follow import follow_copy, update_copy
    from ckpt.copying.sealing import Sealed, seal
    from ckpt.findings import Finding, verify
    from ckpt.job import Job, Progress, save
    from ckpt.opening import open
    from ckpt.pipeline import Resources, Result
    from ckpt.pipeline.clean import clean
    from ckpt.pipeline.shard import COMMIT, Shard
    from ckpt.planning.costs import DataRates, LogCosts, RunCosts
    from ckpt.planning.schedule import FailurePlan, Schedule, plan_schedule
    from ckpt.rename import use_names
    from ckpt.shadow.shadow import Shadow
    from ckpt_formats.core.checkpoint import Checkpoint, Parameter
    from ckpt_formats.core.errors import (
        CkptError,
        CorruptError,
        IncompleteError,
        InvalidArgumentError,
        LockedError,
        NoMatchError,
        NoSpaceError,
        NotFoundError,
        OutputError,
        RulesError,
        UnsafeError,
        UnsupportedError,
    )
    from ckpt_formats.core.format import FilePlan, Plan, WritableFormat
    from ckpt_formats.core.layout import Rule
    from ckpt_formats.core.notebook import NotebookProgress
    from ckpt_formats.core.notices import Notice
    from ckpt_formats.core.tensor import Tensor
    from ckpt_formats.engines.dcp import DCP
    from ckpt_formats.engines.deepspeed import DeepSpeed
    from ckpt_formats.engines.deepspeed.universal import DeepSpeedUniversal
    from ckpt_formats.engines.flax import Flax
    from ckpt_formats.engines.hf import HuggingFace
    from ckpt_formats.engines.megatron import MegatronDist as Megatron
    from ckpt_formats.engines.megatron import MegatronLegacy
    from ckpt_formats.engines.safetensors import Safetensors
    from ckpt_formats.engines.torch_save import Torch
    from ckpt_formats.universal import Universal

_NAMES = {
    "ckpt.chains.block_changes": ("block_changes", "save_partially"),
    "ckpt.chains.chain": ("Chain",),
    "ckpt.chains.compact": ("Retention",),
    "ckpt.chains.lost_blocks": ("RankSet",),
    "ckpt.chains.partial": ("recover_partially",),
    "ckpt.chains.trials": ("Evaluation",),
    "ckpt.chains.write": ("AppendResult", "DeltaPolicy"),
    "ckpt.combine": ("average", "ema_weights", "merge_lora"),
    "ckpt.compare": ("Diff", "diff"),
    "ckpt.copying.copy": ("Copy", "copy"),
    "ckpt.copying.follow": ("follow_copy", "update_copy"),
    "ckpt.findings": ("Finding", "verify"),
    "ckpt.job": ("Job", "Progress", "save"),
    "ckpt.opening": ("open",),
    "ckpt.pipeline": ("Resources", "Result"),
    "ckpt.pipeline.clean": ("clean",),
    "ckpt.pipeline.shard": ("COMMIT", "Shard"),
    "ckpt.planning.costs": ("DataRates", "LogCosts", "RunCosts"),
    "ckpt.planning.schedule": ("FailurePlan", "Schedule", "plan_schedule"),
    "ckpt.rename": ("use_names",),
    "ckpt.copying.sealing": ("Sealed", "seal"),
    "ckpt.shadow.shadow": ("Shadow",),
    "ckpt_formats.core.checkpoint": ("Checkpoint", "Parameter"),
    "ckpt_formats.core.errors": (
        "RulesError",
        "CkptError",
        "CorruptError",
        "IncompleteError",
        "InvalidArgumentError",
        "LockedError",
        "NoMatchError",
        "NoSpaceError",
        "NotFoundError",
        "OutputError",
        "UnsafeError",
        "UnsupportedError",
    ),
    "ckpt_formats.core.format": ("FilePlan", "Plan", "WritableFormat"),
    "ckpt_formats.core.layout": ("Rule",),
    "ckpt_formats.core.notebook": ("NotebookProgress",),
    "ckpt_formats.core.notices": ("Notice",),
    "ckpt_formats.core.tensor": ("Tensor",),
    "ckpt_formats.engines.dcp": ("DCP",),
    "ckpt_formats.engines.deepspeed": ("DeepSpeed",),
    "ckpt_formats.engines.deepspeed.universal": ("DeepSpeedUniversal",),
    "ckpt_formats.engines.flax": ("Flax",),
    "ckpt_formats.engines.hf": ("HuggingFace",),
    "ckpt_formats.engines.megatron": ("Megatron:MegatronDist", "MegatronLegacy"),
    "ckpt_formats.engines.safetensors": ("Safetensors",),
    "ckpt_formats.engines.torch_save": ("Torch",),
    "ckpt_formats.universal": ("Universal",),
}
"""The public names by module; `name:other` has the name `other` there."""
_WHERE = {
    name.partition(":")[0]: (module, name.partition(":")[2] or name)
    for module, names in _NAMES.items()
    for name in names
}

__all__ = [
    "COMMIT",
    "DCP",
    "AppendResult",
    "Chain",
    "Checkpoint",
    "CkptError",
    "Copy",
    "CorruptError",
    "DataRates",
    "DeepSpeed",
    "DeepSpeedUniversal",
    "DeltaPolicy",
    "Diff",
    "Evaluation",
    "FailurePlan",
    "FilePlan",
    "Finding",
    "Flax",
    "HuggingFace",
    "IncompleteError",
    "InvalidArgumentError",
    "Job",
    "LockedError",
    "LogCosts",
    "Megatron",
    "MegatronLegacy",
    "NoMatchError",
    "NoSpaceError",
    "NotFoundError",
    "NotebookProgress",
    "Notice",
    "OutputError",
    "Parameter",
    "Plan",
    "Progress",
    "RankSet",
    "Resources",
    "Result",
    "Retention",
    "Rule",
    "RulesError",
    "RunCosts",
    "Safetensors",
    "Schedule",
    "Sealed",
    "Shadow",
    "Shard",
    "Tensor",
    "Torch",
    "Universal",
    "UnsafeError",
    "UnsupportedError",
    "WritableFormat",
    "average",
    "block_changes",
    "clean",
    "copy",
    "diff",
    "ema_weights",
    "follow_copy",
    "merge_lora",
    "open",
    "plan_schedule",
    "recover_partially",
    "save",
    "save_partially",
    "seal",
    "update_copy",
    "use_names",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    globals()[name] = value = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return list(__all__)
