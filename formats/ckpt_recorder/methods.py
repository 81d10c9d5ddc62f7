"""The method that replays the steps of each optimizer of a run: found by trial, the same on all ranks."""

import struct
from collections.abc import Sequence
from contextlib import suppress

import torch

from ckpt_formats.core.errors import UnsupportedError
from ckpt_recorder import ranks
from ckpt_recorder.probe import ProbeResult, as_updates, class_name, probe
from ckpt_recorder.run import TrackedRun, stepped_dtypes, threads_of_whole

_KNOWN_LIBRARIES = ("torch.optim.", "deepspeed.", "apex.", "megatron.", "transformer_engine.")
"""The packages of optimizers whose steps are replayed. A class of anybody else may do more than it does in a probe."""
_SMALLEST: float = struct.unpack("<d", bytes([1, *bytes(7)]))[0]
"""Copied as bits, because this thread may already flush denormals."""


def find_methods(run: TrackedRun) -> list[ProbeResult]:
    """The method of each optimizer. All ranks must call it together."""
    numbers = range(len(run.optimizers))
    everywhere = ranks.gather([(stepped_dtypes(run, number), threads_of_whole(run, number)) for number in numbers])
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
