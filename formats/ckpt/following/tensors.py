"""The memory of tensors that the caller has: NumPy's arrays, and tensors of torch by their address, without torch."""

import ctypes
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import InvalidArgumentError, NoMatchError, UnsupportedError
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.universal.published.model import PublishedModel, PublishedTensor

_MAX_SHOWN = 5


def tensor_memory(
    tensors: Mapping[str, Any], model: PublishedModel, shown: Sequence[PublishedTensor]
) -> list[tuple[int, Array]]:
    """The number of the published tensor, and the memory, (elements,) in its dtype, of each tensor; nothing is written.

    tensors: all tensors of the model by name, perhaps also by its aliases; each a CPU tensor of torch or an array of
    NumPy or `ml_dtypes`, contiguous, in the tensor's shape and dtype, which are those in `shown`. A tensor that has two
    names is returned once.

    Raises `NoMatchError` for names that are missing or unknown, `InvalidArgumentError` for other shapes or dtypes,
    and for tensors that are not contiguous or not writable, `UnsupportedError` for tensors on another device.
    """
    numbers = {tensor.name: number for number, tensor in enumerate(model.tensors)}
    numbers |= {alias: numbers[name] for alias, name in model.aliases.items()}
    unknown = [name for name in tensors if name not in numbers]
    there = {numbers[name] for name in tensors if name in numbers}
    missing = [tensor.name for number, tensor in enumerate(model.tensors) if number not in there]
    for names, what in ((unknown, "are not published"), (missing, "are published, but not given")):
        if names:
            raise NoMatchError(
                f"{len(names)} tensors {what}: {_shown(names)}",
                hint="Give exactly the tensors of the published model, by its names.",
            )
    memory = dict[tuple[int, int], Array]()
    for name, tensor in tensors.items():
        number = numbers[name]
        values = _memory(name, tensor, shown[number])
        memory[number, values.ctypes.data] = values
    _check_disjoint(memory, model)
    return [(number, values) for (number, _), values in memory.items()]


def _check_disjoint(memory: Mapping[tuple[int, int], Array], model: PublishedModel) -> None:
    ranges = sorted((address, address + values.nbytes, number) for (number, address), values in memory.items())
    for (_, end, one), (begin, stop, other) in pairwise(ranges):
        if begin < end and begin < stop:
            raise InvalidArgumentError(
                f"shares memory with {printable(model.tensors[other].name)}, but both are published",
                where=f"tensor {printable(model.tensors[one].name)}",
            )


def _memory(name: str, tensor: Any, expected: PublishedTensor) -> Array:
    where = f"tensor {printable(str(name))}"
    shape = tuple(map(int, tensor.shape)) if hasattr(tensor, "shape") else None
    if shape != expected.shape:
        raise InvalidArgumentError(f"has the shape {shape}, and {expected.shape} is published", where=where)
    name_of_dtype = str(tensor.dtype).removeprefix("torch.")
    if name_of_dtype != expected.dtype.name:
        raise InvalidArgumentError(
            f"is {name_of_dtype}, and {expected.dtype.name} is published",
            where=where,
            hint="Load the model in the published dtype.",
        )
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.c_contiguous or not tensor.flags.writeable or not tensor.dtype.isnative:
            raise InvalidArgumentError("is not a contiguous array that can be written", where=where)
        return tensor.reshape(-1)
    return _memory_of_torch(tensor, expected.dtype, prod(shape), where)


def _memory_of_torch(tensor: Any, dtype: DType, size: int, where: str) -> Array:
    """The memory of a tensor of torch. Its interface is used, so that torch need not be imported here."""
    try:
        device, is_plain = tensor.device.type, str(tensor.layout) == "torch.strided"
        is_plain = is_plain and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        address = tensor.data_ptr() if device == "cpu" and is_plain else 0
    except (AttributeError, RuntimeError) as error:
        raise InvalidArgumentError(
            f"is not a tensor of torch or NumPy: {type(tensor).__name__}", where=where
        ) from error
    if device != "cpu":
        raise UnsupportedError(
            f"is on the device {device}; only tensors in the memory of the CPU are written",
            where=where,
            hint="Write the values of `Follower.iter_changes`, then call `confirm`.",
        )
    if not is_plain:
        raise InvalidArgumentError("is not contiguous", where=where)
    if not size:
        return np.empty(0, dtype)
    nbytes = size * dtype.itemsize
    if not address or tensor.untyped_storage().nbytes() < tensor.storage_offset() * dtype.itemsize + nbytes:
        raise InvalidArgumentError("has no memory for its values", where=where)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8).view(dtype)


def _shown(names: list[str]) -> str:
    return list_names(sorted(names, key=str), lambda name: printable(str(name)[:100]), _MAX_SHOWN)
