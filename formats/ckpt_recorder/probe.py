"""The probe finds the method that reproduces the user's optimizer: both step the same random tensors.

Libraries round differently, and the same library rounds differently with other flags or on other machines. So the probe
tests each method on the machine of the run.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.optimizers import DEEPSPEED_VECTOR, VECTOR, OptimizerStep, States, whole_vectors
from ckpt_formats.core.errors import CkptError, UnsupportedError
from ckpt_formats.core.values import Value
from ckpt_formats.universal.gradients.layout import UPDATE, Exactness, LoggedOptimizer
from ckpt_formats.universal.gradients.optimizers import METHODS, step_of
from ckpt_training.group_options import group_options

SIZES = (1, 7, 8, 15, 31, 65, 1003, 20_011)
"""The sizes of the probed tensors: near multiples of SIMD vectors, and larger than the share of one thread."""
MATRIX = (13, 5)
"""One more shape if the optimizer steps matrices, because some optimizers treat matrices differently."""
WHOLE = (MATRIX, (65, 31), (96, 130), (1003,))
"""The shapes of the probed tensors that are stepped as wholes; the last one if not all of the run's are matrices."""
STEPS = 5
RATE = 1e-3
"""The learning rate of the probed steps: large enough that rounding differences show in the weights."""
_MIN_NARROW_STATES = 3
"""The number of 16-bit states, the weights included, whose changes take more bytes than a 16-bit gradient."""
_MAX_NARROW = 2000
"""The elements of a probed 16-bit tensor that are in such parts."""
_NARROW_PART = 31
"""Elements of a part of a probed 16-bit tensor: fewer than a SIMD vector has, so all are rounded as the rest of one."""
MAX_RELATIVE = 1e-4
"""The maximum error of an approximate method, relative to the total change of the weights."""
_RECORDABLE = "Adam, AdamW, SGD, Adagrad, Lion and all element-wise optimizers of torch can be recorded."
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class ProbeResult:
    """The method that replays the steps of an optimizer."""

    type: str
    method: str
    exactness: Exactness
    figures: Mapping[str, Value] = field(default_factory=dict)
    vector: int = 1
    """The elements in a SIMD vector of the optimizer's kernel, if it rounds the rest of a tensor in another order.

    1: it rounds all elements in the same order. 0: the kernel was built without vectors."""

    threads: int | None = None
    """As in `LoggedOptimizer`."""

    def tail(self, size: int) -> int:
        """The number of elements at the end of a tensor's memory that are not in complete SIMD vectors."""
        return size - self.vectorized(size, 0, size)

    def vectorized(self, size: int, start: int, stop: int) -> int:
        """The number of elements of a range of a tensor that are in complete SIMD vectors."""
        return whole_vectors(size, start, stop, is_fused=True, width=self.vector) if self.vector else 0


