"""Runs with torch's `ZeroRedundancyOptimizer`: each rank steps some parameters of a model that all ranks have.

This module reads private fields of this optimizer. It was checked with torch 2.13.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpt_formats.core.errors import UnsupportedError
from ckpt_recorder.run import TrackedRun, names_of, plain_run, unwrap


def is_zero_redundancy(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Is one of them a `ZeroRedundancyOptimizer`?"""
    return any(type(one).__name__ == "ZeroRedundancyOptimizer" for one in optimizers)


def zero_redundancy_run(model: nn.Module, optimizers: Sequence[Any]) -> TrackedRun:
    """The run of a model, usually of DDP, some of whose optimizers are divided among the ranks.

    Raises `UnsupportedError` if an optimizer steps in DDP's hooks.
    """
    if any(getattr(one, "_overlap_with_ddp", False) for one in optimizers):
        raise UnsupportedError(
            "the steps of a ZeroRedundancyOptimizer that overlap with DDP's backward pass cannot be recorded",
            hint="Set overlap_with_ddp=False.",
        )
    names, _ = names_of(unwrap(model))
    run = plain_run(model, [one.optim if is_zero_redundancy([one]) else one for one in optimizers])
    # Its own groups have the parameters of all ranks, and the options that a schedule sets.
    groups = tuple(one.param_groups for one in optimizers)
    group_names = tuple(tuple(tuple(names[id(p)] for p in group["params"]) for group in own) for own in groups)
    return replace(run, group_names=group_names, groups=groups)
