"""Planes of bytes as streams: how each is held is decided here, plane by plane."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ckpt_codecs import sparse
from ckpt_codecs.base import Array
from ckpt_codecs.engine import engine
from ckpt_codecs.errors import CodecError
from ckpt_codecs.kinds import CONSTANT, DIGITS, ENTRY, HUF0, HUFFMAN, RUNS, STORED
from ckpt_codecs.scratch import borrow
from ckpt_codecs.zstd import expand


@dataclass(frozen=True)
class Effort:
    """How hard an encoder tries. Bytes mean the same at every level."""

    worth: float
    """A plane is coded if it shrinks to less than this."""
    survey: bool = True
    """Believe a sample that says that it will not."""


LEVELS = {"fast": Effort(0.95), "default": Effort(0.98), "max": Effort(1.0, survey=False)}


LEAST_CODE = 40
"""Bytes that a code takes before the first symbol, about."""
SPARSE = 1.6
"""Bits a symbol below which runs and digits are tried."""
LEAST_SPARSE = 2048
"""Symbols of a plane for which they are."""
WASTE = 1.03
"""where a code takes so much more than the entropy. A bit is lost on each symbol at most, and here it matters."""
MOSTLY = 0.75
"""The share of one symbol from which runs may be smaller."""


FEW = -1
"""No kind: of a plane of so little information, `write` decides, not the engine."""
READ = 255
"""No kind: a stream that the engine has read already."""
Progress = tuple[int, int, int, int]
"""How many planes are streams, where the next one is, where the last stream ends, what the next one would take."""


def write(
    out: Array,
    at: int,
    sizes: Sequence[int],
    worths: Sequence[float],
    looks: Sequence[bool],
    begun: Progress | None = None,
) -> int:
    """Planes of these sizes, which lie in `out` from `at` on, made streams in place: the end of the last.

    Their directory is written before them. `worths` and `looks`: the `Effort` for each. `begun`: what is done already.
    """
    if begun is not None and begun[0] == len(sizes):
        return begun[2]
    given = np.array(sizes, np.int64), np.array(worths, np.float64), np.array(looks, np.bool_)
    done, place, at, held = begun or engine().write(out, *given, 0, at, at)
    while done < len(sizes):
        kind, data = _smallest(out[place : place + sizes[done]], held)
        out[at : at + data.size] = data
        out[1 + ENTRY * done : 1 + ENTRY * (done + 1)] = np.frombuffer(_head(kind, data), np.uint8)
        done, place, at, held = engine().write(out, *given, done + 1, place + sizes[done], at + data.size)
    return at


def encode(plane: Array, out: Array, at: int, effort: Effort, sure: bool = False) -> tuple[int, int]:
    """A stream alone, to `out` from `at` on: its kind and size. Of a plane that is to be stored nothing is written."""
    begin = 1 + ENTRY
    made = np.concatenate([np.empty(begin, np.uint8), plane])
    end = write(made, begin, [plane.size], [effort.worth], [effort.survey and not sure])
    if made[1] != STORED:
        out[at : at + end - begin] = made[begin:end]
    return int(made[1]), end - begin


def decode(kind: int, source: Array, at: int, end: int, size: int, scratch: str) -> Array:
    """The plane of a stream alone, `source[at:end]`: a view, or this thread's scratch."""
    return read(source, [kind], [at, end], [size], scratch)[0]


def _head(kind: int, data: Array) -> bytes:
    return bytes([kind]) + data.size.to_bytes(4, "little")


def _smallest(plane: Array, held: int) -> tuple[int, Array]:
    """A plane of little information: as digits, as runs, or coded as it is, which would take `held` bytes."""
    counts = engine().counts()
    symbols, common = np.flatnonzero(counts).astype(np.uint8), int(counts.argmax())
    tried = []
    if symbols.size in sparse.PER_BYTE:
        tried.append((DIGITS, bytes([symbols.size]) + symbols.tobytes() + _nested(sparse.pack(plane, symbols))))
    if symbols.size > 1 and counts[common] >= MOSTLY * plane.size:
        gaps, others = engine().gaps(plane, common)
        head = bytes([common]) + gaps.size.to_bytes(4, "little") + others.size.to_bytes(4, "little")
        tried.append((RUNS, head + _nested(gaps) + _nested(others)))
    kind, data = min(tried, key=lambda made: len(made[1]), default=(STORED, b""))
    if kind != STORED and len(data) < held:
        return kind, np.frombuffer(data, np.uint8)
    return _coded(plane)


