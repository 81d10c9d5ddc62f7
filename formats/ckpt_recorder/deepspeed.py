"""Runs of DeepSpeed's ZeRO optimizers, which step flat partitions of many parameters.

This module reads private fields of these optimizers. It was checked with DeepSpeed 0.19: stages 1 and 2 are in
`runtime/zero/stage_1_and_2.py`, stage 3 in `stage3.py`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_recorder.run import LocalPart, TrackedRun, TrackedTensor, dtype_name, names_of


def is_engine(model: object) -> bool:
    """Is it an engine from `deepspeed.initialize`?"""
    return type(model).__module__.startswith("deepspeed.") and hasattr(model, "save_checkpoint")


def zero_run(engine: Any, rank: int) -> TrackedRun:
    """The run of a DeepSpeed engine. Raises `UnsupportedError` if its optimizer is not one of ZeRO."""
    zero = engine.optimizer
    if hasattr(zero, "single_partition_of_fp32_groups"):
        tensors = _stages_1_and_2(zero, rank)
        groups = _group_names(zero.bit16_groups, zero.param_names)
        calls = len(zero.bit16_groups)  # one call for each group, during which the optimizer has only that group
    elif hasattr(zero, "fp32_partitioned_groups_flat"):
        names = {parameter: name for name, parameter in engine.module.named_parameters()}
        tensors, groups = _stage_3(zero, names, rank), _groups_of_stage_3(zero, names)
        calls = len(zero.fp32_partitioned_groups_flat)
        if zero.offload_optimizer and getattr(zero, "backup_optimizer", None) is not None:
            raise UnsupportedError("ZeRO 3 that offloads only a part of the optimizer cannot be recorded")
    else:
        raise UnsupportedError(
            f"the engine's optimizer is {type(zero).__name__}: only ZeRO 1, 2 and 3 can be recorded",
            hint="Set zero_optimization.stage to 1, 2 or 3.",
        )
    inner = zero.optimizer
    _, aliases = names_of(engine.module)
    return TrackedRun(
        engine.module,
        (inner,),
        tuple(tensors),
        (groups,),
        aliases,
        (inner.param_groups,),
        was_loaded=engine.loaded_checkpoint_dp_world_size is not None,
        calls_per_step=calls,
        step=int(engine.global_steps),
        notes=lambda: _notes(engine),
        after_step=(engine, "step"),
        counted=lambda: int(engine.global_steps),
    )


def _notes(engine: Any) -> dict[str, Any]:
    """The values that DeepSpeed's own checkpoint has of a step, by the names that it uses."""
    notes: dict[str, Any] = {
        name: int(getattr(engine, name)) for name in ("global_steps", "global_samples", "skipped_steps")
    }
    if isinstance(engine.config, dict):
        notes["ds_config"] = engine.config
    scheduler = engine.lr_scheduler
    return notes | ({"lr_scheduler": scheduler.state_dict()} if hasattr(scheduler, "state_dict") else {})


def _stages_1_and_2(zero: Any, rank: int) -> Iterator[TrackedTensor]:
    """Partition `rank` of each group: its parameters in round-robin order."""
    ranks = [zero_rank(zero, i, rank) for i in range(len(zero.single_partition_of_fp32_groups))]
    for group, vector in enumerate(zero.single_partition_of_fp32_groups):
        begin, at, parts = ranks[group] * vector.numel(), 0, []
        for parameter in zero.round_robin_bit16_groups[group]:
            low, high = max(at, begin), min(at + parameter.numel(), begin + vector.numel())
            if low < high:
                parts.append(
                    _local_part(
                        zero.param_names[parameter], parameter, parameter.shape, low - at, high - at, low - begin
                    )
                )
            at += parameter.numel()
        yield TrackedTensor(vector, 0, group, tuple(parts))


def zero_rank(zero: Any, group: int, rank: int) -> int:
    """The number of this rank's partition of a group."""
    from torch import distributed

    groups = getattr(zero, "real_dp_process_group", None)
    return distributed.get_rank(groups[group]) if groups else rank


def _stage_3(zero: Any, names: Mapping[torch.Tensor, str], rank: int) -> Iterator[TrackedTensor]:
    """This rank's part of each parameter, in the order of each sub-group. ZeRO 3 splits every parameter."""
    for sub_group, vector in enumerate(zero.fp32_partitioned_groups_flat):
        at, parts = 0, []
        for parameter in zero.fp16_groups[sub_group]:
            each = parameter.ds_tensor.ds_numel
            low, high = (min(n * each, parameter.ds_numel) for n in (rank, rank + 1))
            if low < high:
                parts.append(_local_part(names[parameter], parameter, parameter.ds_shape, low, high, at))
            at += each
        yield TrackedTensor(vector, 0, zero.sub_group_to_group_id[sub_group], tuple(parts))


def _local_part(
    name: str, parameter: torch.Tensor, shape: tuple[int, ...], start: int, stop: int, offset: int
) -> LocalPart:
    return LocalPart(name, tuple(shape), dtype_name(parameter.dtype), Box.whole(tuple(shape)), start, stop, offset)


def _group_names(groups: Any, names: Mapping[torch.Tensor, str]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(names[parameter] for parameter in group) for group in groups)


def _groups_of_stage_3(zero: Any, names: Mapping[torch.Tensor, str]) -> tuple[tuple[str, ...], ...]:
    groups: list[list[str]] = [[] for _ in zero.optimizer.param_groups]
    for sub_group, parameters in enumerate(zero.fp16_groups):
        groups[zero.sub_group_to_group_id[sub_group]] += [names[parameter] for parameter in parameters]
    return tuple(map(tuple, groups))
