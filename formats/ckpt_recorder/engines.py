"""The run of a model and its optimizers, whichever engine they are of."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_recorder import deepspeed, megatron
from ckpt_recorder.fsdp1 import fsdp1_run, is_fsdp1
from ckpt_recorder.run import TrackedRun, plain_run
from ckpt_recorder.zero_redundancy import is_zero_redundancy, zero_redundancy_run


def tracked_run(model: Any, optimizer: Any, rank: int, *, has_begun: bool) -> TrackedRun:
    """The run of a model and its optimizer, or a list of them. `has_begun`: it is being recorded.

    Raises `UnsupportedError` if the run cannot be recorded.
    """
    if deepspeed.is_engine(model):
        return deepspeed.deepspeed_run(model, rank)
    if megatron.is_megatron(optimizer):
        return megatron.megatron_run(model, optimizer)
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return _torch_run(model, [_innermost(one) for one in optimizers], has_begun=has_begun)


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


def _torch_run(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, has_begun: bool) -> TrackedRun:
    """The run of optimizers of torch. `has_begun`: it is being recorded."""
    if is_fsdp1(model):
        return fsdp1_run(model, optimizers)
    if is_zero_redundancy(optimizers):
        return zero_redundancy_run(model, optimizers)
    return plain_run(model, optimizers, has_begun=has_begun)


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the wrappers of Accelerate and others. Raises `InvalidArgumentError` if there is none."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise InvalidArgumentError(f"{type(optimizer).__name__} is not an optimizer of torch")
        optimizer = inner
    return optimizer
