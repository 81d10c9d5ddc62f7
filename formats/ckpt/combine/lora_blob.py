"""The blob of a weight with a low-rank update, computed block by block."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ckpt_codecs import Rounded
from ckpt_codecs.scratch import temporary_buffer
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, slabs
from ckpt_formats.core.tensor import Array, Blob, read

_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)
_BLOCK = 1 << 16
"""Elements that are computed at once. Larger arrays leave the core's cache, and are mapped and unmapped each time."""
_TILE = 1 << 15
"""Elements of a product of matrices that are computed at once: their float64 values stay in a core's cache."""


def merged_blob(
    weight: Blob, a: Blob, b: Blob, scale: float, transposed: bool = False, magnitude: Blob | None = None
) -> "MergedBlob":
    """The blob of a weight with a low-rank update.

    weight: (out, in...), or (in, out) if `transposed`; a: (rank, in...); b: (out, rank, 1...); magnitude: DoRA's, with
    as many elements as there are outputs.
    """
    plain = MergedBlob(weight, a, b, scale, transposed)
    if magnitude is None:
        return plain
    return replace(plain, factors=_OutputFactors.of(plain, magnitude), outputs=(0, b.shape[0]))


@dataclass(frozen=True)
class MergedBlob(Blob):
    """`weight + scale * (B @ A)`, times a factor for each output if there are `factors`; see `merge_lora`.

    weight: (out, in...), or (in, out) if `transposed`; a: (rank, in...); b: (out, rank, 1...).
    """

    weight: Blob
    a: Blob
    b: Blob
    scale: float
    transposed: bool = False
    factors: "_OutputFactors | None" = None
    outputs: tuple[int, int] = (0, 0)
    """The range of outputs that the block has, among those of `factors`."""

    @property
    def shape(self) -> Shape:
        return self.weight.shape

    @property
    def dtype(self) -> DType:
        return self.weight.dtype

    @property
    def computed_dtype(self) -> DType:
        return _FLOAT64 if self.dtype == _FLOAT64 else _FLOAT32

    def parts(self) -> tuple[Blob, ...]:
        factors = () if self.factors is None else (self.factors.magnitude,)
        return (self.weight, self.a, self.b, *factors)

    def crop(self, box: Box) -> "MergedBlob":
        axis, inner = (1, slice(0, 1)) if self.transposed else (0, slice(1, None))
        low, high = box.start[axis], box.stop[axis]
        a = self.a.crop(Box((0, *box.start[inner]), (self.a.shape[0], *box.stop[inner])))
        b = self.b.crop(Box((low, *(0 for _ in self.b.shape[1:])), (high, *self.b.shape[1:])))
        start = self.outputs[0]
        return replace(self, weight=self.weight.crop(box), a=a, b=b, outputs=(start + low, start + high))

    def read_into(self, out: Array, reader: Reader) -> None:
        factors = None if self.factors is None else self.factors.read(*self.outputs, reader)
        for box, values in self.sums(reader):
            if factors is not None:
                with np.errstate(all="ignore"):
                    if self.transposed:
                        values *= factors[box.start[1] : box.stop[1]]
                    else:
                        values *= factors[box.start[0] : box.stop[0], None]
            rounded = np.empty(values.shape, self.dtype)
            Rounded().decode_into(b"", rounded, values)
            out[box.index] = rounded.reshape(box.shape)

    def sums(self, reader: Reader) -> Iterator[tuple[Box, Array]]:
        """Blocks of the weight plus its update, as matrices (rows, columns...) of the computed dtype, in C order."""
        dtype, rank = self.computed_dtype, self.a.shape[0]
        with np.errstate(all="ignore"):
            a, b = (read(blob, reader).astype(dtype).astype(np.float64) for blob in (self.a, self.b))
        b = b.reshape(-1, rank)
        for box in slabs(self.shape, _BLOCK):
            rows = slice(box.start[0], box.stop[0])
            if self.transposed:
                left, right = a[:, rows].T, b[box.start[1] : box.stop[1]].T
            else:
                inner = Box((0, *box.start[1:]), (rank, *box.stop[1:]))
                left, right = b[rows], a[inner.index].reshape(rank, -1)
            with np.errstate(all="ignore"):
                values = matmul_in_order(left, right, dtype)
                values *= dtype.type(self.scale)
                values += read(self.weight.crop(box), reader).astype(dtype).reshape(values.shape)
            yield box, values


