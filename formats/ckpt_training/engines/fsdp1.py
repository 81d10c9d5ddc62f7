"""Runs of FSDP1 (`FullyShardedDataParallel`), whose optimizer steps shards of flat parameters.

This module reads private fields of FSDP1. It was checked with torch 2.13: `torch/distributed/fsdp/_flat_param.py`. With
`use_orig_params=True`, the optimizer steps views of this rank's shard; otherwise the shard itself. A module computes
with copies of the shard (in full, or in low precision), which FSDP1 makes anew in each forward pass.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpt_formats.core.checkpoint import Role
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.state_names import MODEL
from ckpt_training.engines.run import FlatTensor, TrackedRun, buffer_shards, clean_name, plain_run, unwrap
from ckpt_training.local_shards import LocalPart, LocalShard, dtype_name, local_parts, local_shard, shard_of


def is_fsdp1(model: nn.Module) -> bool:
    """Does the model have modules of FSDP1?"""
    return "torch.distributed.fsdp" in sys.modules and any(_modules(model))  # to import it takes more than a second


def fsdp1_run(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> TrackedRun:
    """The run of a model of FSDP1. Raises `InvalidArgumentError` if the optimizer is not that of the model."""
    model = unwrap(model)
    if all(_is_idle(handle) for _, handle in _handles(model)):
        _forget_copies(model)  # after an evaluation, the optimizer's tensors are views of them
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
        model_shards=lambda: _model_shards(model, stepped, aliases),
        refresh=lambda: _forget_copies(model),
    )


def _model_shards(model: nn.Module, stepped: Set[str], aliases: Mapping[str, str]) -> Iterator[LocalShard]:
    """This rank's ranges of all flat parameters, then the parameters that FSDP1 ignores, and the buffers."""

    def role(name: str) -> Role:
        return "parameter" if name in stepped else "frozen"

    _forget_copies(model)
    managed = set[int]()
    for prefix, handle in _handles(model):
        flat = handle.flat_param
        managed |= {id(flat), *map(id, flat._params or ()), *map(id, flat._shared_params or ())}
        shard = _shard_of(prefix, handle)
        for part in _parts(prefix, handle):
            if part is not None:
                yield shard_of(shard, part, MODEL, role(part.name))
    for name, parameter in model.named_parameters():
        clean = clean_name(name)
        if id(parameter) not in managed and clean not in aliases:
            for part in local_parts(clean, parameter):
                yield shard_of(local_shard(parameter).detach(), part, MODEL, role(clean))
    yield from buffer_shards(model)


def _forget_copies(model: nn.Module) -> None:
    """Free the full copies of flat parameters that are still there after an evaluation: the next pass makes them anew.

    Raises `UnsupportedError` within a forward or backward pass.
    """
    for prefix, module in _modules(model):
        handle = module._handle
        if handle is None:
            continue
        if not _is_idle(handle):
            raise UnsupportedError(
                f"`{clean_name(prefix).removesuffix('.') or 'the model'}` is within a pass of FSDP1",
                hint="Load and save after `optimizer.step()`.",
            )
        if not hasattr(handle.flat_param, "_local_shard"):
            continue  # there has been no forward pass
        if handle.uses_sharded_strategy:
            handle.reshard(True)
        else:
            handle._use_sharded_flat_param()
        handle.post_reshard()
        handle._prefetched = False


def _is_idle(handle: Any) -> bool:
    """Is FSDP1 neither in a forward nor in a backward pass of the module?"""
    return bool(handle._training_state.name == "IDLE")


def _shard_of(prefix: str, handle: Any) -> torch.Tensor:
    """This rank's shard of a flat parameter, (n,): in full precision, wherever it lies. Raises `UnsupportedError`."""
    flat = handle.flat_param
    shard: torch.Tensor = getattr(flat, "_local_shard", flat.data).detach()
    sizes = [one.offset_in_shard + one.numel_in_shard for one in flat._shard_param_infos if one.in_shard]
    if shard.dim() != 1 or shard.numel() < max(sizes, default=0):
        raise UnsupportedError(
            f"the shard of `{clean_name(prefix + flat._fqns[0])}` has shape {list(shard.shape)}, which FSDP1 of torch "
            f"{torch.__version__} does not account for"
        )
    return shard


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
    flat = handle.flat_param
    names = tuple(clean_name(prefix + fqn) for fqn in flat._fqns)
    parts = tuple(_parts(prefix, handle))
    if handle._use_orig_params:
        for name, parameter, part in zip(names, flat._params, parts, strict=True):
            yield id(parameter), FlatTensor((name,), () if part is None else (replace(part, offset=0),))
    yield id(flat), FlatTensor(names, tuple(part for part in parts if part is not None))


def _parts(prefix: str, handle: Any) -> Iterator[LocalPart | None]:
    """The part of each parameter that is in this rank's shard of a flat one; None if there is none."""
    flat = handle.flat_param
    for fqn, shape, shard in zip(flat._fqns, map(tuple, flat._shapes), flat._shard_param_infos, strict=True):
        if not shard.in_shard or not shard.numel_in_shard:
            yield None
            continue
        start, stop = shard.intra_param_start_idx, shard.intra_param_end_idx + 1
        box, dtype = Box.whole(shape), dtype_name(flat.dtype)
        yield LocalPart(clean_name(prefix + fqn), shape, dtype, box, start, stop, shard.offset_in_shard)


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
