"""Check that the files of one step state the same: step, degrees, stage, version, names, parameters."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckpt_formats.containers.torchfile import TorchFile
from ckpt_formats.containers.typed_json import same
from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Record, Value
from ckpt_formats.engines.deepspeed.folder import Folder, optim_prefix, rank_in_name
from ckpt_formats.state_dicts.statements import MIXED, Statement, check_agreement, step_in_name, whole

_STEP_FOLDER = re.compile(r"global_step(\d{1,18})(?:_universal)?")
_NUMBERS = ("global_steps", "dp_world_size", "mp_world_size", "skipped_steps", "global_samples")
_PARAMETER_ENTRIES = ("param_shapes", "frozen_param_shapes", "buffer_names")
"""Entries that must be the same in the files of all data-parallel ranks of one model-parallel rank."""
_ALL = "Copy the files of all ranks into one folder."


def check_files(folder: Folder, files: Mapping[Path, TorchFile], models: Sequence[TorchFile]) -> None:
    """Check that the files agree with each other, with their own names and with the name of the folder.

    `models` are the model files of all ranks, in order.
    Raises: `CorruptError` if two statements differ; `IncompleteError` if a file is missing.
    """
    for file in files.values():
        _check_name(file)
    check_agreement(_statements(folder, files, models), folder.path)
    _check_degrees(folder, models[0])
    _check_experts(folder, models[0])
    for mp in range(folder.mp):
        ranks = [files[path] for (rank, _), path in sorted(folder.model3.items()) if rank == mp]
        for key in _PARAMETER_ENTRIES:
            for file in ranks[1:]:
                if not same(file.root.get(key), ranks[0].root.get(key)):
                    raise CorruptError(
                        f"`{key}` differs between {file.path.name} and {ranks[0].path.name}",
                        where=folder.path,
                        hint=MIXED,
                    )
    if folder.layers and (complete_model := next((file for file in models if file.root.get("module")), None)):
        raise CorruptError(
            f"the model is in {complete_model.path.name}, but the folder also has files of pipeline layers (layer_*)",
            where=folder.path,
            hint="Two runs were saved into one folder: separate them.",
        )
    if folder.expert_optim and folder.optim:
        stage0_file, zero_file = next(iter(folder.expert_optim.values())), next(iter(folder.optim.values()))
        raise CorruptError(
            f"{stage0_file.name} is of ZeRO stage 0, but {zero_file.name} is of a later stage",
            where=folder.path,
            hint="Two runs were saved into one folder: separate them.",
        )


def step_notices(models: Sequence[TorchFile]) -> Iterator[Notice]:
    """Yield a notice if the training script saved another count of steps than DeepSpeed. It may count differently."""
    root = models[0].root
    steps, iteration = whole(root.get("global_steps")), whole(root.get("iteration"))
    if steps is not None and iteration is not None and steps != iteration:
        text = f"the step is {steps}, from `global_steps`; `iteration`, from the training script, is {iteration}"
        yield Notice(text, weight=Weight.UNSURE)


def _statements(folder: Folder, files: Mapping[Path, TorchFile], models: Sequence[TorchFile]) -> Iterator[Statement]:
    for file in models:
        name = printable(file.path.name)
        for key in _NUMBERS:
            yield Statement(f"`{key}`", name, whole(file.root.get(key)))
        degrees = file.root.get("checkpoint_parallel_dimensions")
        for key in ("tp_degree", "pp_degree"):
            yield Statement(f"`{key}`", name, whole(degrees.get(key)) if isinstance(degrees, dict) else None)
        yield Statement("`iteration`", name, whole(file.root.get("iteration")))
    yield step_in_name(folder.path, _STEP_FOLDER, "`global_steps`")
    if folder.model3:
        yield Statement("the ZeRO stage", f"the name of {next(iter(folder.model3.values())).name}", 3)
    for file in files.values():
        name = printable(file.path.name)
        version = file.root.get("ds_version")
        yield Statement("`ds_version`", name, version if isinstance(version, str) else None)
        yield from _of_config(file.root.get("ds_config"), name)
        inner = file.root.get("optimizer_state_dict")
        if isinstance(inner, dict):
            version = inner.get("ds_version")
            yield Statement("`ds_version`", f"the optimizer of {name}", version if isinstance(version, str) else None)
            yield Statement("the ZeRO stage", name, _stage(inner.get("zero_stage")))


def _of_config(config: Value, name: str) -> Iterator[Statement]:
    """The options of a run's configuration on which the layout of its files depends."""
    if not isinstance(config, dict):
        return
    where = f"`ds_config` of {name}"
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        yield Statement("the ZeRO stage", where, whole(zero.get("stage")))
        yield Statement("`round_robin_gradients`", where, bool(zero.get("round_robin_gradients")))
    for key in ("bf16", "bfloat16", "fp16"):
        section = config.get(key)
        yield Statement(f"`{key}`", where, bool(section.get("enabled")) if isinstance(section, dict) else None)
    yield Statement(
        "`use_data_before_expert_parallelism`", where, bool(config.get("use_data_before_expert_parallelism"))
    )