def as_updates(optimizer: torch.optim.Optimizer) -> ProbeResult:
    """The result for an optimizer whose steps are not replayed: the log has the states after each step."""
    return ProbeResult(class_name(optimizer), UPDATE, "exact")


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """The full name of an optimizer's class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def flags_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that choose the arithmetic of a step: all that are no numbers, and which are zero."""
    return {
        name: bool(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else repr(value)
        for name, value in group.items()
        if name not in ("params", "lr") and isinstance(value, _PLAIN)
    }


def probe(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    dtypes: Collection[str] = ("float32",),
    threads: int | None = None,
) -> ProbeResult:
    """The method that replays the optimizer's steps of values of these dtypes.

    `threads`: the threads with which it may step whole tensors, if no method steps parts; None: it may not.

    Raises `UnsupportedError` if there is none, or none that takes fewer bytes than the states after each step.
    """
    try:
        result = _probe_parts(optimizer, device, dtypes)
    except UnsupportedError:
        if threads is None:
            raise
        return _probe_whole(optimizer, device, dtypes, threads)
    if result.exactness == "approximate" and threads is not None:
        with suppress(UnsupportedError):
            return _probe_whole(optimizer, device, dtypes, threads)
    return result


def _probe_whole(
    optimizer: torch.optim.Optimizer, device: torch.device, dtypes: Collection[str], threads: int
) -> ProbeResult:
    """As `probe`: torch's own optimizer steps whole tensors with as many threads as the run."""
    name, values = class_name(optimizer), 0
    has_others = any(one.dim() != 2 for group in optimizer.param_groups for one in group["params"])
    for dtype in sorted(dtypes):
        trial = _trial(optimizer, device, dtype, WHOLE[: None if has_others else -1])
        figures = _compare(trial, ProbeResult(name, TORCH, "same library", threads=threads))
        if figures is None or figures["differing"]:
            raise UnsupportedError(f"{name} cannot be recorded: torch steps no copies of its tensors as it does")
        _check_gain(trial, name)
        values += figures["values"]
    return ProbeResult(name, TORCH, "same library", {"values": values}, threads=threads)


def _check_gain(trial: "_Trial", name: str) -> None:
    """Raise `UnsupportedError` if the changes of states take fewer bytes than gradients."""
    if trial.dtype != "float32" and len(trial.states[-1][0]) < _MIN_NARROW_STATES:
        raise UnsupportedError(f"the gradients of {name} in {trial.dtype} take no fewer bytes than its states")


def _probe_parts(optimizer: torch.optim.Optimizer, device: torch.device, dtypes: Collection[str]) -> ProbeResult:
    """As `probe`, for methods that step parts of tensors."""
    if any(dtype != "float32" for dtype in dtypes):
        return _probe_narrow(optimizer, device, dtypes)
    name = class_name(optimizer)
    trial = _trial(optimizer, device)
    closest: ProbeResult | None = None
    for method in (*METHODS, TORCH):
        for vector in _VECTORS.get(method, (1,)):
            figures = _compare(trial, ProbeResult(name, method, "exact", {}, vector))
            if figures is None:
                continue
            if not figures["differing"]:
                exactness: Exactness = "same library" if method == TORCH else "exact"
                return ProbeResult(name, method, exactness, {"values": figures["values"]}, vector)
            if closest is None or figures["relative"] < closest.figures["relative"]:
                closest = ProbeResult(name, method, "approximate", figures, vector)
    if closest is None or not closest.figures["relative"] <= MAX_RELATIVE:
        raise UnsupportedError(
            f"{name} cannot be recorded: ckpt has no arithmetic for it, and torch cannot step it in parts",
            hint=_RECORDABLE,
        )
    return closest


def _probe_narrow(optimizer: torch.optim.Optimizer, device: torch.device, dtypes: Collection[str]) -> ProbeResult:
    """As `probe`, if not all values are float32: only torch's own optimizer rounds as it does."""
    name, values = class_name(optimizer), 0
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UnsupportedError(f"{name} with `fused=True` rounds the last elements of a tensor in another way")
    for dtype in sorted(dtypes):
        trial = _trial(optimizer, device, dtype)
        figures = _compare(trial, ProbeResult(name, TORCH, "same library"))
        if figures is None or figures["differing"]:
            raise UnsupportedError(f"{name} rounds parts of {dtype} tensors in another way than full ones")
        _check_gain(trial, name)
        values += figures["values"]
    return ProbeResult(name, TORCH, "same library", {"values": values})


TORCH = "torch"
"""The method that is torch's optimizer itself."""
_VECTORS = {"adam-fused": (VECTOR,), "sgd": (1, VECTOR), "adam-deepspeed-cpu": (DEEPSPEED_VECTOR, 8, 4, 0)}
"""The possible widths of SIMD vectors in the kernels of each method."""


@dataclass(frozen=True)
class _Trial:
    """The steps of the user's optimizer on random tensors. The first index is the step, the second the tensor."""

    options: tuple[dict[str, Value], ...]
    gradients: tuple[tuple[Array, ...], ...]
    states: tuple[tuple[dict[str, Array], ...], ...]
    """Before the first step, and after each."""
    dtype: str
    """The dtype that the optimizer steps. All arrays have its values as float32."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the tensors; the arrays are flat."""


def _trial(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    dtype: str = "float32",
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> _Trial:
    """Step a copy of the optimizer on random tensors. Raises `UnsupportedError` if it fails.

    `shapes`: those of the tensors; None: vectors of many sizes.
    """
    stepped: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator("cpu").manual_seed(5)
    cpu: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "generator": generator}
    group, known = optimizer.param_groups[0], signature(type(optimizer)).parameters
    if shapes is None:
        has_matrices = any(parameter.dim() > 1 for one in optimizer.param_groups for parameter in one["params"])
        shapes = [*((size,) for size in SIZES), *([MATRIX] if has_matrices else [])]
    weights = [torch.randn(shape, **cpu) * 0.02 for shape in shapes]
    parameters = [torch.nn.Parameter(weight.to(device, stepped)) for weight in weights]
    arguments = {key: _copy_value(value) for key, value in group.items() if key in known and key != "params"}
    try:
        copy: torch.optim.Optimizer = type(optimizer)(parameters, **arguments)
        states = [tuple(_states_of(copy, parameter) for parameter in parameters)]
        gradients, options = [], []
        for step in range(STEPS):
            scale = 10 ** (torch.rand(max(SIZES), **cpu) * 4 - 6)
            step_gradients = [torch.randn(one.shape, **cpu) for one in weights]
            step_gradients = [(one * scale[: one.numel()].reshape(one.shape)).to(stepped) for one in step_gradients]
            for one in copy.param_groups:  # a schedule may start with a rate of 0, which would change nothing
                _set_rate(one, RATE * (1 + step / 7))
            options.append(group_options(copy, copy.param_groups[0]))
            for parameter, gradient in zip(parameters, step_gradients, strict=True):
                parameter.grad = gradient.to(device)
            copy.step()
            gradients.append(tuple(gradient.float().numpy().reshape(-1) for gradient in step_gradients))
            states.append(tuple(_states_of(copy, parameter) for parameter in parameters))
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, NotImplementedError) as error:
        raise UnsupportedError(
            f"{class_name(optimizer)} cannot be recorded: a copy of it failed on random tensors: {error}",
            hint=_RECORDABLE,
        ) from None
    return _Trial(tuple(options), tuple(gradients), tuple(states), dtype, tuple(shapes))


