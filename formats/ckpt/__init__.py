"""Checkpoints of distributed training: open, inspect, edit, compare and save them.

Nothing in this package prints or exits. Only stores and compiled kernels read the environment. A module is imported at
the first use of its names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt import errors, ext, partial, planning, runs, types
    from ckpt.chains.chain import Chain
    from ckpt.chains.compact import Retention
    from ckpt.chains.trials import Evaluation
    from ckpt.chains.write import DeltaPolicy
    from ckpt.combine import average, convert_lora, ema_weights, merge, merge_lora, resize
    from ckpt.compare import diff, diff_each
    from ckpt.compare.fitting import check
    from ckpt.compare.statistics import stats
    from ckpt.copying.copy import Copy, copy
    from ckpt.copying.follow import follow_copy, update_copy
    from ckpt.copying.rank_index import index
    from ckpt.copying.sealing import seal
    from ckpt.findings import verify
    from ckpt.following.follower import Follower
    from ckpt.job import Job, save
    from ckpt.opening import checkpoints, from_state_dict, open
    from ckpt.pipeline import Resources
    from ckpt.pipeline.targets import clean
    from ckpt.protection.protect import protect
    from ckpt.protection.repair import repair
    from ckpt.publishing.publish import publish
    from ckpt.publishing.watch import publish_each
    from ckpt.reading import Reading
    from ckpt.rename import use_names
    from ckpt.shadow.shadow import Shadow
    from ckpt_formats.core.checkpoint import Checkpoint
    from ckpt_formats.core.errors import CkptError, CorruptError, InvalidArgumentError, NotFoundError, UnsupportedError
    from ckpt_formats.core.format import WritableFormat
    from ckpt_formats.core.layout import Rule
    from ckpt_formats.core.notebook import NotebookProgress
    from ckpt_formats.engines.dcp import DCP
    from ckpt_formats.engines.deepspeed import DeepSpeed
    from ckpt_formats.engines.deepspeed.universal import DeepSpeedUniversal
    from ckpt_formats.engines.flax import Flax
    from ckpt_formats.engines.gguf import Gguf
    from ckpt_formats.engines.hf import HuggingFace
    from ckpt_formats.engines.megatron import MegatronDist as Megatron
    from ckpt_formats.engines.megatron import MegatronLegacy
    from ckpt_formats.engines.orbax import Orbax
    from ckpt_formats.engines.safetensors import Safetensors
    from ckpt_formats.engines.torch_save import Torch
    from ckpt_formats.universal import Universal

    __version__: str

_NAMESPACES = ("errors", "ext", "partial", "planning", "runs", "types")
"""Modules with further names."""
_NAMES = {
    "ckpt.chains.chain": ("Chain",),
    "ckpt.chains.compact": ("Retention",),
    "ckpt.chains.trials": ("Evaluation",),
    "ckpt.chains.write": ("DeltaPolicy",),
    "ckpt.combine": (
        "average",
        "convert_lora",
        "ema_weights",
        "merge",
        "merge_lora",
        "resize",
    ),
    "ckpt.compare": ("diff", "diff_each"),
    "ckpt.copying.copy": (
        "Copy",
        "copy",
    ),
    "ckpt.copying.follow": (
        "follow_copy",
        "update_copy",
    ),
    "ckpt.copying.rank_index": ("index",),
    "ckpt.copying.sealing": ("seal",),
    "ckpt.findings": ("verify",),
    "ckpt.compare.fitting": ("check",),
    "ckpt.following.follower": ("Follower",),
    "ckpt.job": (
        "Job",
        "save",
    ),
    "ckpt.opening": (
        "checkpoints",
        "from_state_dict",
        "open",
    ),
    "ckpt.pipeline": ("Resources",),
    "ckpt.pipeline.targets": ("clean",),
    "ckpt.protection.protect": ("protect",),
    "ckpt.protection.repair": ("repair",),
    "ckpt.publishing.publish": ("publish",),
    "ckpt.publishing.watch": ("publish_each",),
    "ckpt.reading": ("Reading",),
    "ckpt.rename": ("use_names",),
    "ckpt.shadow.shadow": ("Shadow",),
    "ckpt.compare.statistics": ("stats",),
    "ckpt_formats.core.checkpoint": ("Checkpoint",),
    "ckpt_formats.core.errors": (
        "CkptError",
        "CorruptError",
        "InvalidArgumentError",
        "NotFoundError",
        "UnsupportedError",
    ),
    "ckpt_formats.core.format": ("WritableFormat",),
    "ckpt_formats.core.layout": ("Rule",),
    "ckpt_formats.core.notebook": ("NotebookProgress",),
    "ckpt_formats.engines.dcp": ("DCP",),
    "ckpt_formats.engines.deepspeed": ("DeepSpeed",),
    "ckpt_formats.engines.deepspeed.universal": ("DeepSpeedUniversal",),
    "ckpt_formats.engines.flax": ("Flax",),
    "ckpt_formats.engines.gguf": ("Gguf",),
    "ckpt_formats.engines.orbax": ("Orbax",),
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
    "DCP",
    "Chain",
    "Checkpoint",
    "CkptError",
    "Copy",
    "CorruptError",
    "DeepSpeed",
    "DeepSpeedUniversal",
    "DeltaPolicy",
    "Evaluation",
    "Flax",
    "Follower",
    "Gguf",
    "HuggingFace",
    "InvalidArgumentError",
    "Job",
    "Megatron",
    "MegatronLegacy",
    "NotFoundError",
    "NotebookProgress",
    "Orbax",
    "Reading",
    "Resources",
    "Retention",
    "Rule",
    "Safetensors",
    "Shadow",
    "Torch",
    "Universal",
    "UnsupportedError",
    "WritableFormat",
    "average",
    "check",
    "checkpoints",
    "clean",
    "convert_lora",
    "copy",
    "diff",
    "diff_each",
    "ema_weights",
    "errors",
    "ext",
    "follow_copy",
    "from_state_dict",
    "index",
    "merge",
    "merge_lora",
    "open",
    "partial",
    "planning",
    "protect",
    "publish",
    "publish_each",
    "repair",
    "resize",
    "runs",
    "save",
    "seal",
    "stats",
    "types",
    "update_copy",
    "use_names",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("ckpt_formats.core.version").VERSION
    if name in _NAMESPACES:
        return import_module(f"ckpt.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    globals()[name] = value = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return list(__all__)
