"""The engine without Numba: NumPy, and zstandard's Huffman coder. It reads what the kernels wrote, slowly."""

import threading
from typing import Any

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.kinds import CONSTANT, ENTRY, HUF0, HUFFMAN, SEPTETS, STORED
from ckpt_codecs.streams import FEW, LEAST_CODE, LEAST_SPARSE, READ, SPARSE, WASTE, Progress
from ckpt_codecs.zstd import entropy_only

NAME = "portable"
LONGEST = 11
STREAMS = 8
SLOWEST = 15
HALF_BIT = 0.5 / np.log(2)
SAMPLES = 16
SAMPLE = 256


def was_compiled() -> bool:
    return False


def split(words: Array, parts: list[Array]) -> None:
    width, bits = words.itemsize, 8 * words.itemsize
    parts[-1][:] = words >> _as(bits - 9, words) & _as(255, words)
    raw = words.view(np.uint8).reshape(-1, width)
    for i in range(width - 2):
        parts[i][:] = raw[:, i]
    parts[-2][:] = raw[:, width - 2] & np.uint8(0x7F) | raw[:, width - 1] & np.uint8(0x80)


def merge(parts: list[Array], words: Array) -> None:
    width = words.itemsize
    raw = words.view(np.uint8).reshape(-1, width)
    for i in range(width - 2):
        raw[:, i] = parts[i]
    high, top = parts[-2], parts[-1]
    raw[:, width - 2] = high & np.uint8(0x7F) | top << np.uint8(7)
    raw[:, width - 1] = high & np.uint8(0x80) | top >> np.uint8(1)


def _as(number: int, like: Array) -> Any:
    return like.dtype.type(number)


def survey(plane: Array) -> float:
    each = plane.size // SAMPLES
    many = min(each, SAMPLE)
    if not many:
        return 0.0
    counts = np.bincount(plane[: SAMPLES * each].reshape(SAMPLES, each)[:, :many].reshape(-1))
    share = counts[counts > 0] / (SAMPLES * many)
    return float(-(share * np.log2(share)).sum() + HALF_BIT * (share.size - 1) / (SAMPLES * many))


def below128(plane: Array) -> bool:
    return not plane.size or int(plane.max()) < 128


def pack7(plane: Array, out: Array) -> None:
    n = plane.size // 8
    last = plane[7 * n : 8 * n]
    for j in range(7):
        out[j * n : (j + 1) * n] = plane[j * n : (j + 1) * n] | (last >> np.uint8(j) & np.uint8(1)) << np.uint8(7)
    out[7 * n :] = plane[8 * n :]


def unpack7(packed: Array, plane: Array) -> None:
    n = plane.size // 8
    plane[7 * n : 8 * n] = 0
    for j in range(7):
        part = packed[j * n : (j + 1) * n]
        plane[j * n : (j + 1) * n] = part & np.uint8(127)
        plane[7 * n : 8 * n] |= part >> np.uint8(7) << np.uint8(j)
    plane[8 * n :] = packed[7 * n :]


