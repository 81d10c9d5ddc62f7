"""The local shards of a run: of its model, of its masters, and of the states of its optimizers."""

from collections.abc import Iterator

import torch

from ckpt_formats.core.checkpoint import Role
from ckpt_formats.core.state_names import MASTER, MODEL, from_stored
from ckpt_training.engines.run import TrackedRun, buffer_shards, clean_name
from ckpt_training.local_shards import LocalShard, local_parts, local_shard, shard_of


def model_shards_of(run: TrackedRun) -> Iterator[LocalShard]:
    """This rank's memory of the parameters and persistent buffers that the model computes with, each tensor once."""
    if run.model_shards is not None:
        yield from run.model_shards()
        return
    stepped = {name for groups in run.group_names for names in groups for name in names}
    for name, parameter in run.model.named_parameters():
        full = run.rename(clean_name(name))
        for part in local_parts(full, parameter):
            role: Role = "parameter" if full in stepped else "frozen"
            yield shard_of(local_shard(parameter).detach(), part, MODEL, role)
    yield from buffer_shards(run.model, run.rename)


def masters_of(run: TrackedRun) -> Iterator[LocalShard]:
    """This rank's memory of the masters: the tensors that optimizers step and the model does not compute with."""
    of_model = {_memory_of(shard.memory) for shard in model_shards_of(run)}
    known = set[int]()
    for one in run.tensors:
        values = local_shard(one.tensor).detach()
        if id(one.tensor) in known or (values.numel() and _memory_of(values) in of_model):
            continue
        known.add(id(one.tensor))
        for part in one.all_parts:
            yield shard_of(values, part, MASTER, "parameter")


def states_of(run: TrackedRun, number: int) -> Iterator[LocalShard]:
    """This rank's memory of the states that the optimizer has of a tensor, those of the tensor's shape."""
    one = run.tensors[number]
    for name, value in run.optimizers[one.optimizer].state.get(one.tensor, {}).items():
        if isinstance(value, torch.Tensor) and value.shape == one.tensor.shape and value.dim():
            for part in one.all_parts:
                yield shard_of(local_shard(value).detach(), part, from_stored(str(name)), "parameter")


def _memory_of(tensor: torch.Tensor) -> int:
    """Where the storage of a tensor begins: views of it begin there, too."""
    return tensor.untyped_storage().data_ptr()
