"""Runs of DeepSpeed's optimizers, most of which step flat partitions of many parameters.

This module reads private fields of these optimizers. It was checked with DeepSpeed 0.19: stages 1 and 2 are in
`runtime/zero/stage_1_and_2.py`, stage 3 in `stage3.py`, those without ZeRO in `runtime/bf16_optimizer.py` and
`runtime/fp16`.

The model computes with copies in low precision, which the optimizers make from their masters after each step. Stages 1
and 2 have full copies on every rank, stage 3 has this rank's partition of each (`ds_tensor`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.state_names import MODEL
from ckpt_training.engines.run import TrackedRun, TrackedTensor, buffer_shards, clean_name, names_of, renamed
from ckpt_training.local_shards import LocalPart, LocalShard, dtype_name, shard_of


def is_engine(model: object) -> bool:
    """Is it an engine from `deepspeed.initialize`?"""
    return type(model).__module__.startswith("deepspeed.") and hasattr(model, "save_checkpoint")


def deepspeed_run(engine: Any, rank: int) -> TrackedRun:
    """The run of a DeepSpeed engine. Raises `UnsupportedError` if its optimizer is not known."""
    optimizer = engine.optimizer
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    calls = 1
    if getattr(optimizer, "offloaded_states", None):
        raise UnsupportedError(
            "the states of DeepSpeed's engine are offloaded", hint="Call engine.reload_states() before this."
        )
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        tensors = tuple(_stages_1_and_2(optimizer, rank))
        groups = _group_names(optimizer.bit16_groups, optimizer.param_names)
        calls = len(optimizer.bit16_groups)  # one call for each group, during which the optimizer has only that group
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
        tensors, groups = tuple(_stage_3(optimizer, names)), _groups_of_stage_3(optimizer, names)
        calls = len(optimizer.fp32_partitioned_groups_flat)
        if optimizer.offload_optimizer and getattr(optimizer, "backup_optimizer", None) is not None:
            raise UnsupportedError("ZeRO 3 that offloads only a part of the optimizer cannot be recorded")
    else:
        rows = _without_zero(optimizer, rank)
        tensors = tuple(_tensor(group, vector, of, names, begin) for group, vector, of, begin in rows)
        groups = tuple(
            tuple(names[parameter] for number, _, of, _ in rows if number == group for parameter in of)
            for group in range(len(_inner(optimizer).param_groups))
        )
    _check_sizes(tensors)
    inner = _inner(optimizer)
    _, aliases = names_of(engine.module)
    is_stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    run = TrackedRun(
        engine.module,
        (inner,),
        tensors,
        (groups,),
        aliases,
        (inner.param_groups,),
        was_loaded=engine.loaded_checkpoint_dp_world_size is not None,
        calls_per_step=calls,
        step=int(engine.global_steps),
        notes=lambda: _notes(engine),
        # A pipeline refuses `step`: its `train_batch` takes the step itself.
        after_step=(engine, "_take_model_step" if hasattr(engine, "_exec_schedule") else "step"),
        counted=lambda: int(engine.global_steps),
        model_shards=partial(_shards_of_stage_3, optimizer, engine.module) if is_stage_3 else None,
        refresh=partial(_refresh, optimizer),
        set_step=partial(_set_step, engine),
        set_notes=partial(_set_notes, engine),
    )
    if type(inner).__name__ == "MuonWithAuxAdam" and hasattr(optimizer, "single_partition_of_fp32_groups"):
        run = replace(run, arrange=partial(momentum_of_partition, run), state_parts=partial(parts_of_momentum, run))
    experts = _experts(engine.module)
    return renamed(run, lambda name: _numbered(name, experts)) if experts else run


def _check_sizes(tensors: Sequence[TrackedTensor]) -> None:
    """Raise `UnsupportedError` if a vector is shorter than the parts that it should have, as those on an NVMe are."""
    for one in tensors:
        for part in one.parts:
            if part.offset < 0 or part.offset + part.size > one.tensor.numel():
                raise UnsupportedError(
                    f"DeepSpeed has {one.tensor.numel()} elements of the optimizer's vector with `{part.name}`, not "
                    f"{part.offset + part.size} or more",
                    hint="Offload to the CPU, not to an NVMe.",
                )


def _shards_of_stage_3(zero: Any, model: torch.nn.Module) -> Iterator[LocalShard]:
    """This rank's partition of every parameter, frozen ones included, and the buffers. Raises `UnsupportedError`."""
    stepped = {id(parameter) for group in zero.fp16_groups for parameter in group}
    for name, parameter in model.named_parameters():
        part, partition = _part_of_stage_3(clean_name(name), parameter, 0), parameter.ds_tensor  # type: ignore[attr-defined]
        if hasattr(partition, "ds_quant_scale"):
            raise UnsupportedError(
                f"`{name}` is quantized by ZeRO++", hint="Set zero_quantized_nontrainable_weights to false."
            )
        if part is None:
            continue
        if partition.dim() != 1 or partition.numel() < part.size:
            raise UnsupportedError(
                f"DeepSpeed has a partition of shape {list(partition.shape)} of `{name}`, not of {part.size} elements",
                hint="Offload to the CPU, not to an NVMe.",
            )
        part = replace(part, dtype=dtype_name(partition.dtype))
        yield shard_of(partition.detach(), part, MODEL, "parameter" if id(parameter) in stepped else "frozen")
    yield from buffer_shards(model)


