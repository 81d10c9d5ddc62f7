"""Blocks of tensors, and the memory that each is read into: checked, and read one by one."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from ckpt_codecs.base import Codec
from ckpt_codecs.scratch import temporary_buffer
from ckpt_formats.core.dtypes import DTYPES, DType, is_float
from ckpt_formats.core.errors import IncompleteError, InvalidArgumentError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, slabs
from ckpt_formats.core.tensor import Array, FileBlob, Tensor
from ckpt_formats.core.value_changes import changed_by_cast

CAST = 1 << 20
"""Bytes of a block that are in scratch memory at once: few enough to stay in a core's cache."""
_FINFO: Any = ml_dtypes.finfo
_INFINITIES = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""The bits of infinity: no bits of a finite number are larger, except for the sign."""


@dataclass(frozen=True, slots=True, eq=False)
class DerivedCopy:
    """An array of values that are derived from those of a block."""

    codec: Codec
    dtype: DType
    """Of the values as they are derived. The array may have another one."""
    out: Array


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A tensor, and the array of its shape that it is read into."""

    tensor: Tensor
    out: Array
    copies: tuple[DerivedCopy, ...] = ()
    """Further arrays of this shape. If there are any, `out` has the tensor's dtype."""

    def part(self, box: Box) -> "Block":
        """A block of it."""
        copies = tuple(DerivedCopy(one.codec, one.dtype, one.out[box.index]) for one in self.copies)
        return Block(self.tensor.crop(box), self.out[box.index], copies)

    def first_source(self) -> FileBlob | None:
        """Where its first values lie; None if they lie in no file."""
        return next(iter(self.tensor.sources()), None)


def checked_blocks(pairs: Iterable[tuple[Tensor, Array]]) -> list[Block]:
    """The blocks that have elements. Arrays are of any shape and dtype, strided or not.

    Raises `InvalidArgumentError` for an array that is not writable, has another shape, or a type to which the tensor's
    values are not rounded, and `IncompleteError` for a tensor of which parts are missing. No values are read.
    """
    blocks = []
    for number, (tensor, out) in enumerate(pairs):
        if not isinstance(tensor, Tensor) or not isinstance(out, np.ndarray):
            kinds = f"{type(tensor).__name__} and {type(out).__name__}"
            raise InvalidArgumentError(f"block {number}: needs a Tensor and an array of NumPy, not {kinds}")
        if out.shape != tensor.shape:
            shapes = f"{list(tensor.shape)}, the array {list(out.shape)}"
            raise InvalidArgumentError(f"block {number}: the tensor has the shape {shapes}")
        if not out.flags.writeable:
            raise InvalidArgumentError(f"block {number}: the array is not writable")
        if not _is_exact_or_rounded(tensor.dtype, out.dtype):
            raise InvalidArgumentError(
                f"block {number}: {tensor.dtype.name} is not rounded to {out.dtype.name}",
                hint="Floats are rounded to other floats. For all else, read into an array of the tensor's type.",
            )
        for problem in tensor.problems():
            first = next(iter(tensor.sources()), None)
            raise IncompleteError(f"block {number}: {problem}", where=None if first is None else first.path)
        if out.size:
            blocks.append(Block(tensor, out))
    return blocks


def _is_exact_or_rounded(stored: DType, wanted: DType) -> bool:
    """Whether all values of a type can be those of another one, or are rounded to it."""
    if stored == wanted:
        return True
    if is_float(stored) and is_float(wanted):
        return wanted != DTYPES["float8_e8m0fnu"]  # scales have no zero and no sign
    return not is_float(stored) and stored.kind in "biu" and np.can_cast(stored, wanted, "safe")


def read_block(block: Block, reader: Reader) -> None:
    """Read a block into its arrays. Raises `CkptError`; then an array may have values of the file and others."""
    tensor, out = block.tensor, block.out
    if tensor.dtype == out.dtype and out.flags.c_contiguous and tensor.reads_in_place:
        tensor.read_into(out, reader)
        for part in _small_parts(block) if block.copies else ():
            _derive(part)
        return
    for part in _small_parts(block):
        if tensor.dtype == out.dtype:
            part.tensor.read_into(part.out, reader)
            _derive(part)
        else:
            with _scratch(part.tensor.shape, tensor.dtype) as values:
                part.tensor.read_into(values, reader)
                round_into(part.out, values, tensor)


def _small_parts(block: Block) -> Iterator[Block]:
    """The parts of a block, in the order of storage, of which each is at most 1 MiB in every type."""
    tensor = block.tensor
    itemsize = max(dtype.itemsize for dtype in (tensor.dtype, block.out.dtype, *(one.dtype for one in block.copies)))
    for box in slabs(tensor.shape, CAST // itemsize):
        yield block if box.shape == tensor.shape else block.part(box)


def _derive(block: Block) -> None:
    """Compute the copies of a block that was read."""
    for copy in block.copies:
        if copy.dtype == copy.out.dtype and copy.out.flags.c_contiguous:
            copy.codec.decode_into(b"", copy.out, block.out)
            continue
        with _scratch(copy.out.shape, copy.dtype) as values:
            copy.codec.decode_into(b"", values, block.out)
            if copy.dtype == copy.out.dtype:
                copy.out[...] = values
            else:
                round_into(copy.out, values, block.tensor)


@contextmanager
def _scratch(shape: Shape, dtype: DType) -> Iterator[Array]:
    nbytes = prod(shape) * dtype.itemsize
    with temporary_buffer(nbytes) as buffer:
        yield buffer[:nbytes].view(dtype).reshape(shape)


def round_into(out: Array, values: Array, tensor: Tensor) -> None:
    """Write values of a tensor into an array, rounded to nearest, ties to even. Both have the same shape, any dtype.

    Raises `UnsupportedError` if a finite number becomes infinite or NaN.
    """
    from ckpt_codecs import Rounded

    if not is_float(values.dtype):
        out[...] = values
        return
    Rounded().decode_into(b"", out, values)
    if not _may_overflow(values.dtype, out.dtype) or _is_finite(out):
        return
    change = changed_by_cast("", Box.whole(out.shape), values, np.ascontiguousarray(out))
    if change.overflows:
        first = next(iter(tensor.sources()), None)
        raise UnsupportedError(
            f"{change.overflows:,} of {prod(out.shape):,} values are too large for {out.dtype.name}, and would become "
            "infinite or NaN",
            where=None if first is None else first.path,
            hint="Read into a type with a larger range, such as bfloat16.",
        )


def _may_overflow(stored: DType, wanted: DType) -> bool:
    return _largest(wanted) < _largest(stored)


def _largest(dtype: DType) -> float:
    return float(_FINFO(dtype).max)


def _is_finite(values: Array) -> bool:
    """Whether all values are seen to be finite at little cost; False if that is not known."""
    infinity = _INFINITIES.get(values.dtype.name)
    if infinity is None or not values.flags.c_contiguous:
        return False
    # As integers, positive infinity and NaN are the largest signed ones, and negative ones the largest unsigned ones.
    is_positive = int(values.view(np.int16).max()) < infinity
    return is_positive and int(values.view(np.uint16).max()) < infinity | 0x8000