def _copy_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _states_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Array]:
    states = {"param": _as_float32(parameter)}
    for name, value in optimizer.state[parameter].items() if parameter in optimizer.state else ():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and name != "step":
            states[name] = _as_float32(value)
    return states


def _as_float32(tensor: torch.Tensor) -> Array:
    values: Array = tensor.detach().float().cpu().numpy().reshape(-1).copy()
    return values


def _compare(trial: _Trial, candidate: ProbeResult) -> dict[str, Any] | None:
    """The differences between a method and the optimizer; None if the method is for another optimizer.

    `values` and `differing`: the number of all values after the steps, and of those with other bits. `max_abs`: the
    largest error. `relative`: the Euclidean norm of the weights' error over that of their change.
    """
    optimizer = LoggedOptimizer(candidate.type, candidate.method, "exact", {}, (), candidate.threads)
    values = differing = 0
    largest = error = learned = 0.0
    try:
        steps: list[OptimizerStep] = [step_of(optimizer, options, Path(), trial.dtype) for options in trial.options]
        names = set(steps[0].states)
        if any(set(states) != names for states in trial.states[-1]):
            return None
        for number, (first, last) in enumerate(zip(trial.states[0], trial.states[-1], strict=True)):
            states = {name: first[name].copy() if name in first else np.zeros_like(last[name]) for name in names}
            for count, step in enumerate(steps, 1):
                gradients = trial.gradients[count - 1][number]
                if candidate.threads is None:
                    _apply_in_parts(step, states, gradients, count, candidate, trial.dtype)
                else:
                    shape = trial.shapes[number]
                    step.apply({k: v.reshape(shape) for k, v in states.items()}, gradients.reshape(shape), count, 0)
            for name, expected in last.items():
                differing += int((states[name].view(np.uint32) != expected.view(np.uint32)).sum())
                values += expected.size
                largest = max(largest, float(np.abs(states[name] - expected).max(initial=0)))
            error += float(np.square(states["param"] - last["param"], dtype=np.float64).sum())
            learned += float(np.square(last["param"] - first["param"], dtype=np.float64).sum())
    except (CkptError, CodecError, KeyError, TypeError, ValueError, RuntimeError):
        return None
    relative = (error / learned) ** 0.5 if learned else float("inf")
    return {"differing": differing, "values": values, "max_abs": largest, "relative": relative, "steps": STEPS}


def _apply_in_parts(
    step: OptimizerStep, states: States, gradients: Array, count: int, candidate: ProbeResult, dtype: str
) -> None:
    """Step a tensor in parts, because a replay splits tensors, too. All arrays: (n,) float32.

    Of few values in 16 bits a difference shows, so many parts are smaller than a SIMD vector.
    """
    size = gradients.size
    ends = range(_NARROW_PART, min(size, _MAX_NARROW), _NARROW_PART) if dtype != "float32" else (size // 3,)
    for low, high in pairwise((0, *ends, size)):
        if low < high:
            part = {name: array[low:high] for name, array in states.items()}
            step.apply(part, gradients[low:high], count, candidate.vectorized(size, low, high))