def _refresh(optimizer: Any) -> None:
    """Make the copies that the model computes with, from the masters, as the optimizer does after a step."""
    with torch.no_grad():
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            optimizer.checkpoint_event_prologue()  # frees full parameters, which have other values now
            for sub_group in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
            for parameter in optimizer.module.parameters():
                if getattr(parameter, "ds_secondary_tensor", None) is not None:
                    parameter.ds_secondary_tensor = None  # DeepSpeed forgets only those of parameters that it steps
            optimizer.checkpoint_event_epilogue()
        elif hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp32_groups_flat"):
            for vector, parameters in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
                for parameter, master in zip(parameters, _unflattened(vector, parameters), strict=True):
                    parameter.data.copy_(master.data)
        elif hasattr(optimizer, "fp32_groups"):
            for masters, parameters in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
                for parameter, master in zip(parameters, masters, strict=True):
                    parameter.data.copy_(master.data)


def _unflattened(vector: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The values of parameters that are one after another in a vector, each with the shape of its parameter."""
    sizes = [parameter.numel() for parameter in parameters]
    parts = torch.split(vector[: sum(sizes)], sizes)
    return (part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True))


def _set_step(engine: Any, step: int) -> None:
    """Set the counts of steps, as if none was skipped. Micro-steps go on at the start of an accumulation."""
    engine.global_steps = step
    engine.global_samples = step * engine.train_batch_size()
    engine.micro_steps = step * engine.gradient_accumulation_steps()
    engine.skipped_steps = 0


_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "cur_hysteresis")
"""The fields of a loss scaler that training changes, or that DeepSpeed's own load takes from a checkpoint."""


def _set_notes(engine: Any, notes: Mapping[str, Any]) -> set[str]:
    """Take the counts, the schedule and the loss scaler, as DeepSpeed's own load does.

    Returns the names of the notes that are taken whole.
    """
    names = set[str]()
    for name in ("global_steps", "global_samples", "skipped_steps"):
        if type(notes.get(name)) is int and notes[name] >= 0:
            setattr(engine, name, notes[name])
            names.add(name)
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    schedule = notes.get("lr_scheduler")
    if isinstance(schedule, Mapping) and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(dict(schedule))
        names.add("lr_scheduler")
    of_optimizer = notes.get("optimizer")
    if isinstance(of_optimizer, Mapping):
        _set_scaler(engine.optimizer, of_optimizer)
    return names


def _set_scaler(optimizer: Any, stored: Mapping[str, Any]) -> None:
    """Take a dynamic loss scaler: stages 1 to 3 store an object with fields, stage 0 the fields themselves."""
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    get = getattr(stored.get("loss_scaler"), "get", stored.get)
    values = {name: value for name in _SCALER if type(value := get(name)) in (int, float)}
    is_dynamic = getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False)
    if is_dynamic and "cur_scale" in values:
        for name in values.keys() & vars(scaler).keys():
            setattr(scaler, name, values[name])


def parts_of_momentum(run: TrackedRun, number: int, name: str) -> tuple[LocalPart, ...] | None:
    """The parts of Muon's momentum: the parameters of a partition in full, also those that it has in part."""
    if name != "momentum_buffer":
        return None
    parts, at = [], 0
    for part in run.tensors[number].parts:
        size = prod(part.shape)
        parts.append(replace(part, start=0, stop=size, offset=at))
        at += size
    return tuple(parts)


def momentum_of_partition(run: TrackedRun, number: int, name: str, state: torch.Tensor) -> torch.Tensor:
    """The momentum of Muon with the elements of a partition. DeepSpeed has that of all its parameters in full."""
    one = run.tensors[number]
    if name != "momentum_buffer" or state.numel() != sum(prod(part.shape) for part in one.parts):
        return state
    momentum, at = state.new_zeros(one.tensor.numel()), 0
    for part in one.parts:
        momentum[part.offset : part.offset + part.size] = state[at + part.start : at + part.stop]
        at += prod(part.shape)
    return momentum


_EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(\..*)")
"""The name of a parameter of an expert, with its number among those of the rank."""


