"""Memory of this rank with values of a run: what a load fills and a save copies.

A fragment says which block of a tensor is where in a file; a local shard says where it is in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ckpt_codecs.base import Array
from ckpt_formats.core.checkpoint import Role
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box

_BITS = {1: torch.uint8, 2: torch.int16}
"""The types of torch by their bytes under which NumPy takes values of its own types' extensions."""


@dataclass(frozen=True)
class LocalPart:
    """A range of a parameter that is in a tensor of this rank."""

    name: str
    """The name in the full model."""
    shape: tuple[int, ...]
    """The shape of the full parameter."""
    dtype: str
    """The dtype of the model's copy, by its NumPy name."""
    box: Box
    """The block of the parameter."""
    start: int
    stop: int
    """The range of elements in the block, in C order."""
    offset: int
    """The index of the first one in the tensor, flattened."""

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def is_block(self) -> bool:
        """Are these all elements of the block?"""
        return self.size == self.box.size


@dataclass(frozen=True, eq=False)
class LocalShard:
    """Memory of this rank that has a part of a state of a parameter."""

    part: LocalPart
    state: str
    """`model` (what the model computes with), `master`, or the optimizer's own name."""
    role: Role
    memory: torch.Tensor
    """The values, on any device and with any strides: of the block's shape if they are a block, else (size,)."""

    @property
    def name(self) -> str:
        return self.part.name


def shard_of(tensor: torch.Tensor, part: LocalPart, state: str, role: Role) -> LocalShard:
    """The local shard of a part that is in a tensor of this rank: contiguous, unless the part is all of it.

    `tensor`: of any shape, without gradient, and no DTensor.
    """
    if part.is_block and tensor.numel() == part.size:
        return LocalShard(part, state, role, tensor.reshape(part.box.shape) if tensor.is_contiguous() else tensor)
    values = tensor.view(-1)[part.offset : part.offset + part.size]
    return LocalShard(part, state, role, values.view(part.box.shape) if part.is_block else values)


def as_array(memory: torch.Tensor) -> Array:
    """The memory of a tensor on the CPU as an array of its shape, dtype and strides, without a copy."""
    name = dtype_name(memory.dtype)
    if name not in DTYPES:
        raise UnsupportedError(f"a tensor is of type {name}, of which no checkpoint has values")
    dtype, memory = DTYPES[name], memory.detach()
    if dtype.isbuiltin == 1:
        return memory.numpy()
    return memory.view(_BITS[memory.element_size()]).numpy().view(dtype)  # NumPy itself lacks these types


def as_tensor(array: Array) -> torch.Tensor:
    """The memory of an array as a tensor of its shape, dtype and strides, without a copy: the inverse of `as_array`."""
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    bits = array.view(np.dtype(f"{'u' if array.dtype.itemsize == 1 else ''}int{8 * array.dtype.itemsize}"))
    return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))


def dtype_name(dtype: torch.dtype) -> str:
    """The NumPy name of a torch dtype.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor unchanged."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Is it a DTensor?"""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_parts(name: str, tensor: torch.Tensor) -> Iterator[LocalPart]:
    """The part of a parameter that this rank has of a tensor or a DTensor; none if its shard is empty."""
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    if not is_sharded(tensor):
        yield LocalPart(name, shape, dtype, Box.whole(shape), 0, tensor.numel(), 0)
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise UnsupportedError(f"`{name}` is a partial sum over ranks that is not reduced yet")
    local_shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(local_shape) != tuple(local_shard(tensor).shape):
        raise UnsupportedError(
            f"`{name}`: this rank's shard has shape {list(local_shard(tensor).shape)}, not {list(local_shape)}"
        )
    box = Box(tuple(offset), tuple(a + n for a, n in zip(offset, local_shape, strict=True)))
    if box.size:
        yield LocalPart(name, shape, dtype, box, 0, box.size, 0)
