"""Collect the items that are no tensors of the model: counters, schedulers, loss scaler, state of the training script.

All of them become extras. Items that only describe the layout of the tensors are left out,
by name, because they are wrong in another layout.
"""

from collections.abc import Mapping
from pathlib import Path

from ckpt_formats.containers.torchfile import TorchFile
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.values import Value
from ckpt_formats.state_dicts.extras import extras_of_ranks, with_ranks

BUFFERS = "buffers"
"""Key in the extras of a rank: buffers of the model that differ from those of the first rank."""
UNPLACED = "unplaced_state"
"""Key in the extras of an optimizer: states whose size is not that of the parameters."""
BASE = "base_optimizer"
"""Key in the extras of an optimizer: items of the wrapped optimizer other than states and groups."""
_LAYOUT_OF_MODEL = {
    "module",
    "optimizer",
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
}
_LAYOUT_OF_OPTIMIZER = {
    "base_optimizer_state",
    "base_optimizer_state_step",
    "single_partition_of_fp32_groups",
    "optimizer_state_dict",
    "fp32_flat_groups",
    "fp32_groups",
    "fp32_groups_flat",
    "zero_stage",
    "group_paddings",
    "param_alignment_paddings",
    "partition_count",
    "param_slice_mappings",
    "ds_version",
    "state",
    "param_groups",
}


def collect_extras(
    models: Mapping[str, TorchFile],
    optims: Mapping[str, TorchFile],
    parameters: dict[str, Parameter],
    more_items: Mapping[Path, Mapping[str, Value]] | None = None,
) -> dict[str, Value]:
    """The extras: the items of the first rank, and under `ranks` the items of other ranks that differ.

    `models` and `optims` are files by the name of their rank. `more_items` are further items by file, from the
    readers of tensors. Tensors among the items are added to `parameters`.
    """
    more = more_items or {}
    extras, of_ranks = extras_of_ranks(
        ((rank, _model_items(file, more.get(file.path, {}))) for rank, file in models.items()), parameters
    )
    optimizer, optimizer_of_ranks = extras_of_ranks(
        # stage 0 has the optimizer in the model's file
        ((rank, _optimizer_items(file, more.get(file.path, {}))) for rank, file in (optims or models).items()),
        parameters,
        "optimizer/",
    )
    if optimizer:
        extras["optimizer"] = optimizer
    for rank, items in optimizer_of_ranks.items():
        if items:
            of_ranks.setdefault(rank, {})["optimizer"] = items
    return with_ranks(extras, of_ranks)


def _model_items(file: TorchFile, more: Mapping[str, Value]) -> dict[str, Value]:
    items = {str(key): value for key, value in file.root.items() if key not in _LAYOUT_OF_MODEL}
    return {**{key: value for key, value in more.items() if key != UNPLACED}, **items}


def _optimizer_items(file: TorchFile, more: Mapping[str, Value]) -> dict[str, Value]:
    root = file.root.get("optimizer_state_dict")
    own = ("optimizer_state_dict", "ds_config", "optimizer")
    outer = {} if "module" in file.root else {key: value for key, value in file.root.items() if key not in own}
    inner = root if isinstance(root, dict) else file.root.get("optimizer") or {}
    items = {str(key): value for key, value in (*outer.items(), *inner.items()) if key not in _LAYOUT_OF_OPTIMIZER}
    rest: dict[str, Value] = {}
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        base = inner.get(key)
        if isinstance(base, dict):
            rest |= {str(k): v for k, v in base.items() if k not in ("state", "param_groups")}
    if rest:
        items[BASE] = rest
    return {**items, UNPLACED: more[UNPLACED]} if UNPLACED in more else items