def _experts(model: torch.nn.Module) -> dict[str, int]:
    """The number in the full model of this rank's first expert, by the start of the experts' names."""
    first = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "MoE" and hasattr(module, "num_local_experts"):
            from deepspeed.utils import groups

            rank = groups._get_expert_parallel_rank(module.expert_group_name)
            first[clean_name(f"{name}." if name else "")] = rank * module.num_local_experts
    return first


def _numbered(name: str, experts: Mapping[str, int]) -> str:
    """The name of a parameter with the number that its expert has in the full model."""
    match = _EXPERT.fullmatch(name)
    first = max((start for start in experts if name.startswith(start)), key=len, default=None)
    if match is None or first is None:
        return name
    return f"{match[1]}{int(match[2]) + experts[first]}{match[3]}"


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that does the arithmetic: without ZeRO and in float32, the engine has it itself."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _without_zero(optimizer: Any, rank: int) -> list[tuple[int, torch.Tensor, Sequence[torch.Tensor], int]]:
    """Each tensor that is stepped, with its group, its parameters one after another, and where in them it begins.

    Raises `UnsupportedError` if the optimizer is not known.
    """
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        vectors = enumerate(optimizer.fp32_groups_flat_partition)
        return [
            (group, vector, optimizer.bf16_groups[group], zero_rank(optimizer, group, rank) * vector.numel())
            for group, vector in vectors
        ]
    if hasattr(optimizer, "fp32_groups_flat") and not optimizer.fused_adam_legacy:
        return [
            (group, vector, optimizer.fp16_groups[group], 0) for group, vector in enumerate(optimizer.fp32_groups_flat)
        ]
    if hasattr(optimizer, "fp32_groups") and not optimizer.fused_lamb_legacy:
        return [
            (group, master, [parameter], 0)
            for group, (masters, parameters) in enumerate(
                zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
            )
            for master, parameter in zip(masters, parameters, strict=True)
        ]
    if isinstance(optimizer, torch.optim.Optimizer):
        return [
            (number, parameter, [parameter], 0)
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        ]
    raise UnsupportedError(
        f"the engine's optimizer is {type(optimizer).__name__}, which cannot be recorded",
        hint="Set zero_optimization.stage to 1, 2 or 3.",
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
        begin = ranks[group] * vector.numel()
        offsets = getattr(zero, "round_robin_bit16_offsets", None)  # with `parameter_alignment`, there are gaps
        starts = None if offsets is None else offsets[group]
        yield _tensor(group, vector, zero.round_robin_bit16_groups[group], zero.param_names, begin, starts)


def _tensor(
    group: int,
    vector: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    names: Mapping[torch.Tensor, str],
    begin: int,
    starts: Sequence[int] | None = None,
) -> TrackedTensor:
    """A tensor with the elements from `begin` on of parameters, one after another. It may be longer than these.

    `starts`: where each parameter begins, if not at the end of the one before.
    """
    ends = [0, *accumulate(parameter.numel() for parameter in parameters)]
    parts = []
    for at, parameter in zip(ends if starts is None else starts, parameters, strict=False):
        low, high = max(at, begin), min(at + parameter.numel(), begin + vector.numel())
        if low < high:
            parts.append(_local_part(names[parameter], parameter, parameter.shape, low - at, high - at, low - begin))
    return TrackedTensor(vector, 0, group, tuple(parts))


def zero_rank(zero: Any, group: int, rank: int) -> int:
    """The number of this rank's partition of a group."""
    from torch import distributed

    groups = getattr(zero, "real_dp_process_group", None)
    return distributed.get_rank(groups[group]) if groups else rank


def _stage_3(zero: Any, names: Mapping[torch.Tensor, str]) -> Iterator[TrackedTensor]:
    """This rank's part of each parameter, in the order of each sub-group. ZeRO 3 splits every parameter."""
    for sub_group, vector in enumerate(zero.fp32_partitioned_groups_flat):
        at, parts = 0, []
        for parameter in zero.fp16_groups[sub_group]:
            part = _part_of_stage_3(names[parameter], parameter, at)
            if part is not None:
                parts.append(part)
            at += parameter.ds_tensor.ds_numel
        yield TrackedTensor(vector, 0, zero.sub_group_to_group_id[sub_group], tuple(parts))


def _part_of_stage_3(name: str, parameter: Any, offset: int) -> LocalPart | None:
    """This rank's part of a parameter, which begins at `offset` of a tensor; None if this rank has only padding."""
    from torch import distributed

    each = parameter.ds_tensor.ds_numel
    rank = distributed.get_rank(getattr(parameter, "ds_process_group", None))  # not of all tensor-parallel ranks
    low, high = (min(n * each, parameter.ds_numel) for n in (rank, rank + 1))
    return _local_part(name, parameter, parameter.ds_shape, low, high, offset) if low < high else None


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
