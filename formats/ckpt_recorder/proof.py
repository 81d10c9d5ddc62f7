"""The proof of a method by the run's own steps: it has to give the bits that the optimizer gave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.optimizers import WEIGHTS
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.values import Value
from ckpt_formats.universal.gradients.layout import LoggedOptimizer
from ckpt_formats.universal.gradients.optimizers import step_of
from ckpt_recorder.probe import TORCH, ProbeResult
from ckpt_training.engines.run import TrackedRun, count_of, last_in_memory
from ckpt_training.local_shards import dtype_name, local_shard

MAX_NBYTES = 256 << 20
"""The maximum size of the states that are copied for a proof; of larger models, each proof takes other tensors."""


@dataclass(frozen=True)
class _Before:
    """A tensor before a step."""

    number: int
    states: dict[str, Array]
    """By name: (n,) float32 each."""
    gradient: Array | None
    count: int


@dataclass(frozen=True)
class StepProof:
    """The states before a step of an optimizer, to be compared with those after it."""

    run: TrackedRun
    method: ProbeResult
    options: Sequence[Mapping[str, Value]]
    """The options of the groups at this step."""
    tensors: tuple[_Before, ...]
    is_complete: bool
    """Are all tensors of the optimizer in it?"""

    def difference(self) -> str | None:
        """How the method differs from what the optimizer did, in words; None if all bits are equal."""
        try:
            for one in self.tensors:
                reason = self._difference(one)
                if reason is not None:
                    return f"{reason} of {self._name(one)}"
        except (CkptError, CodecError, KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            return f"the method {self.method.method} fails: {error}"
        return None

    def _difference(self, before: _Before) -> str | None:
        tracked = self.run.tensors[before.number]
        method = self.method
        logged = LoggedOptimizer(method.type, method.method, "exact", {}, (), method.threads)
        dtype = dtype_name(tracked.tensor.dtype)
        step = step_of(logged, self.options[tracked.group], Path(), dtype)
        state = self.run.optimizers[tracked.optimizer].state.get(tracked.tensor, {})
        count = before.count + (before.gradient is not None)
        if before.gradient is not None:
            size = before.gradient.size
            states = {name: before.states.get(name, np.zeros(size, np.float32)) for name in step.states}
            weights = local_shard(tracked.tensor)
            order = slice(None) if weights.is_contiguous() else np.array(last_in_memory(weights, size), np.int64)
            in_memory = {name: values[order] for name, values in states.items()}
            gradient = before.gradient[order]
            shape = (-1,) if method.threads is None else tuple(weights.shape)
            for low, high in _parts_of(size, method):
                part = {name: values[low:high].reshape(shape) for name, values in in_memory.items()}
                step.apply(part, gradient[low:high].reshape(shape), count, method.vectorized(size, low, high))
            for name, values in in_memory.items():
                states[name][order] = values
        else:
            states = before.states
        after = states_before(self.run, before.number)
        for name in {*states, *after}:
            replayed, actual = states.get(name), after.get(name)
            if replayed is None or actual is None:
                present = actual if replayed is None else replayed
                assert present is not None
                if replayed is None or present.any():
                    return f"another set of states ({name!r})"
            elif not is_equal(replayed, actual):
                return f"other values in {name!r}"
        for name, value in state.items():
            if name not in after and name != "step" and value is not None:
                return f"the state {name!r}, which is not one number for each element,"
        return None if count_of(self.run, before.number) == count or "step" not in state else "another count of steps"

    def _name(self, before: _Before) -> str:
        parts = self.run.tensors[before.number].parts
        return f"`{parts[0].name}`" if parts else f"tensor {before.number}"


def _parts_of(size: int, method: ProbeResult) -> tuple[tuple[int, int], ...]:
    """The parts in which a proof steps a tensor. A replay splits and joins tensors, which torch's kernels must not
    notice; the other methods are told which elements a kernel computes with vectors."""
    middle = size // 3 if method.method == TORCH and method.threads is None else 0
    return ((0, middle), (middle, size)) if middle else ((0, size),)


def states_before(run: TrackedRun, number: int) -> dict[str, Array]:
    """Copies of all states of a tensor with one number for each element: (n,) float32 each."""
    one = run.tensors[number]
    states = {WEIGHTS: one.tensor}
    for name, value in run.optimizers[one.optimizer].state.get(one.tensor, {}).items():
        is_tensor = isinstance(value, torch.Tensor) and name != "step"
        if is_tensor and value.shape == one.tensor.shape and value.dtype == one.tensor.dtype:
            states[str(name)] = value
    return {name: _copy(value) for name, value in states.items()}


def begin_proof(
    run: TrackedRun, number: int, method: ProbeResult, options: Sequence[Mapping[str, Value]], turn: int
) -> StepProof:
    """Copy the states and gradients of an optimizer before a step. `turn`: the number of proofs before this one."""
    optimizer = run.optimizers[number]
    current = {id(one) for group in optimizer.param_groups for one in group["params"]}
    numbers = [n for n, one in enumerate(run.tensors) if one.optimizer == number and id(one.tensor) in current]
    sizes = [16 * local_shard(run.tensors[n].tensor).numel() for n in numbers]
    start = 0 if sum(sizes) <= MAX_NBYTES or not numbers else turn * 7919 % len(numbers)
    copied: list[_Before] = []
    nbytes = 0
    for at in (*range(start, len(numbers)), *range(start)):
        nbytes += sizes[at]
        if copied and nbytes > MAX_NBYTES:
            break
        n = numbers[at]
        gradient = gradient_of(optimizer, run.tensors[n].tensor)
        copied.append(_Before(n, states_before(run, n), gradient, count_of(run, n)))
    return StepProof(run, method, options, tuple(copied), len(copied) == len(numbers))


def gradient_of(optimizer: Any, parameter: torch.Tensor) -> Array | None:
    """A copy of the gradient that an optimizer is given for a tensor, (n,) float32; None if it has none."""
    if parameter.grad is None:
        return None
    gradient, scale = local_shard(parameter.grad).detach(), getattr(optimizer, "grad_scale", None)
    return _copy(gradient if scale is None else gradient / scale.to(gradient.device))


def _copy(tensor: torch.Tensor) -> Array:
    values: Array = local_shard(tensor).detach().reshape(-1).float().cpu().numpy().copy()
    return values


def is_equal(values: Array, others: Array) -> bool:
    """Are all bits of two arrays of float32 equal? All NaNs are equal."""
    if values.shape != others.shape or values.dtype != others.dtype:
        return False
    unequal = values.view(np.uint32) != others.view(np.uint32)
    return not unequal.any() or bool((np.isnan(values[unequal]) & np.isnan(others[unequal])).all())
