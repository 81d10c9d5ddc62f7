"""The compiled engine. Importing it compiles it, or loads it from Numba's cache.

Its functions are those of `ckpt_codecs.engine.Engine`; `ckpt_codecs.portable` has
the same without Numba.
"""

import threading

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.kernels import chunks, codes, planes, scales, streams
from ckpt_codecs.kernels.encode import encode
from ckpt_codecs.kernels.jit import COMPILED
from ckpt_codecs.kinds import CONSTANT, HUFFMAN
from ckpt_codecs.scratch import borrow
from ckpt_codecs.streams import Progress

NAME = "kernels"

survey = planes.survey
unpack2, to_bfloat16, is_bfloat16_of = planes.unpack2, planes.to_bfloat16, planes.is_bfloat16_of


class _Tables(threading.local):
    """What each thread writes its codes into, time and again."""

    def __init__(self) -> None:
        self.counts = np.empty((codes.STREAMS, 256), np.uint32)
        self.total = np.empty(256, np.uint32)
        self.order = np.empty(256, np.int32)
        self.lengths = np.empty(256, np.uint8)
        self.pairs = np.empty(1 << 16, np.uint32)
        self.single = np.empty(codes.ENTRIES, np.uint32)
        self.table = np.empty(codes.ENTRIES, np.uint64)


_tables = _Tables()


def was_compiled() -> bool:
    """Did this process have to compile a kernel that no cache held?"""
    return any(made.stats.cache_misses or not made.stats.cache_hits for made in COMPILED)


def split(words: Array, parts: list[Array]) -> None:
    if words.itemsize == 4:
        planes.split32(words, *parts)
    else:
        planes.split16(words, *parts)


def merge(parts: list[Array], words: Array) -> None:
    if words.itemsize == 4:
        planes.merge32(*parts, words)
    else:
        planes.merge16(*parts, words)


def from_residuals(
    residuals: Array, parts: list[Array], base: Array | None, columns: int, rows: Array, words: Array
) -> None:
    column = borrow("column", 4 * columns).view(np.int32)
    if base is None:
        scales.from_residuals_alone(residuals, *parts, columns, column, rows, words)
    else:
        scales.from_residuals_based(residuals, *parts, base, columns, column, rows, words)


def pack2(plane: Array, symbols: Array, out: Array) -> None:
    planes.pack2(plane, symbols, borrow("pairs", 1 << 16), out)


def gaps(plane: Array, common: int) -> tuple[Array, Array]:
    room, others = borrow("gaps", plane.size + plane.size // 255), borrow("others", plane.size)
    many = planes.gaps(plane, common, room, others)
    return room[:many], others[: np.count_nonzero(room[:many] != 255)]


def from_gaps(made: Array, others: Array, common: int, out: Array) -> bool:
    return bool(planes.from_gaps(made, others, common, out))


def write(out: Array, sizes: Array, worths: Array, looks: Array, done: int, place: int, at: int) -> Progress:
    made: Progress = streams.write(out, sizes, worths, looks, done, place, at, *_room(int(sizes.max(initial=0))))
    return made


def write_planes(words: Array, out: Array, worth: float, look: bool) -> Progress:
    kernel = chunks.write_planes32 if words.itemsize == 4 else chunks.write_planes16
    made: Progress = kernel(words, out, worth, look, *_room(words.size))
    return made


def write_residuals(
    words: Array,
    base: Array | None,
    columns: int,
    width: int,
    out: Array,
    worth: float,
    look: bool,
    worth_of_rows: float,
) -> Progress | None:
    column, room = borrow("column", 4 * columns).view(np.int32), borrow("ignored", 3 * words.size)
    given = words, words if base is None else base, base is not None, columns, column, width, out
    made: Progress = chunks.write_residuals(*given, worth, look, worth_of_rows, room, *_room(words.size))
    return None if made[0] < 0 else made


def read(source: Array, kinds: Array, starts: Array, sizes: Array, places: Array, room: Array) -> int:
    packed = borrow("packed", int(sizes.max(initial=0)) // 2 + 1)
    return int(streams.read(source, kinds, starts, sizes, places, room, packed, _tables.single, _tables.table))


def read_planes(source: Array, words: Array) -> bool:
    kernel = chunks.read_planes32 if words.itemsize == 4 else chunks.read_planes16
    return bool(kernel(source, words, *_planes(words.itemsize * words.size, words.size)))


def read_residuals(source: Array, base: Array | None, columns: int, words: Array) -> bool:
    column, size = borrow("column", 4 * columns).view(np.int32), words.size
    given = source, words if base is None else base, base is not None, columns, column, words
    return bool(chunks.read_residuals(*given, *_planes(4 * size + 2 + 2 * (size // columns), size)))


def _room(size: int) -> tuple[Array, ...]:
    """To write planes of such a size in."""
    t = _tables
    spare, packed = borrow("spare", size + 8), borrow("packed", size // 2 + 1)
    return spare, packed, t.counts, t.total, t.order, t.lengths, t.pairs


def _planes(nbytes: int, size: int) -> tuple[Array, ...]:
    """To read planes of such a size in, `nbytes` together."""
    room = borrow("planes", nbytes)
    return room, room, borrow("packed", size // 2 + 1), _tables.single, _tables.table


def tally(plane: Array) -> int:
    t = _tables
    codes.count(plane, t.counts)
    used = codes.assign(t.counts, t.total, t.order, t.lengths)
    return 1 if used == 1 else int(codes.cost(t.counts, t.lengths))


def counts() -> Array:
    total: Array = _tables.counts.sum(axis=0)
    return total


def press(plane: Array, out: Array, at: int) -> tuple[int, int]:
    t = _tables
    if not t.lengths.any():
        out[at] = plane[0]
        return CONSTANT, 1
    return HUFFMAN, encode(plane, t.counts, t.lengths, t.pairs, out, at) - at
