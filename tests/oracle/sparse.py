"""The twin of `sparse.c`: planes of few symbols, or mostly of one, as digits or as runs."""

from collections.abc import Callable

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.format_ids import CONSTANT, DIGITS, ENTRY, HUFFMAN, RUNS, STORED
from oracle.huffman import code_of, write_huffman

PER_BYTE = {2: 8, 3: 5, **dict.fromkeys(range(4, 17), 2)}
"""How many digits to a base fit into a byte."""
MIN_RUNS_SHARE = 0.75

ReadStream = Callable[[int, Array, Array], bool]


def head(kind: int, size: int) -> bytes:
    return bytes([kind]) + size.to_bytes(4, "little")


def entropy_code(plane: Array) -> tuple[int, bytes]:
    """The smallest of a plane as it is, its only symbol and its Huffman code: its kind, and its bytes."""
    code = code_of(plane)
    if plane.size > 1 and code.used == 1:
        return CONSTANT, plane[:1].tobytes()
    if code.used > 1 and code.size < plane.size:
        return HUFFMAN, write_huffman(plane, code)
    return STORED, plane.tobytes()


def inner(plane: Array) -> bytes:
    kind, data = entropy_code(plane)
    return head(kind, len(data)) + data


def write_sparse(plane: Array, max_size: int) -> tuple[int, bytes] | None:
    """As digits or as runs, whichever is smaller, if it is smaller than so many bytes."""
    counts = np.bincount(plane, minlength=256)
    symbols, common = np.flatnonzero(counts).astype(np.uint8), int(counts.argmax())
    tried = []
    if symbols.size in PER_BYTE:
        tried.append((DIGITS, bytes([symbols.size]) + symbols.tobytes() + inner(pack_digits(plane, symbols))))
    if counts[common] >= MIN_RUNS_SHARE * plane.size:
        gaps, others = find_gaps(plane, common)
        sizes = gaps.size.to_bytes(4, "little") + others.size.to_bytes(4, "little")
        tried.append((RUNS, bytes([common]) + sizes + inner(gaps) + inner(others)))
    smallest = min(tried, key=lambda part: len(part[1]), default=None)
    return smallest if smallest is not None and len(smallest[1]) < max_size else None


def pack_digits(plane: Array, symbols: Array) -> Array:
    """Neighbours together in a byte, as digits to the base of how many symbols there are, the first one lowest."""
    base, per_byte = symbols.size, PER_BYTE[symbols.size]
    digit = np.zeros(256, np.uint8)
    digit[symbols] = np.arange(base)
    digits = np.zeros(-(-plane.size // per_byte) * per_byte, np.uint8)
    digits[: plane.size] = digit[plane]
    packed = np.zeros(digits.size // per_byte, np.uint8)
    for i in range(per_byte):
        packed += digits[i::per_byte] * np.uint8(base**i)
    return packed


def unpack_digits(packed: Array, symbols: Array, plane: Array) -> None:
    base = symbols.size
    rows = symbols[np.arange(256)[:, None] // base ** np.arange(PER_BYTE[base]) % base]
    plane[:] = rows[packed].reshape(-1)[: plane.size]


def find_gaps(plane: Array, common: int) -> tuple[Array, Array]:
    """How many common symbols stand before each other one (255: as many, and no symbol yet), and the others."""
    places = np.flatnonzero(plane != common)
    before = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(before // 255 + 1)
    gaps = np.full(int(ends[-1]) if ends.size else 0, 255, np.uint8)
    gaps[ends - 1] = before % 255
    return gaps, plane[places]


def fill_gaps(gaps: Array, others: Array, common: int, plane: Array) -> bool:
    ends = np.flatnonzero(gaps != 255)
    if ends.size != others.size or (gaps.size and gaps[-1] == 255):
        return False
    places = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(ends.size)
    if ends.size and places[-1] >= plane.size:
        return False
    plane[:] = common
    plane[places] = others
    return True


def read_digits(source: Array, plane: Array, read_stream: ReadStream) -> bool:
    base = int(source[0]) if source.size else 0
    if base not in PER_BYTE or source.size < 1 + base:
        return False
    packed = np.empty(-(-plane.size // PER_BYTE[base]), np.uint8)
    if _read_inner(source, 1 + base, packed, read_stream) != source.size:
        return False
    unpack_digits(packed, source[1 : 1 + base], plane)
    return True


def read_runs(source: Array, plane: Array, read_stream: ReadStream) -> bool:
    if source.size < 9:
        return False
    gaps_size, others_size = (int.from_bytes(source[i : i + 4].tobytes(), "little") for i in (1, 5))
    if others_size > plane.size or gaps_size > plane.size + plane.size // 255:
        return False
    gaps, others = np.empty(gaps_size, np.uint8), np.empty(others_size, np.uint8)
    at = _read_inner(source, 9, gaps, read_stream)
    if at is None or _read_inner(source, at, others, read_stream) != source.size:
        return False
    return fill_gaps(gaps, others, int(source[0]), plane)


def _read_inner(source: Array, at: int, plane: Array, read_stream: ReadStream) -> int | None:
    """Where the inner stream ends that begins at `at`; None if it is damaged."""
    if source.size - at < ENTRY:
        return None
    kind, end = int(source[at]), at + ENTRY + int.from_bytes(source[at + 1 : at + ENTRY].tobytes(), "little")
    if end > source.size or kind not in (STORED, CONSTANT, HUFFMAN):
        return None
    return end if read_stream(kind, source[at + ENTRY : end], plane) else None