def matmul_in_order(left: Array, right: Array, dtype: DType) -> Array:
    """The product of two matrices, summed in ascending order of the inner axis and rounded to `dtype` after each sum.

    With `dtype` float32 and factors that are float32 numbers, products are exact, and a step is a fused multiply-add,
    but for a rounding in float64 in between, which changes the result in about one of 2**29 cases. Unlike a BLAS,
    this gives an element the same value whatever the shapes of the matrices.

    left: (n, rank) float64; right: (rank, m) float64. Returns (n, m) of `dtype`.
    """
    out = np.empty((left.shape[0], right.shape[1]), dtype)
    if not out.size:
        return out
    width = min(out.shape[1], _TILE)
    height = max(1, _TILE // width)
    with temporary_buffer(3 * 8 * height * width) as memory:
        buffers = memory[: 3 * 8 * height * width].view(np.float64).reshape(3, -1)
        for top in range(0, out.shape[0], height):
            for at in range(0, out.shape[1], width):
                tile = out[top : top + height, at : at + width]
                total, product = (buffer[: tile.size].reshape(tile.shape) for buffer in buffers[:2])
                rounded = buffers[2].view(dtype)[: tile.size].reshape(tile.shape)
                rounded[...] = 0
                for k in range(left.shape[1]):
                    np.multiply(left[top : top + height, k, None], right[k, at : at + width], out=product)
                    total[...] = rounded
                    total += product
                    np.copyto(rounded, total, casting="same_kind")
                tile[...] = rounded
    return out


@dataclass(frozen=True, eq=False)
class _OutputFactors:
    """DoRA's factor of each output: its magnitude divided by the norm of the merged weights that lead to it.

    Factors are computed when they are first needed, and remembered: one number for each output. Blocks of one tensor
    share them. Threads may compute the same factors twice, with equal results.
    """

    merged: MergedBlob
    magnitude: Blob
    values: Array
    """Of each output: (outputs,) of the computed type."""
    known: Array
    """Which of the values are computed: (outputs,) bool."""

    @classmethod
    def of(cls, merged: MergedBlob, magnitude: Blob) -> "_OutputFactors":
        count = merged.b.shape[0]
        return cls(merged, magnitude, np.zeros(count, merged.computed_dtype), np.zeros(count, np.bool_))

    def read(self, start: int, stop: int, reader: Reader) -> Array:
        """The factors of a range of outputs: (outputs,) of the computed type."""
        missing = start + np.flatnonzero(~self.known[start:stop])
        if missing.size:
            # How a column is summed depends on how the matrix is cut into blocks, so all columns are done at once.
            low, high = (0, self.known.size) if self.merged.transposed else (int(missing[0]), int(missing[-1]) + 1)
            self.values[low:high] = self._compute(low, high, reader)
            self.known[low:high] = True
        return self.values[start:stop]

    def _compute(self, low: int, high: int, reader: Reader) -> Array:
        whole = Box.whole(self.merged.shape)
        rows = whole if self.merged.transposed else Box((low, *whole.start[1:]), (high, *whole.stop[1:]))
        squares = np.zeros(high - low)
        with np.errstate(all="ignore"):
            for box, values in self.merged.crop(rows).sums(reader):
                wide = values.astype(np.float64)
                wide *= wide
                if self.merged.transposed:
                    squares[box.start[1] : box.stop[1]] += wide.sum(axis=0)
                else:
                    squares[box.start[0] : box.stop[0]] += wide.sum(axis=1)
            dtype = self.merged.computed_dtype
            magnitude = read(self.magnitude, reader).reshape(-1)[low:high].astype(dtype)
            result: Array = magnitude / np.sqrt(squares).astype(dtype)
        return result
