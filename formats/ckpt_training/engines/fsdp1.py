"""Runs of FSDP1 (`FullyShardedDataParallel`), whose optimizer steps shards of flat parameters.

This module reads private fields of FSDP1. It was checked with torch 2.13: `torch/distributed/fsdp/_flat_param.py`. With
`use_orig_params=True`, the optimizer steps views of this rank's shard; otherwise the shard itself.
"""

import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpt_formats.core.geometry import Box
from ckpt_training.engines.run import FlatTensor, TrackedRun, clean_name, plain_run, unwrap
from ckpt_training.local_shards import LocalPart, dtype_name


def is_fsdp1(model: nn.Module) -> bool:
    """Does the model have modules of FSDP1?"""
    return "torch.distributed.fsdp" in sys.modules and any(_modules(model))  # to import it takes more than a second


def fsdp1_run(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> TrackedRun:
    """The run of a model of FSDP1. Raises `InvalidArgumentError` if the optimizer is not that of the model."""
    model = unwrap(model)
    flat: dict[int, FlatTensor] = {}
    aliases: dict[str, str] = {}
    for prefix, handle in _handles(model):
        flat |= _flat_tensors(prefix, handle)
        for shared in handle.flat_param._shared_param_infos:
            alias = _name(prefix, shared.module_name, shared.param_name)
            aliases[alias] = _name(prefix, shared.prim_module_name, shared.prim_param_name)
    run = plain_run(model, optimizers, flat)
    stepped = {name for groups in run.group_names for names in groups for name in names}
    dtypes = {
        clean_name(prefix + name): dtype
        for prefix, module in _modules(model)
        for name, dtype in module._buffer_name_to_orig_dtype.items()
    }
    return replace(
        run,
        aliases={**run.aliases, **aliases},
        frozen=lambda: _frozen(model, stepped | aliases.keys(), flat.keys()),
        buffer_dtypes=dtypes,
    )


def _modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules of FSDP1, each with the start of the names of its tensors."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            yield f"{name}." if name else "", module


def _handles(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The handles of all flat parameters, each with the start of the names of its parameters."""
    return ((prefix, module._handle) for prefix, module in _modules(model) if module._handle is not None)


def _name(prefix: str, module: str, parameter: str) -> str:
    return clean_name(f"{prefix}{module}.{parameter}" if module else prefix + parameter)


def _flat_tensors(prefix: str, handle: Any) -> Iterator[tuple[int, FlatTensor]]:
    """The tensors that an optimizer may step, by id."""
    flat, names = handle.flat_param, list[str]()
    parts: list[LocalPart] = []
    for number, (fqn, shape, shard) in enumerate(
        zip(flat._fqns, map(tuple, flat._shapes), flat._shard_param_infos, strict=True)
    ):
        names.append(clean_name(prefix + fqn))
        own: tuple[LocalPart, ...] = ()
        if shard.in_shard and shard.numel_in_shard:
            start, stop = shard.intra_param_start_idx, shard.intra_param_end_idx + 1
            offset = 0 if handle._use_orig_params else shard.offset_in_shard
            own = (LocalPart(names[-1], shape, dtype_name(flat.dtype), Box.whole(shape), start, stop, offset),)
        parts += own
        if handle._use_orig_params:
            yield id(flat._params[number]), FlatTensor((names[-1],), own)
    yield id(flat), FlatTensor(tuple(names), tuple(parts))


def _frozen(model: nn.Module, others: Set[str], managed: Set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that no optimizer steps: those that FSDP1 ignores, then those of each module, gathered.

    `others`: the names of all other parameters. `managed`: the ids of flat parameters, and of views of them.
    """
    for name, parameter in model.named_parameters():
        if id(parameter) not in managed and clean_name(name) not in others:
            yield clean_name(name), parameter
    for prefix, module in _modules(model):
        flat = None if module._handle is None else module._handle.flat_param
        if flat is None or all(clean_name(prefix + fqn) in others for fqn in flat._fqns):
            continue
        with module.summon_full_params(module, recurse=False, writeback=False):
            for fqn, (parameter_name, owner, _) in zip(flat._fqns, flat._param_infos, strict=True):
                if clean_name(prefix + fqn) not in others:
                    yield (
                        clean_name(prefix + fqn),
                        getattr(owner, parameter_name).detach().clone(),
                    )  # what NumPy has seen, cannot be freed
