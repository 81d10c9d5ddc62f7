"""Integers of few bits, packed into 32-bit words, with scales and zero points of groups: compressed-tensors, GPTQ, AWQ;
and HQQ, which packs them into bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, DType, Shape
from ckpt_codecs.errors import CodecError
from ckpt_codecs.quantised.base import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    MIN_ELEMENTS,
    Block,
    Part,
    Quantisation,
    Range,
    check_positive,
    outer,
    rounded_into,
    take_block,
    to_float32,
)

PACKED_BITS = (1, 2, 4, 8)
"""Sizes of integers that never lie in two words."""
_WORD = 32
_FLOATS: dict[str, DType] = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def unpacked(words: Array, bits: int, axis: int, order: Sequence[int] = ()) -> Array:
    """The integers in 32-bit words of a matrix, along an axis: uint8, `32 / bits` times as long there.

    words: (n, m) int32. `bits`: one of `PACKED_BITS`. `order`: the place in a word of each integer, counted from the
    lowest bits; else they follow each other.
    """
    places = np.array(order or range(_WORD // bits), np.uint8)
    own, (n, m) = np.ascontiguousarray(words).view(np.uint32), words.shape
    out = np.empty((n * places.size, m) if axis == 0 else (n, m * places.size), np.uint8)
    if out.size >= MIN_ELEMENTS:
        from ckpt_codecs.native import quantised  # small weights need no kernels

        quantised.unpack_words(own, bits, places * np.uint8(bits), axis == 0, out)
        return out
    fields = own[..., None] >> (places * bits).astype(np.uint32) & np.uint32((1 << bits) - 1)
    out[...] = (fields.swapaxes(1, 2) if axis == 0 else fields).reshape(out.shape)
    return out


def _scale_columns(codes: Array, order: Array, zeros: Array, scales: Array, out: Array) -> None:
    """Fill `out`, (outputs, inputs), with (code - zero) * scale, rounded once.

    codes: (inputs, outputs) uint8; order: (inputs,), the group of each input, of those in zeros, integers, and scales,
    floats, both (groups, outputs).
    """
    if codes.size < MIN_ELEMENTS:
        with np.errstate(over="ignore", invalid="ignore"):
            values = (to_float32(codes) - to_float32(zeros)[order]) * to_float32(scales)[order]
        rounded_into(values.T, out)
        return
    from ckpt_codecs.native import quantised  # small weights need no kernels

    products = np.empty(out.shape, FLOAT32)
    own, factors = (np.ascontiguousarray(to_float32(part)) for part in (zeros, scales))
    if not quantised.scale_columns(np.ascontiguousarray(codes), order.astype(np.int32), own, factors, products):
        raise CodecError("a column is of a group that there is not")
    rounded_into(products, out)


def _cut(values: Array, span: Range, unit: int, axis: int) -> Array:
    """The values of a range, of those that were unpacked from whole words of `unit` values."""
    skipped = span[0] % unit
    return values[(slice(None),) * axis + (slice(skipped, skipped + span[1] - span[0]),)]


def _check_bits(bits: int) -> None:
    if bits not in PACKED_BITS:
        raise CodecError(f"integers of {bits} bits are not known")


@dataclass(frozen=True)
class PackedIntegers(Quantisation):
    """Integers of compressed-tensors: stored plus 2^(bits - 1), packed along the rows; scales of groups of columns.

    Parts: words int32 (n, ceil(m * bits / 32)), scales (n, groups); zero points int32 (ceil(n * bits / 32), groups),
    packed along the columns; the group of each column, int32 (m,). The difference and the product are computed in the
    scales' dtype.
    """

    bits: int
    groups: int
    scale: str
    """The dtype of the scales."""
    zeros: bool = False
    order: str | None = None
    """The dtype of the numbers of the columns' groups; None: `m / groups` columns follow each other."""

    name: ClassVar[str] = "packed integers"

    def __post_init__(self) -> None:
        """Raise `CodecError` for a configuration that no weight has."""
        check_positive(self.shape, self.groups)
        _check_bits(self.bits)
        if len(self.shape) != 2 or self.scale not in _FLOATS:
            raise CodecError(f"a weight of the shape {list(self.shape)} is not packed with scales of {self.scale:.40}")
        if self.order not in (None, "int32", "int64"):
            raise CodecError(f"numbers of groups have the type {self.order}")
        if self.order is None and self.shape[1] % self.groups:
            raise CodecError(f"{self.shape[1]} columns are not {self.groups} groups of one size")

    @property
    def code_bits(self) -> float:
        return self.bits

    @property
    def dtype(self) -> DType:
        return _FLOATS[self.scale]

    @property
    def _unit(self) -> int:
        return _WORD // self.bits

    def parts(self) -> tuple[Part, ...]:
        n, m = self.shape
        listed = [Part("codes", (n, -(-m // self._unit)), ("int32",)), Part("scales", (n, self.groups), (self.scale,))]
        if self.zeros:
            listed.append(Part("zeros", (-(-n // self._unit), self.groups), ("int32",)))
        if self.order is not None:
            listed.append(Part("order", (m,), (self.order,)))
        return tuple(listed)

    def part_blocks(self, block: Block) -> tuple[Block, ...]:
        rows, columns = block
        groups = (0, self.groups) if self.order is not None else outer(columns, self.shape[1] // self.groups)
        blocks: list[Block] = [(rows, outer(columns, self._unit)), (rows, groups)]
        if self.zeros:
            blocks.append((outer(rows, self._unit), groups))
        if self.order is not None:
            blocks.append((columns,))
        return tuple(blocks)

    def decode(self, block: Block, parts: Sequence[Array], out: Array) -> None:
        rows, columns = block
        half = 1 << (self.bits - 1)
        if self._is_aligned(columns) and parts[0].size >= MIN_ELEMENTS // 8:
            self._by_kernel(parts[0], to_float32(parts[1]), out)
            return
        values = to_float32(_cut(unpacked(parts[0], self.bits, 1), columns, self._unit, 1)) - FLOAT32.type(half)
        if self.order is not None:
            order = _places(parts[-1], self.groups)
        else:
            size = self.shape[1] // self.groups
            order = np.arange(*columns) // size - columns[0] // size
        with np.errstate(over="ignore", invalid="ignore"):
            if self.zeros:
                zeros = _cut(unpacked(parts[2], self.bits, 0), rows, self._unit, 0)
                values -= (to_float32(zeros) - FLOAT32.type(half))[:, order]
            values *= to_float32(parts[1])[:, order]
        rounded_into(values, out)

    def _is_aligned(self, columns: Range) -> bool:
        """Whether the columns are whole groups of whole words of half bytes without zero points."""
        if self.bits != 4 or self.zeros or self.order is not None:
            return False
        size = self.shape[1] // self.groups
        return size % self._unit == 0 and all(at % size == 0 for at in columns)

    def _by_kernel(self, words: Array, scales: Array, out: Array) -> None:
        from ckpt_codecs.native import quantised  # small weights need no kernels

        values = np.empty(out.size, FLOAT32)
        packed, table = np.ascontiguousarray(words).view(np.uint8).reshape(-1), np.arange(-8, 8, dtype=FLOAT32)
        size = self.shape[1] // self.groups
        quantised.scale_nibbles(packed, False, table, np.ascontiguousarray(scales).reshape(-1), size, values)
        rounded_into(values.reshape(out.shape), out)


def _places(order: Array, groups: int) -> Array:
    """Numbers of groups, as an index. Raises `CodecError` for one that there is not."""
    if order.size and not (int(order.min()) >= 0 and int(order.max()) < groups):
        raise CodecError(f"a column is of a group that is none of {groups}")
    return order


@dataclass(frozen=True)
class Gptq(Quantisation):
    """GPTQ: words along the inputs, zero points along the outputs; files have the matrix as (inputs, outputs).

    Parts: qweight int32 (in * bits / 32, out), qzeros int32 (groups, out * bits / 32), scales (groups, out), and
    g_idx int32 (in,), the group of each input, in any order. The product is computed in the scales' dtype.
    """

    bits: int
    groups: int
    scale: str
    stored_less_one: bool = True
    """Whether zero points are stored less one, as version 1 does."""
    order: bool = True
    """Whether there is a g_idx."""

    name: ClassVar[str] = "GPTQ"

    def __post_init__(self) -> None:
        """Raise `CodecError` for a configuration that no weight has."""
        check_positive(self.shape, self.groups)
        _check_bits(self.bits)
        if len(self.shape) != 2 or self.scale not in _FLOATS or any(n % self._unit for n in self.shape):
            raise CodecError(f"a weight of the shape {list(self.shape)} is not packed in words of {self._unit} values")
        if not self.order and self.shape[1] % self.groups:
            raise CodecError(f"{self.shape[1]} inputs are not {self.groups} groups of one size")

    @property
    def code_bits(self) -> float:
        return self.bits

    @property
    def dtype(self) -> DType:
        return _FLOATS[self.scale]

    @property
    def _unit(self) -> int:
        return _WORD // self.bits

    def parts(self) -> tuple[Part, ...]:
        n, m = self.shape
        order = (Part("order", (m,), ("int32", "int64")),) if self.order else ()
        return (
            Part("codes", (m // self._unit, n), ("int32",)),
            Part("zeros", (self.groups, n // self._unit), ("int32",)),
            Part("scales", (self.groups, n), (self.scale,)),
            *order,
        )

    def part_blocks(self, block: Block) -> tuple[Block, ...]:
        rows, columns = block
        groups = (0, self.groups) if self.order else outer(columns, self.shape[1] // self.groups)
        listed = (outer(columns, self._unit), rows), (groups, outer(rows, self._unit)), (groups, rows)
        return (*listed, (columns,)) if self.order else listed

    def decode(self, block: Block, parts: Sequence[Array], out: Array) -> None:
        rows, columns = block
        codes = _cut(unpacked(parts[0], self.bits, 0), columns, self._unit, 0)
        zeros = _cut(unpacked(parts[1], self.bits, 1), rows, self._unit, 1)
        if self.stored_less_one:
            if zeros.size and int(zeros.max()) == (1 << self.bits) - 1:
                # Some libraries read it as 0, some as 2^bits, some carry into the next zero point.
                raise CodecError(
                    f"a zero point of GPTQ version 1 is stored as {zeros.max()}, which libraries read apart"
                )
            zeros = zeros.astype(np.int32) + 1
        if self.order:
            order = _places(parts[3], self.groups)
        else:
            size = self.shape[1] // self.groups
            order = np.arange(*columns) // size - columns[0] // size
        _scale_columns(codes, order, zeros, parts[2], out)


@dataclass(frozen=True)
class Awq(Quantisation):
    """AWQ, 4 bits: eight outputs in a word, in the order 0 2 4 6 1 3 5 7; files have the matrix as (inputs, outputs).

    Parts: qweight int32 (in, out / 8), qzeros int32 (groups, out / 8), scales (groups, out). The product is computed
    in the scales' dtype.
    """

    groups: int
    scale: str

    name: ClassVar[str] = "AWQ"

    def __post_init__(self) -> None:
        """Raise `CodecError` for a configuration that no weight has."""
        check_positive(self.shape, self.groups)
        if len(self.shape) != 2 or self.scale not in _FLOATS or self.shape[0] % 8 or self.shape[1] % self.groups:
            raise CodecError(f"a weight of the shape {list(self.shape)} is not packed as AWQ, {self.groups} groups")

    @property
    def code_bits(self) -> float:
        return 4

    @property
    def dtype(self) -> DType:
        return _FLOATS[self.scale]

    def parts(self) -> tuple[Part, ...]:
        n, m = self.shape
        return (
            Part("codes", (m, n // 8), ("int32",)),
            Part("zeros", (self.groups, n // 8), ("int32",)),
            Part("scales", (self.groups, n), (self.scale,)),
        )

    def part_blocks(self, block: Block) -> tuple[Block, ...]:
        rows, columns = block
        groups = outer(columns, self.shape[1] // self.groups)
        return (columns, outer(rows, 8)), (groups, outer(rows, 8)), (groups, rows)

    def decode(self, block: Block, parts: Sequence[Array], out: Array) -> None:
        rows, columns = block
        size = self.shape[1] // self.groups
        order = np.arange(*columns) // size - columns[0] // size
        codes, zeros = (_cut(unpacked(words, 4, 1, _AWQ_ORDER), rows, 8, 1) for words in parts[:2])
        _scale_columns(codes, order, zeros, parts[2], out)


@dataclass(frozen=True)
class Hqq(Quantisation):
    """HQQ: the matrix is cut into groups, and the first part of the groups' rows is in the highest bits of the bytes.

    Parts: W_q uint8, of the grouped matrix with `8 / bits` times fewer rows; scale and zero, for each row (axis 1) or
    column (axis 0) of the grouped matrix. `(code - zero) * scale` is computed in the scales' dtype.
    """

    bits: int
    group: int
    axis: int
    scale: str

    name: ClassVar[str] = "HQQ"

    def __post_init__(self) -> None:
        """Raise `CodecError` for a configuration that no weight has."""
        check_positive(self.shape, self.group)
        if self.bits not in PACKED_BITS or self.axis not in (0, 1) or self.scale not in _FLOATS:
            raise CodecError(f"HQQ of {self.bits} bits along axis {self.axis} is not known")
        if self._size % self.group or self._grouped[0] % (8 // self.bits):
            raise CodecError(f"a weight of the shape {list(self.shape)} is not groups of {self.group} values")

    @property
    def _size(self) -> int:
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def _grouped(self) -> Shape:
        rest = self._size // self.group
        return (rest, self.group) if self.axis == 1 else (self.group, rest)

    @property
    def code_bits(self) -> float:
        return self.bits

    @property
    def dtype(self) -> DType:
        return _FLOATS[self.scale]

    def parts(self) -> tuple[Part, ...]:
        rows, columns = self._grouped
        scales = (rows, 1) if self.axis == 1 else (1, columns)
        codes = Part("codes", (rows // (8 // self.bits), columns), ("uint8",))
        return codes, Part("scales", scales, (self.scale,)), Part("zeros", scales, (self.scale,))

    def _rows(self, block: Block) -> Range:
        """The rows of the grouped matrix in which a block lies."""
        low = high = 0
        for (start, stop), n in zip(block, self.shape, strict=True):
            low, high = low * n + start, high * n + stop - 1
        return outer((low, high + 1), self._grouped[1])

    def part_blocks(self, block: Block) -> tuple[Block, ...]:
        rows, columns = self._grouped
        own, stored = self._rows(block), rows // (8 // self.bits)
        low, high = own[0] % stored, own[0] % stored + own[1] - own[0]
        codes: Block = ((low, high) if high <= stored else (0, stored), (0, columns))
        scales: Block = (own, (0, 1)) if self.axis == 1 else ((0, 1), (0, columns))
        return codes, scales, scales

    def decode(self, block: Block, parts: Sequence[Array], out: Array) -> None:
        codes, scales, zeros = parts
        (first, last), columns = self._rows(block), self._grouped[1]
        stored = self._grouped[0] // (8 // self.bits)
        numbers = np.arange(first, last)
        shifts = (8 - self.bits * (1 + numbers // stored)).astype(np.uint8)
        places = numbers - first if first % stored + last - first <= stored else numbers % stored
        fields = codes[places] >> shifts[:, None] & ((1 << self.bits) - 1)
        with np.errstate(over="ignore", invalid="ignore"):
            # Each operation is rounded to the scales' dtype, as the library does.
            differences = (to_float32(fields) - to_float32(zeros)).astype(scales.dtype)
            values = np.empty(differences.shape, self.dtype)
            rounded_into(to_float32(differences) * to_float32(scales), values)
        take_block(block, self.shape, first * columns, values.reshape(-1), out)