def _stage(value: Value) -> int | None:
    """A ZeRO stage as a number, or as the enum that DeepSpeed saves."""
    return whole(value.args[0] if isinstance(value, Record) and value.args else value)


def _check_name(file: TorchFile) -> None:
    """Raise `CorruptError` if a file is another rank's file, renamed: an archive contains the name it was saved
    under."""
    saved, named = rank_in_name(f"{file.stem}.pt"), rank_in_name(file.path.name)
    if saved is not None and saved != named:
        raise CorruptError(
            f"{printable(file.path.name)} was saved as {printable(file.stem)}.pt: it is another rank's file, renamed",
            where=file.path,
            hint="Copy the files of all ranks again, under their own names.",
        )


def _check_experts(folder: Folder, first: TorchFile) -> None:
    """Raise `IncompleteError` if a MoE layer has files of fewer experts than the model file states."""
    num_experts = first.root.get("num_experts")
    numbers = [number for number in num_experts if whole(number)] if isinstance(num_experts, list) else []
    layers = sorted({(mp, layer) for mp, layer, _ in folder.experts})
    for mp, layer in layers:
        if not numbers or layer >= len(numbers) > 1:
            continue
        count, present = (
            numbers[layer if len(numbers) > 1 else 0],
            {e for m, n, e in folder.experts if (m, n) == (mp, layer)},
        )
        if len(present) < count:
            missing = next(expert for expert in range(count) if expert not in present)
            raise IncompleteError(
                f"layer_{layer}_expert_{missing}_mp_rank_{mp:02}_model_states.pt is missing: "
                f"`num_experts` is {count} in {first.path.name}, but files of {len(present)} are here",
                where=folder.path,
                hint=_ALL,
            )


def _check_degrees(folder: Folder, first: TorchFile) -> None:
    """Raise `IncompleteError` or `CorruptError` if the number of files differs from the degrees that the files
    state."""
    mp, dp = whole(first.root.get("mp_world_size")), whole(first.root.get("dp_world_size"))
    if mp is not None and mp > folder.mp:
        name = f"zero_pp_rank_0_mp_rank_{folder.mp:02}" if folder.model3 else f"mp_rank_{folder.mp:02}"
        raise IncompleteError(
            f"{name}_model_states.pt is missing: `mp_world_size` is {mp} in {first.path.name}, "
            f"but files of {folder.mp} are here",
            where=folder.path,
            hint=_ALL,
        )
    if mp is not None and 1 < mp < folder.mp:
        raise CorruptError(
            f"`mp_world_size` is {mp} in {first.path.name}, but files of {folder.mp} model-parallel ranks are here",
            where=folder.path,
            hint=MIXED,
        )
    if dp is None or not folder.optim:
        return
    width = folder.dp
    if width < dp:
        raise IncompleteError(
            f"{optim_prefix(folder)}zero_pp_rank_{width}_mp_rank_00_optim_states.pt is missing: "
            f"`dp_world_size` is {dp} in {first.path.name}, but files of {width} are here",
            where=folder.path,
            hint=_ALL,
        )
    if width > dp:
        raise CorruptError(
            f"`dp_world_size` is {dp} in {first.path.name}, but files of {width} data-parallel ranks are here",
            where=folder.path,
            hint=MIXED,
        )