def _coded(plane: Array) -> tuple[int, Array]:
    """A plane, entropy-coded if that is shorter: its kind, and its bytes, which may be scratch."""
    room = borrow("nested", plane.size + 8)
    if not plane.size or engine().tally(plane) >= plane.size:
        return STORED, plane
    kind, held = engine().press(plane, room, 0)
    return kind, room[:held]


def _nested(plane: Array) -> bytes:
    """A stream within a stream: its kind, its size, itself."""
    kind, data = _coded(plane)
    return _head(kind, data) + data.tobytes()


def read(source: Array, kinds: Sequence[int], starts: Sequence[int], sizes: Sequence[int], scratch: str) -> list[Array]:
    """The planes of streams, the i-th from `source[starts[i]:starts[i + 1]]`: views, or this thread's scratch."""
    places = list(accumulate(sizes, initial=0))
    room, left = borrow(scratch, places[-1] if any(kinds) else 0), np.array(kinds, np.uint8)
    if any(kinds):
        if max(kinds) > DIGITS:
            raise CodecError(f"no stream is of kind {max(kinds)}")
        given = np.array(starts, np.int64), np.array(sizes, np.int64), np.array(places, np.int64)
        damaged = engine().read(source, left, *given, room)
        if damaged < len(sizes):
            raise CodecError(f"a stream of kind {kinds[damaged]} is damaged")
    planes = []
    for i, (kind, size) in enumerate(zip(left.tolist(), sizes, strict=True)):
        held, plane = source[starts[i] : starts[i + 1]], room[places[i] : places[i + 1]]
        if kind == STORED:
            if held.size != size:
                raise CodecError(f"a stored stream of {held.size} bytes is not one of {size}")
            plane = held
        elif kind == HUF0:
            plane[:] = np.frombuffer(expand(held, size), np.uint8)
        elif kind == RUNS:
            _runs(held, plane)
        elif kind == DIGITS:
            _digits(held, plane)
        planes.append(plane)
    return planes


def _runs(source: Array, plane: Array) -> None:
    if source.size < 9:
        raise CodecError("a stream of runs ends in its head")
    many, others = (int.from_bytes(source[i : i + 4].tobytes(), "little") for i in (1, 5))
    if others > plane.size or many > sparse.most_gaps(plane.size):
        raise CodecError("a stream of runs is longer than its plane")
    gaps, at = _inner(source, 9, many, "gaps")
    values, at = _inner(source, at, others, "others")
    if at != source.size or not engine().from_gaps(gaps, values, int(source[0]), plane):
        raise CodecError("a stream of runs is damaged")


def _digits(source: Array, plane: Array) -> None:
    base = int(source[0]) if source.size else 0
    if base not in sparse.PER_BYTE or source.size < 1 + base:
        raise CodecError(f"a stream of digits to the base {base} is damaged")
    packed, at = _inner(source, 1 + base, sparse.packed_size(plane.size, base), "digits")
    if at != source.size:
        raise CodecError("a stream of digits goes on past its end")
    sparse.unpack(packed, source[1 : 1 + base], plane)


def _inner(source: Array, at: int, size: int, scratch: str) -> tuple[Array, int]:
    """The stream within a stream that begins at `at`, and where it ends."""
    if source.size - at < 5:
        raise CodecError("a stream ends in the head of another")
    kind, end = int(source[at]), at + 5 + int.from_bytes(source[at + 1 : at + 5].tobytes(), "little")
    if end > source.size or kind not in (STORED, CONSTANT, HUFFMAN, HUF0):
        raise CodecError("a stream within a stream is damaged")
    return decode(kind, source, at + 5, end, size, scratch), end
