"""The local shards of a run: of its model, of its masters, and of the states of its optimizers."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from ckpt_formats.core.checkpoint import Role
from ckpt_formats.core.state_names import MASTER, MODEL, from_stored
from ckpt_training.composite_tensors import is_composite
from ckpt_training.engines.run import TrackedRun, TrackedTensor, buffer_shards, clean_name
from ckpt_training.local_shards import LocalShard, local_parts, local_shard, shard_of


def model_shards_of(run: TrackedRun) -> Iterator[LocalShard]:
    """This rank's memory of the parameters and persistent buffers that the model computes with, each tensor once.

    Parameters that consist of other tensors, such as quantised ones, are left out: see `composite_parameters`.
    """
    if run.model_shards is not None:
        yield from run.model_shards()
        return
    stepped = {name for groups in run.group_names for names in groups for name in names}
    for name, parameter in run.model.named_parameters():
        full = run.rename(clean_name(name))
        for part in () if is_composite(parameter) else local_parts(full, parameter):
            role: Role = "parameter" if full in stepped else "frozen"
            yield shard_of(local_shard(parameter).detach(), part, MODEL, role)
    yield from buffer_shards(run.model, run.rename)


def composite_parameters(run: TrackedRun) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that consist of other tensors, by name."""
    for name, parameter in run.model.named_parameters():
        if is_composite(parameter):
            yield run.rename(clean_name(name)), parameter


def masters_of(run: TrackedRun, shards: Iterable[LocalShard] | None = None) -> Iterator[LocalShard]:
    """This rank's memory of the masters: the tensors that optimizers step and the model does not compute with.

    `shards`: what `model_shards_of` yields, if that is known.
    """
    of_model, known = _storages(run, shards), set[int]()
    for one in run.tensors:
        if id(one.tensor) not in known and _is_master(one, of_model):
            known.add(id(one.tensor))
            for part in one.all_parts:
                yield shard_of(local_shard(one.tensor).detach(), part, MASTER, "parameter")


def is_of_elements(one: TrackedTensor, name: object, value: object) -> bool:
    """Return whether a state has a value for each element of its tensor. The count of steps of a scalar has not."""
    is_tensor = isinstance(value, torch.Tensor) and value.shape == one.tensor.shape
    return is_tensor and (bool(one.tensor.dim()) or name != "step")


def names_of_run(run: TrackedRun, shards: Iterable[LocalShard]) -> list[str]:
    """The names of this rank's parameters and persistent buffers. `shards`: what `model_shards_of` yields."""
    stepped = (name for groups in run.group_names for names in groups for name in names)
    return list(dict.fromkeys([*stepped, *(shard.name for shard in shards)]))


def ties_of(run: TrackedRun) -> dict[str, tuple[str, ...]]:
    """The names of tied parameters and buffers, each with all other names of the same memory."""
    first: dict[int, str] = {}
    together: dict[str, list[str]] = {}
    for alias, name in (*run.aliases.items(), *_names_of_buffers(run, first)):
        together.setdefault(name, [name]).append(alias)
    return {one: tuple(other for other in names if other != one) for names in together.values() for one in names}


def _names_of_buffers(run: TrackedRun, first: dict[int, str]) -> Iterator[tuple[str, str]]:
    """The further names of buffers that the model has under several, each with the first one."""
    for name, buffer in run.model.named_buffers(remove_duplicate=False):
        full = run.rename(clean_name(name))
        if first.setdefault(id(buffer), full) != full:
            yield full, first[id(buffer)]


def names_with_master(run: TrackedRun, shards: Iterable[LocalShard] | None = None) -> frozenset[str]:
    """The names of the parameters whose values in the model are made of masters, which may be on other ranks.

    `shards`: what `model_shards_of` yields, if that is known.
    """
    of_model = _storages(run, shards)
    with_master = {one.optimizer for one in run.tensors if _is_master(one, of_model)}
    own = {name for one in run.tensors if not _is_master(one, of_model) for name in one.names}
    every = (name for number in with_master for names in run.group_names[number] for name in names)
    return frozenset(every) - own


def states_of(run: TrackedRun, number: int) -> Iterator[LocalShard]:
    """This rank's memory of the states that the optimizer has of a tensor, of the elements that are in the tensor."""
    one = run.tensors[number]
    for name, value in run.optimizers[one.optimizer].state.get(one.tensor, {}).items():
        if not isinstance(value, torch.Tensor) or not (value.dim() or is_of_elements(one, name, value)):
            continue
        other = run.state_parts(number, str(name))
        if other is not None:
            begin = {part.name: part.offset - part.start for part in other}
            parts = tuple(replace(part, offset=begin[part.name] + part.start) for part in one.all_parts)
        elif value.shape == one.tensor.shape:
            parts = one.all_parts
        else:
            continue
        for part in parts:
            yield shard_of(local_shard(value).detach(), part, from_stored(str(name)), "parameter")


def _storages(run: TrackedRun, shards: Iterable[LocalShard] | None) -> frozenset[int]:
    """Where the memory of the model's tensors begins, on this rank."""
    every = model_shards_of(run) if shards is None else shards
    return frozenset(shard.memory.untyped_storage().data_ptr() for shard in every)


def _is_master(one: TrackedTensor, of_model: frozenset[int]) -> bool:
    """Does an optimizer step this tensor in place of the model's own? A view of the model's memory is none."""
    values = local_shard(one.tensor)
    return values.numel() > 0 and values.untyped_storage().data_ptr() not in of_model
