"""One plane of bytes as a stream: how it is held is decided here, plane by plane."""

from dataclasses import dataclass

import numpy as np

from ckpt_codecs import sparse
from ckpt_codecs.base import Array, Codec
from ckpt_codecs.engine import engine
from ckpt_codecs.errors import CodecError
from ckpt_codecs.kinds import CONSTANT, DIGITS, HUF0, HUFFMAN, RUNS, SEPTETS, STORED
from ckpt_codecs.scratch import borrow
from ckpt_codecs.zstd import expand


@dataclass(frozen=True)
class Effort:
    """How hard an encoder tries. Bytes mean the same at every level."""

    worth: float
    """A plane is coded if it shrinks to less than this."""
    survey: bool = True
    """Believe a sample that says that it will not."""


LEAST_CODE = 40
"""Bytes that a code takes before the first symbol, about."""
LEVELS = {"fast": Effort(0.95), "default": Effort(0.988), "max": Effort(1.0, survey=False)}


@dataclass(frozen=True)
class Levelled(Codec):
    """A codec with a choice of effort."""

    level: str = "default"

    def __post_init__(self) -> None:
        if not isinstance(self.level, str) or self.level not in LEVELS:
            raise CodecError(f"no level is called {self.level!r}; there are: {', '.join(LEVELS)}")


SPARSE = 1.6
"""Bits a symbol below which runs and digits are tried."""
WASTE = 1.03
"""where a code takes so much more than the entropy: at most a bit is lost on each symbol, and here it matters."""
MOSTLY = 0.75
"""The share of one symbol from which runs may be smaller."""


def encode(plane: Array, out: Array, at: int, effort: Effort, sure: bool = False) -> tuple[int, int]:
    """Write a plane to `out` from `at` on, where there is room for all of it: its kind and size.

    `STORED` writes nothing, since the plane mostly lies where it belongs already.
    `sure`: coding pays for certain.
    """
    size, run = plane.size, engine()
    if not size:
        return STORED, 0
    bits = run.survey(plane) if effort.survey and not sure else 0.0
    septets = 5 < bits < 7.01 and run.below128(plane)
    most = int((size - size // 8 if septets else size) * effort.worth)
    if size * bits / 8 + LEAST_CODE < most:
        held = run.tally(plane)
        if held > 1 and 8 * held < SPARSE * size and held > WASTE * _entropy(run.counts()) / 8:
            return _smallest(plane, out, at, held)
        if held < most:
            return run.press(plane, out, at)
    if size >= 8 and (septets or (not bits and run.below128(plane))):
        run.pack7(plane, out[at : at + size - size // 8])
        return SEPTETS, size - size // 8
    return STORED, size


def _entropy(counts: Array) -> float:
    """Bits of a whole plane."""
    some = counts[counts > 0]
    return float((some * np.log2(some.sum() / some)).sum())


def _smallest(plane: Array, out: Array, at: int, held: int) -> tuple[int, int]:
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
    if kind == STORED or len(data) >= held:
        engine().tally(plane)
        return engine().press(plane, out, at)
    out[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return kind, len(data)


def _nested(plane: Array) -> bytes:
    """A stream within a stream: its kind, its size, itself."""
    kind, held = STORED, plane.size
    room = borrow("nested", plane.size + 8)
    if plane.size and engine().tally(plane) < plane.size:
        kind, held = engine().press(plane, room, 0)
    data = plane if kind == STORED else room[:held]
    return bytes([kind]) + held.to_bytes(4, "little") + data.tobytes()


def decode(kind: int, source: Array, at: int, end: int, size: int, name: str) -> Array:
    """The plane of `size` bytes that `source[at:end]` holds: a view, or this thread's scratch `name`."""
    held = end - at
    if kind == STORED:
        if held != size:
            raise CodecError(f"a stored stream of {held} bytes is not one of {size}")
        return source[at:end]
    plane = borrow(name, size)
    if kind == CONSTANT and held == 1:
        plane[:] = source[at]
    elif kind == SEPTETS and held == size - size // 8:
        engine().unpack7(source[at:end], plane)
    elif kind == HUFFMAN and engine().unpress(source, at, end, plane):
        pass
    elif kind == HUF0:
        plane[:] = np.frombuffer(expand(source[at:end], size), np.uint8)
    elif kind == RUNS:
        _runs(source[at:end], plane)
    elif kind == DIGITS:
        _digits(source[at:end], plane)
    else:
        raise CodecError(f"a stream of kind {kind} is damaged")
    return plane


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


def _inner(source: Array, at: int, size: int, name: str) -> tuple[Array, int]:
    """The stream within a stream that begins at `at`, and where it ends."""
    if source.size - at < 5:
        raise CodecError("a stream ends in the head of another")
    end = at + 5 + int.from_bytes(source[at + 1 : at + 5].tobytes(), "little")
    if end > source.size or source[at] not in (STORED, CONSTANT, HUFFMAN, HUF0):
        raise CodecError("a stream within a stream is damaged")
    return decode(int(source[at]), source, at + 5, end, size, name), end