def _to_residuals(words: Array, base: Array | None, columns: int, rows: Array, parts: list[Array], out: Array) -> None:
    split(words, parts)
    size16, expected = _size16(words), _expected(base, words.size)
    column, scale = np.zeros(columns, np.int32), 0
    for row in range(rows.size):
        here = slice(row * columns, (row + 1) * columns)
        there = size16[here] >= 16
        error = (size16[here] - expected[here] << 4) - column
        if there.any():
            scale = (int(error[there].sum(dtype=np.int64)) // int(there.sum()) + 8) >> 4
        rows[row] = scale
        foretold = expected[here] + np.int32(scale)
        guess = _guess(foretold, column)
        exponent = parts[-1][here]
        symbol = exponent - guess + np.uint8(64)
        symbol = np.where(symbol == 0, np.uint8(64) - guess, symbol)
        out[here] = np.where(exponent == 0, np.uint8(0), symbol)
        _follow(column, size16[here], foretold, row, exponent != 0)


def from_residuals(
    residuals: Array, parts: list[Array], base: Array | None, columns: int, rows: Array, words: Array
) -> None:
    expected = _expected(base, words.size)
    column = np.zeros(columns, np.int32)
    sixteenths = (parts[-1] >> np.uint8(3) & np.uint8(15)).astype(np.int32)
    top = np.empty(words.size, np.uint8)
    for row in range(rows.size):
        here = slice(row * columns, (row + 1) * columns)
        foretold = expected[here] + np.int32(rows[row])
        guess = _guess(foretold, column)
        symbol = residuals[here]
        exponent = symbol + guess - np.uint8(64)
        exponent = np.where(symbol == np.uint8(64) - guess, guess - np.uint8(64), exponent)
        exponent = np.where(symbol == 0, np.uint8(0), exponent)
        top[here] = exponent
        _follow(column, (exponent.astype(np.int32) << 4) + sixteenths[here], foretold, row, exponent != 0)
    merge([*parts, top], words)


def _size16(words: Array) -> Array:
    return (words >> np.uint32(19) & np.uint32(0xFFF)).astype(np.int32)


def _expected(base: Array | None, size: int) -> Array:
    if base is None:
        return np.zeros(size, np.int32)
    return (base >> np.uint32(20) & np.uint32(0x7FF)).astype(np.int32) + np.int32(1016)


def _guess(foretold: Array, column: Array) -> Array:
    return ((foretold << 4) + column + 128 >> 8).astype(np.uint8)


def _follow(column: Array, size16: Array, foretold: Array, row: int, there: Array) -> None:
    gain = np.int32(256 // (min(row, SLOWEST) + 1))
    error = (size16 - foretold << 4) - column
    column += np.where(there, error * gain >> 8, 0).astype(np.int32)


def to_bfloat16(words: Array, out: Array) -> None:
    nearest = words + np.uint32(0x7FFF) + (words >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    nan = words >> np.uint32(16) & np.uint32(0x8000) | np.uint32(0x7FC0)
    out[:] = np.where(_is_nan(words), nan, nearest)


def is_bfloat16_of(words: Array, halves: Array) -> bool:
    if _is_nan(words).any():
        return False
    made = np.empty_like(halves)
    to_bfloat16(words, made)
    return bool(np.array_equal(made, halves))


def _is_nan(words: Array) -> Array:
    found: Array = (words & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return found


def pack2(plane: Array, symbols: Array, out: Array) -> None:
    digit = np.zeros(256, np.uint8)
    digit[symbols] = np.arange(symbols.size)
    digits = np.zeros(2 * out.size, np.uint8)
    digits[: plane.size] = digit[plane]
    out[:] = digits[::2] + digits[1::2] * np.uint8(symbols.size)


def unpack2(packed: Array, symbols: Array, plane: Array) -> None:
    byte = np.arange(256)
    pairs = symbols[np.stack([byte % symbols.size, byte // symbols.size % symbols.size], axis=1)]
    plane[:] = pairs[packed].reshape(-1)[: plane.size]


def gaps(plane: Array, common: int) -> tuple[Array, Array]:
    places = np.flatnonzero(plane != common)
    before = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(before // 255 + 1)
    made = np.full(int(ends[-1]) if ends.size else 0, 255, np.uint8)
    made[ends - 1] = before % 255
    return made, plane[places]


def from_gaps(made: Array, others: Array, common: int, out: Array) -> bool:
    ends = np.flatnonzero(made != 255)
    if ends.size != others.size or (made.size and made[-1] == 255):
        return False
    places = np.cumsum(made, dtype=np.int64)[ends] + np.arange(ends.size)
    if ends.size and places[-1] >= out.size:
        return False
    out[:] = common
    out[places] = others
    return True


def write(out: Array, sizes: Array, worths: Array, looks: Array, done: int, place: int, at: int) -> Progress:
    for i in range(done, sizes.size):
        size = int(sizes[i])
        kind, data = _stream(out[place : place + size], float(worths[i]), bool(looks[i]))
        if kind == FEW:
            return i, place, at, data.size
        out[at : at + data.size] = data
        out[1 + ENTRY * i] = kind
        out[2 + ENTRY * i : 6 + ENTRY * i] = np.frombuffer(data.size.to_bytes(4, "little"), np.uint8)
        place, at = place + size, at + data.size
    return int(sizes.size), place, at, 0


def write_planes(words: Array, out: Array, worth: float, look: bool) -> Progress:
    width, size = words.itemsize, words.size
    at = 1 + ENTRY * width
    split(words, [out[at + i * size : at + (i + 1) * size] for i in range(width)])
    looks = np.array([look] * (width - 1) + [False])
    return write(out, np.full(width, size), np.full(width, worth), looks, 0, at, at)


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
    size, rows, at = words.size, np.empty(words.size // columns, np.int16), 1 + ENTRY * (width + 3)
    sizes = [size] * (width - 1) + [2, rows.size, rows.size, size]
    *stored, least, low, high, residuals = np.split(out[at : at + sum(sizes)], np.cumsum(sizes)[:-1])
    ignored, top = [np.empty(size, np.uint8) for _ in range(4 - width)], np.empty(size, np.uint8)
    _to_residuals(words, base, columns, rows, [*ignored, *stored, top], residuals)
    if survey(top) * size <= survey(residuals) * size + 8 * rows.size:
        return None
    above = (rows - rows.min()).view(np.uint16)
    least[:] = rows.min(keepdims=True).view(np.uint8)
    low[:], high[:] = above.astype(np.uint8), above >> np.uint16(8)
    worths = [worth] * (width - 1) + [worth_of_rows] * 3 + [worth]
    looks = [look] * (width - 1) + [True] * 3 + [False]
    return write(out, np.array(sizes), np.array(worths), np.array(looks), 0, at, at)


def _stream(plane: Array, worth: float, look: bool) -> tuple[int, Array]:
    size = plane.size
    if not size:
        return STORED, plane
    bits = survey(plane) if look else 0.0
    septets = 5 < bits < 7.01 and below128(plane)
    most = int((size - size // 8 if septets else size) * worth)
    if size * bits / 8 + LEAST_CODE < most:
        held = tally(plane)
        kind, data = _last.data
        if held > 1 and size >= LEAST_SPARSE and 8 * held < SPARSE * size and held > WASTE * _entropy(counts()) / 8:
            return FEW, np.frombuffer(data, np.uint8)
        if held < most:
            return kind, np.frombuffer(data, np.uint8)
    if size >= 8 and (septets or (not bits and below128(plane))):
        packed = np.empty(size - size // 8, np.uint8)
        pack7(plane, packed)
        return SEPTETS, packed
    return STORED, plane


def _entropy(counts: Array) -> float:
    """Bits of a whole plane."""
    some = counts[counts > 0]
    return float((some * np.log2(some.sum() / some)).sum())


def read(source: Array, kinds: Array, starts: Array, sizes: Array, places: Array, room: Array) -> int:
    for i, (kind, size) in enumerate(zip(kinds.tolist(), sizes.tolist(), strict=True)):
        start, end, plane = int(starts[i]), int(starts[i + 1]), room[places[i] : places[i] + size]
        if kind == CONSTANT and end - start == 1:
            plane[:] = source[start]
        elif kind == SEPTETS and end - start == size - size // 8:
            unpack7(source[start:end], plane)
        elif kind in (CONSTANT, SEPTETS) or (kind == HUFFMAN and not unpress(source, start, end, plane)):
            return i
        if kind in (CONSTANT, SEPTETS, HUFFMAN):
            kinds[i] = READ
    return int(sizes.size)


def read_planes(source: Array, words: Array) -> bool:
    return False


def read_residuals(source: Array, base: Array | None, columns: int, words: Array) -> bool:
    return False


_last = threading.local()


def tally(plane: Array) -> int:
    _last.plane = plane
    if (plane == plane[0]).all():
        _last.data = CONSTANT, plane[:1].tobytes()
    else:
        _last.data = HUF0, entropy_only(plane)
    return len(_last.data[1])


def counts() -> Array:
    return np.bincount(_last.plane, minlength=256)


def press(plane: Array, out: Array, at: int) -> tuple[int, int]:
    kind, data = _last.data
    out[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return kind, len(data)


def unpress(source: Array, at: int, end: int, out: Array) -> bool:
    """Every bit of a stream is asked what symbol would begin there; then the chain of those that do is followed."""
    read = _read_code(source[at:end])
    if read is None:
        return False
    lengths, at = read[0], at + read[1]
    symbols, steps = _table(lengths)
    ends = at + 4 * STREAMS + np.cumsum(source[at : at + 4 * STREAMS].copy().view("<u4").astype(np.int64))
    if ends[-1] != end:
        return False
    each = -(-out.size // STREAMS)
    start = at + 4 * STREAMS
    for s, stop in enumerate(ends.tolist()):
        wanted = out[min(s * each, out.size) : min((s + 1) * each, out.size)]
        bits = np.unpackbits(source[start:stop], bitorder="little")
        padded = np.concatenate([bits, np.zeros(LONGEST, np.uint8)]).astype(np.uint16)
        window = np.zeros(bits.size, np.uint16)
        for i in range(LONGEST):
            window |= padded[i : i + bits.size] << np.uint16(i)
        jumps = (steps[window] + np.arange(bits.size)).tolist()
        places, place = [], 0
        for _ in range(wanted.size):
            if place >= bits.size:
                return False
            places.append(place)
            place = jumps[place]
        if -(-place // 8) != stop - start:
            return False
        wanted[:] = symbols[window[places]] if places else 0
        start = stop
    return True


def _read_code(source: Array) -> tuple[Array, int] | None:
    """Lengths of the symbols and how many bytes they took; None if this is no complete code."""
    if source.size < 2:
        return None
    first, last = int(source[0]), int(source[1])
    many = (last - first + 2) // 2
    if last <= first or source.size < 2 + many + 4 * STREAMS:
        return None
    nibbles = np.stack([source[2 : 2 + many] & np.uint8(15), source[2 : 2 + many] >> np.uint8(4)], axis=1).reshape(-1)
    lengths = np.zeros(256, np.int64)
    lengths[first : last + 1] = nibbles[: last - first + 1]
    if lengths.max() > LONGEST or (1 << LONGEST >> lengths[lengths > 0]).sum() != 1 << LONGEST:
        return None
    return lengths, 2 + many


def _table(lengths: Array) -> tuple[Array, Array]:
    """For every 11 bits: the symbol that begins in them, and its length."""
    symbols, steps = np.zeros(1 << LONGEST, np.uint8), np.zeros(1 << LONGEST, np.int64)
    code = 0
    for length in range(1, LONGEST + 1):
        for symbol in np.flatnonzero(lengths == length).tolist():
            turned = int(f"{code:0{length}b}"[::-1], 2)
            symbols[turned :: 1 << length] = symbol
            steps[turned :: 1 << length] = length
            code += 1
        code <<= 1
    return symbols, steps
