"""The run of a model and its optimizers, whichever engine they are of."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch
from torch import nn

from ckpt_formats.core.errors import CkptError, InvalidArgumentError, UnsupportedError
from ckpt_training.engines import deepspeed, megatron
from ckpt_training.engines.fsdp1 import fsdp1_run, is_fsdp1
from ckpt_training.engines.run import TrackedRun, names_of, plain_run, unwrap

ENTRY_POINTS = "ckpt.engines"
"""Packages name functions in this group, by which ckpt knows further engines.

A function takes the model, its optimizer or None, and the number of this rank. It returns a `TrackedRun`, or None if
the model is not of its engine. ckpt asks these functions before it looks for engines that it knows itself.
"""


def tracked_run(model: Any, optimizer: Any, rank: int, *, is_recorded: bool) -> TrackedRun:
    """The run of a model and its optimizer, or a list of them; None: of a model alone.

    `is_recorded`: it is being recorded.

    Raises `UnsupportedError` if the run cannot be recorded.
    """
    run = _run_of_package(model, optimizer, rank)
    if run is not None:
        return run
    if deepspeed.is_engine(model):
        return deepspeed.deepspeed_run(model, rank)
    if megatron.is_megatron(model, optimizer):
        return megatron.megatron_run(model, optimizer)
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    return _torch_run(model, [_innermost(one) for one in optimizers], is_recorded=is_recorded)


@cache
def _entries(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The functions that installed packages name. To look for them takes some 60 ms. `path`: where packages are."""
    return tuple(entry_points(group=ENTRY_POINTS))


def _run_of_package(model: Any, optimizer: Any, rank: int) -> TrackedRun | None:
    """The run of an engine that an installed package knows; None if none does.

    Raises `UnsupportedError` if a package fails, or if several know the engine.
    """
    runs = dict[str, TrackedRun]()
    for entry in _entries(tuple(sys.path)):
        name = f"{entry.name!r} of the package {entry.dist.name if entry.dist else entry.value}"
        try:
            run = entry.load()(model, optimizer, rank)
            if not isinstance(run, TrackedRun | None):
                raise TypeError(f"it returned {type(run).__name__}, not TrackedRun or None")
        except CkptError:
            raise
        except Exception as error:  # whatever a package does
            raise UnsupportedError(
                f"the engine {name} fails: {type(error).__name__}: {error}", hint="Fix that package, or uninstall it."
            ) from error
        if run is not None:
            runs[name] = run
    if len(runs) > 1:
        raise UnsupportedError(f"several engines know this model: {', '.join(runs)}", hint="Uninstall all but one.")
    return next(iter(runs.values()), None)


def check_initialized(model: Any) -> None:
    """Raise `UnsupportedError` if a tensor of the model has no shape yet."""
    if not isinstance(model, nn.Module):
        return
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = next((name for name, one in tensors if nn.parameter.is_lazy(one)), None)
    if lazy is not None:
        raise UnsupportedError(
            f"`{lazy}` has no shape yet, because its module is lazy",
            hint="Start the recorder after the first forward pass.",
        )


def _torch_run(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, is_recorded: bool) -> TrackedRun:
    """The run of optimizers of torch. `is_recorded`: it is being recorded."""
    if is_fsdp1(model):
        return fsdp1_run(model, optimizers)
    if _is_zero_redundancy(optimizers):
        return _zero_redundancy_run(model, optimizers)
    return plain_run(model, optimizers, is_recorded=is_recorded)


def _is_zero_redundancy(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Is one of them a `ZeroRedundancyOptimizer`?"""
    return any(type(one).__name__ == "ZeroRedundancyOptimizer" for one in optimizers)


def _zero_redundancy_run(model: nn.Module, optimizers: Sequence[Any]) -> TrackedRun:
    """The run of a model, usually of DDP, some of whose optimizers each step only some parameters on a rank.

    It reads private fields of `ZeroRedundancyOptimizer`, and was checked with torch 2.13. Raises `UnsupportedError` if
    an optimizer steps in DDP's hooks.
    """
    if any(getattr(one, "_overlap_with_ddp", False) for one in optimizers):
        raise UnsupportedError(
            "the steps of a ZeroRedundancyOptimizer that overlap with DDP's backward pass cannot be recorded",
            hint="Set overlap_with_ddp=False.",
        )
    names, _ = names_of(unwrap(model))
    run = plain_run(model, [one.optim if _is_zero_redundancy([one]) else one for one in optimizers])
    # Its own groups have the parameters of all ranks, and the options that a schedule sets.
    groups = tuple(one.param_groups for one in optimizers)
    group_names = tuple(tuple(tuple(names[id(p)] for p in group["params"]) for group in own) for own in groups)
    return replace(run, group_names=group_names, groups=groups)


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the wrappers of Accelerate and others. Raises `InvalidArgumentError` if there is none."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise InvalidArgumentError(f"{type(optimizer).__name__} is not an optimizer of torch")
        optimizer = inner
    return optimizer
