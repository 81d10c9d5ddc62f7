"""The method that replays the steps of each optimizer of a run: found by trial, the same on all ranks."""

import struct
from collections.abc import Sequence
from contextlib import suppress

import torch

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.universal.gradients.layout import MAX_WHOLE, STEPPED
from ckpt_recorder.probe import ProbeResult, as_updates, class_name, probe
from ckpt_training import ranks
from ckpt_training.engines.run import TrackedRun
from ckpt_training.local_shards import dtype_name, local_shard

_KNOWN_LIBRARIES = ("torch.optim.", "deepspeed.", "apex.", "megatron.", "transformer_engine.")
"""The packages of optimizers whose steps are replayed. A class of anybody else may do more than it does in a probe."""
_SMALLEST: float = struct.unpack("<d", bytes([1, *bytes(7)]))[0]
"""Copied as bits, because this thread may already flush denormals."""


def find_methods(run: TrackedRun) -> list[ProbeResult]:
    """The method of each optimizer. All ranks must call it together."""
    numbers = range(len(run.optimizers))
    everywhere = ranks.gather([(_stepped_dtypes(run, number), _threads_of_whole(run, number)) for number in numbers])
    return [_method_of(run, number, [own[number] for own in everywhere if number < len(own)]) for number in numbers]


def _method_of(
    run: TrackedRun, number: int, everywhere: Sequence[tuple[frozenset[str] | None, int | None]]
) -> ProbeResult:
    """The method that replays the steps of an optimizer; `UPDATE` if there is none, or none that can be trusted.

    `everywhere`: the dtypes that it steps on each rank, and the threads with which it steps whole tensors.
    """
    dtypes = [own for own, _ in everywhere]
    threads = everywhere[0][1] if len({count for _, count in everywhere}) == 1 else None
    optimizer = run.optimizers[number]
    name = class_name(optimizer)
    is_known = name.startswith(_KNOWN_LIBRARIES) and not flushes_denormals() and not run.shares(number)
    if is_known and None not in dtypes:
        every = frozenset[str]().union(*(own for own in dtypes if own)) or {"float32"}
        with suppress(UnsupportedError):
            result = probe(optimizer, _device(run, number), every, threads)
            if result.exactness != "approximate":
                return result
    return as_updates(optimizer)


def _device(run: TrackedRun, number: int) -> torch.device:
    return next((one.tensor.device for one in run.tensors if one.optimizer == number), torch.device("cpu"))


def flushes_denormals() -> bool:
    """Does the arithmetic of this thread take denormals for zero, or make them zero? A replay does not.

    So after `torch.set_flush_denormal(True)`.
    """
    return _SMALLEST * 1.0 == 0.0


flushes_denormals._torchdynamo_disable = True  # type: ignore[attr-defined]  # a compiled step must not trace it


def _stepped_dtypes(run: TrackedRun, number: int) -> frozenset[str] | None:
    """The dtypes of the values that an optimizer steps on this rank; None if no steps of some can be replayed.

    They can if the states of each tensor have its dtype, and either are float32 or are the model's own weights.
    """
    dtypes = set[str]()
    for one in run.tensors:
        if one.optimizer != number:
            continue
        dtype = dtype_name(one.tensor.dtype)
        states = run.optimizers[number].state.get(one.tensor, {}).values()
        others = (state for state in states if isinstance(state, torch.Tensor) and state.dim())
        is_own = dtype == "float32" or all(part.dtype == dtype for part in one.parts)
        if dtype not in STEPPED or not is_own or any(state.dtype != one.tensor.dtype for state in others):
            return None
        dtypes.add(dtype)
    return frozenset(dtypes)


def _threads_of_whole(run: TrackedRun, number: int) -> int | None:
    """The number of threads with which an optimizer steps its tensors, if the log can have each as a whole."""
    for one in run.tensors:
        values = local_shard(one.tensor)
        if one.optimizer == number and one.parts:
            is_whole = len(one.parts) == 1 and one.parts[0].size == one.parts[0].box.size == values.numel() <= MAX_WHOLE
            if not is_whole or not values.is_contiguous() or values.device.type != "cpu":
                return None
    return torch.get_num_threads()


def has_plain_gradients(optimizer: torch.optim.Optimizer, is_whole: bool) -> bool:
    """Is each gradient dense and of the dtype of its tensor, and none of 16 bits still scaled?

    `is_whole`: its tensors are stepped as wholes, for which gradients must be contiguous, too.
    """
    is_scaled = getattr(optimizer, "grad_scale", None) is not None
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided or gradient.dtype != parameter.dtype:
            return False
        if (is_scaled and parameter.dtype != torch.float32) or (is_whole and not gradient.is_contiguous()):
            return False
    return True
