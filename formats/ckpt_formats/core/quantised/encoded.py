"""Codes and scales of plain weights, computed block by block from the weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt_codecs.quantised.fp4 import MX_BLOCK, mxfp4_of
from ckpt_codecs.quantised.scaled import codes_of, scales_of
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, slabs
from ckpt_formats.core.tensor import Array, Blob, BlockBlob, Tensor, read
from ckpt_formats.core.text import printable

BLOCK = 128
"""Rows and columns of an FP8 block."""
_BAND = 16
"""FP8 blocks side by side that are quantised at once."""
_FP8, _UINT8 = DTYPES["float8_e4m3fn"], DTYPES["uint8"]
_FLOAT32 = np.dtype(np.float32)
_READ_GROUPS = 1 << 15
"""Groups of MXFP4 that are read at once: a megabyte of values of a byte."""
_GROUPS = 1 << 12
"""Groups of MXFP4 that are quantised at once."""


@dataclass(frozen=True)
class QuantisedPartBlob(BlockBlob):
    """A block of what a scheme stores of a weight `base` of a float type."""

    base: Tensor
    box: Box
    name: str
    """The weight."""

    def parts(self) -> tuple[Blob, ...]:
        return (self.base.crop(self._tiles(self.box)),)

    def _tiles(self, box: Box) -> Box:
        """The whole blocks of the weight from which a block of the stored part is computed."""
        raise NotImplementedError

    def _values(self, tiles: Box, reader: Reader) -> Array:
        """The values of whole blocks, float32. Raises `UnsupportedError` for values that have no scale."""
        with np.errstate(over="ignore", invalid="ignore"):
            values = read(self.base.crop(tiles), reader).astype(_FLOAT32)
        if not np.isfinite(values).all():
            raise UnsupportedError(
                f"`{printable(self.name)}` has values that are NaN or infinite, so its blocks have no scale",
                hint="`ckpt verify --values` says where they are.",
            )
        return values


@dataclass(frozen=True)
class Fp8CodesBlob(QuantisedPartBlob):
    """Codes of FP8 of a matrix: a block of (n, m)."""

    @property
    def dtype(self) -> DType:
        return _FP8

    def _tiles(self, box: Box) -> Box:
        return _outer(box, self.base.shape)

    def read_into(self, out: Array, reader: Reader) -> None:
        """Fill `out`, (rows, columns) of the dtype float8_e4m3fn."""
        for band in _bands(self._tiles(self.box)):
            values = self._values(band, reader)
            codes = np.empty(values.shape, _FP8)
            codes_of(values, scales_of(values, (BLOCK, BLOCK)), (BLOCK, BLOCK), codes)
            common = band & self.box
            if common is not None:
                out[common.within(self.box).index] = codes[common.within(band).index]


@dataclass(frozen=True)
class Fp8ScalesBlob(QuantisedPartBlob):
    """Scales of FP8 blocks of a matrix (n, m): a block of (ceil(n / 128), ceil(m / 128))."""

    @property
    def dtype(self) -> DType:
        return _FLOAT32

    def _tiles(self, box: Box) -> Box:
        start = tuple(at * BLOCK for at in box.start)
        stop = tuple(min(at * BLOCK, n) for at, n in zip(box.stop, self.base.shape, strict=True))
        return Box(start, stop)

    def read_into(self, out: Array, reader: Reader) -> None:
        """Fill `out`, (rows, columns) float32."""
        for band in _bands(self._tiles(self.box)):
            place = Box(tuple(at // BLOCK for at in band.start), tuple(-(-at // BLOCK) for at in band.stop))
            out[place.within(self.box).index] = scales_of(self._values(band, reader), (BLOCK, BLOCK))


def _outer(box: Box, shape: Shape) -> Box:
    start = tuple(at // BLOCK * BLOCK for at in box.start)
    return Box(start, tuple(min(-(-at // BLOCK) * BLOCK, n) for at, n in zip(box.stop, shape, strict=True)))


def _bands(tiles: Box) -> Sequence[Box]:
    """Whole blocks in pieces: one row of at most `_BAND` blocks each."""
    (top, left), (bottom, right) = tiles.start, tiles.stop
    width = _BAND * BLOCK
    return [
        Box((row, column), (min(row + BLOCK, bottom), min(column + width, right)))
        for row in range(top, bottom, BLOCK)
        for column in range(left, right, width)
    ]


@dataclass(frozen=True)
class Mxfp4Layout:
    """How codes and scales of MXFP4 are stored."""

    is_stack: bool
    """GPT-OSS: of experts (..., in, out), codes are (..., out, in / 32, 16) and scales (..., out, in / 32). Otherwise,
    as compressed-tensors has it: of a matrix (out, in), codes are (out, in / 2) and scales (out, in / 32)."""

    def scales(self, shape: Shape) -> Shape:
        """The shape of the scales of a weight, which is that of its groups of 32 values."""
        *rest, low, high = shape
        return (*rest, high, low // MX_BLOCK) if self.is_stack else (*rest, low, high // MX_BLOCK)

    def codes(self, shape: Shape) -> Shape:
        """The shape of the codes of a weight."""
        *rest, groups = self.scales(shape)
        return (*rest, groups, MX_BLOCK // 2) if self.is_stack else (*rest, groups * MX_BLOCK // 2)

    def tiles(self, groups: Box) -> Box:
        """The block of the weight that a block of groups is."""
        (*rest, row, low), (*last, end, high) = groups.start, groups.stop
        low, high = low * MX_BLOCK, high * MX_BLOCK
        if self.is_stack:
            return Box((*rest, low, row), (*last, high, end))
        return Box((*rest, row, low), (*last, end, high))

    def rows(self, values: Array) -> Array:
        """Values of `tiles` with those of a group behind each other: (..., out, in) float32."""
        return np.ascontiguousarray(values.swapaxes(-1, -2) if self.is_stack else values)


@dataclass(frozen=True)
class _Mxfp4Blob(QuantisedPartBlob):
    layout: Mxfp4Layout

    @property
    def dtype(self) -> DType:
        return _UINT8

    def _groups(self, box: Box) -> Box:
        """The groups of 32 values from which a block of the stored part is computed."""
        raise NotImplementedError

    def _tiles(self, box: Box) -> Box:
        return self.layout.tiles(self._groups(box))

    def _encoded(self, groups: Box, reader: Reader) -> Iterator[tuple[Box, Array, Array]]:
        """Pieces of a block of groups: where they are, codes (..., groups, 16) and scales (..., groups), uint8."""
        for piece in slabs(groups.shape, _READ_GROUPS):
            outer = piece.shift(groups.start)
            values = self.layout.rows(self._values(self.layout.tiles(outer), reader))
            values = values.reshape(*outer.shape, MX_BLOCK)
            for inner in slabs(outer.shape, _GROUPS):
                own = np.ascontiguousarray(values[inner.index])
                scales = np.empty(inner.shape, np.uint8)
                codes = np.empty((*inner.shape, MX_BLOCK // 2), np.uint8)
                mxfp4_of(own, codes, scales)
                yield inner.shift(outer.start), codes, scales


@dataclass(frozen=True)
class Mxfp4CodesBlob(_Mxfp4Blob):
    """Codes of MXFP4, two in a byte."""

    def _groups(self, box: Box) -> Box:
        if self.layout.is_stack:
            return Box(box.start[:-1], box.stop[:-1])
        half = MX_BLOCK // 2
        return Box((*box.start[:-1], box.start[-1] // half), (*box.stop[:-1], -(-box.stop[-1] // half)))

    def read_into(self, out: Array, reader: Reader) -> None:
        """Fill `out`: uint8, (rows, bytes) of a matrix, or (..., rows, groups, 16) of a stack."""
        groups, half = self._groups(self.box), MX_BLOCK // 2
        if self.layout.is_stack:
            for piece, codes, _ in self._encoded(groups, reader):
                out[piece.within(groups).index] = codes[..., self.box.start[-1] : self.box.stop[-1]]
            return
        for piece, codes, _ in self._encoded(groups, reader):
            start, stop = (*piece.start[:-1], piece.start[-1] * half), (*piece.stop[:-1], piece.stop[-1] * half)
            whole = Box(start, stop)
            common = whole & self.box
            if common is not None:
                out[common.within(self.box).index] = codes.reshape(whole.shape)[common.within(whole).index]


@dataclass(frozen=True)
class Mxfp4ScalesBlob(_Mxfp4Blob):
    """Scales of MXFP4: exponents plus 127."""

    def _groups(self, box: Box) -> Box:
        return box

    def read_into(self, out: Array, reader: Reader) -> None:
        """Fill `out`: uint8, (..., rows, groups)."""
        for piece, _, scales in self._encoded(self.box, reader):
            out[piece.within(self.box).index] = scales
