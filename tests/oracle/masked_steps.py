"""The twin of `masked_steps.c`: steps of 16-bit floats of which few are not zero, class by class.

It goes by docs/delta-codecs.md, "Masked steps": bit by bit, in whole numbers of any size.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ckpt_codecs.base import Array
from oracle.contexts import exponent_buckets

CLASSES, SUM, LOWEST = 16, 2048, 1 << 16
GAP_RATIOS = [969, 3121, 7022, 11818, 16991, 21324, 24310, 27455, 30704, 33994]
GAP_RATIOS += [37259, 40436, 43468, 46307, 48921, 51289, 52774, 54139, 55386, 56519]
GAP_BASES = [*range(20), *(16 + (4 << octave) for octave in range(12))]
GAP_BITS = [0] * 20 + [octave + 2 for octave in range(12)]
SIZE_BASES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
SIZE_BITS = [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 15]
SIZE_WEIGHTS = [
    (1980, 58, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    (1665, 373, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    (1157, 844, 38, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    (782, 788, 467, 3, 1, 1, 1, 1, 1, 1, 1, 1),
    (539, 546, 546, 409, 1, 1, 1, 1, 1, 1, 1, 1),
    (384, 384, 384, 757, 132, 1, 1, 1, 1, 1, 1, 1),
    (273, 273, 273, 541, 546, 136, 1, 1, 1, 1, 1, 1),
    (2037, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    (1930, 108, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    (1361, 547, 118, 14, 1, 1, 1, 1, 1, 1, 1, 1),
    (723, 568, 377, 314, 55, 5, 1, 1, 1, 1, 1, 1),
    (354, 333, 300, 473, 303, 239, 39, 3, 1, 1, 1, 1),
    (171, 169, 164, 311, 277, 437, 272, 210, 33, 2, 1, 1),
    (84, 83, 83, 164, 159, 299, 266, 421, 258, 198, 31, 2),
    (41, 41, 41, 82, 81, 161, 156, 293, 261, 411, 252, 228),
    (20, 20, 20, 40, 40, 81, 80, 159, 154, 290, 257, 887),
]
UNREACHED = 1 << 30


@dataclass(frozen=True)
class Class:
    count: int = 64
    scale: int = 0
    sizes: int = 15

    @property
    def shift(self) -> int:
        return 0 if self.scale < 20 else (self.scale - 20) // 5 + 1

    @property
    def gaps(self) -> int:
        return self.scale - 5 * self.shift


# --- chances


@cache
def weights(ratio: int, *bases: int) -> tuple[int, ...]:
    tails = [1 << 30]
    for _ in range(bases[0], bases[-1]):
        tails.append(tails[-1] * ratio >> 16)
    begins = [tails[base - bases[0]] for base in bases]
    shares = [max((begin - end) >> 19, 1) for begin, end in zip(begins, [*begins[1:], 0], strict=True)]
    shares[shares.index(max(shares))] += SUM - sum(shares)
    return tuple(shares)


def gap_weights(member: int) -> tuple[int, ...]:
    return weights(GAP_RATIOS[member], *GAP_BASES)


def size_weights(member: int) -> tuple[int, ...]:
    return SIZE_WEIGHTS[member]


@cache
def cost(weight: int) -> int:
    scaled, parts = weight << 20, 0
    while scaled < SUM << 20:
        scaled, parts = scaled + (scaled * 178 >> 16), parts + 1
    return parts


def fill_masked_tables(out: Array) -> int:
    data = tables_data()
    if out.size >= len(data):
        out[: len(data)] = np.frombuffer(data, np.uint8)
    return len(data)


@cache
def tables_data() -> bytes:
    tables = [[gap_weights(j) for j in range(20)], [size_weights(j) for j in range(16)]]
    code = np.dtype([("inverse", "<u8"), ("most", "<u4"), ("bias", "<u2"), ("rest", "<u2")])
    slots, codes = [], []
    for rows, width in zip(tables, (32, 16), strict=True):
        for row in rows:
            begin, of_row = 0, np.zeros(width, code)
            for y, weight in enumerate(row):
                slots += [y | (weight - 1) << 8 | place << 20 for place in range(weight)]
                inverse = (1 << 64) - 1 if weight == 1 else ((1 << 64) - 1) // weight + 1
                bias = begin + SUM - 1 if weight == 1 else begin
                of_row[y] = inverse, (weight << 21) - 1, bias, SUM - weight
                begin += weight
            codes.append(of_row.tobytes())
    costs = np.zeros((16, 16), np.uint16)
    costs[:, :12] = [[cost(weight) for weight in row] for row in tables[1]]
    return np.array(slots, np.uint32).tobytes() + b"".join(codes) + costs.tobytes()


# --- writing


class Bits:
    def __init__(self) -> None:
        self.number, self.count = 0, 0

    def put(self, number: int, count: int) -> None:
        self.number |= number << self.count
        self.count += count

    def near(self, number: int, expected: int, low: int) -> None:
        off = 2 * (expected - number) - 1 if number < expected else 2 * (number - expected)
        ones = off >> low
        if ones < 12:
            self.put((1 << ones) - 1, ones + 1)
        else:
            self.put((1 << 12) - 1, 12)
            low = 30
        self.put(off & ((1 << low) - 1), low)


class Coder:
    """Two states and their words, in the order in which they are written."""

    def __init__(self) -> None:
        self.states, self.words = [LOWEST, LOWEST], bytearray()

    def put(self, turn: int, symbol: int, row: tuple[int, ...]) -> None:
        state, weight = self.states[turn], row[symbol]
        if state >= weight << 21:
            self.words += (state & 0xFFFF).to_bytes(2, "little")
            state >>= 16
        self.states[turn] = state // weight * SUM + sum(row[:symbol]) + state % weight


def write_masked_steps(before: Array, after: Array, mantissa: int) -> Array | None:
    changed = before != after
    if not changed.any():
        return np.empty(0, np.uint8)
    if np.count_nonzero(changed) > before.size // 8 + 64:
        return None
    least = choose_least(before, mantissa)
    which = exponent_buckets(before, mantissa, least, CLASSES)
    bits, coder, last, written = Bits(), Coder(), Class(), []
    for c in range(CLASSES):
        places = np.flatnonzero(changed[which == c])
        gaps = (np.diff(places, prepend=-1) - 1).tolist()
        steps = (after - before)[changed & (which == c)].view(np.int16).tolist()
        bits.near(len(gaps), last.count, max(last.count.bit_length() - 2, 0))
        last = replace(last, count=len(gaps))
        if gaps:
            chosen = choose_class(gaps, steps, last.sizes)
            bits.near(chosen.scale, next_scale(last.scale), 1)
            bits.put(*((0, 1) if chosen.sizes == last.sizes else (1 | chosen.sizes << 1, 5)))
            last = chosen
            written.append((chosen, gaps, steps))
    for chosen, gaps, steps in written:
        for gap, step in zip(gaps, steps, strict=True):
            quotient, size = gap >> chosen.shift, abs(step)
            y, z = symbol(quotient, GAP_BASES), symbol(size, SIZE_BASES)
            bits.put(int(step < 0), 1)
            bits.put(size - SIZE_BASES[z], SIZE_BITS[z])
            bits.put(quotient - GAP_BASES[y], GAP_BITS[y])
            bits.put(gap & ((1 << chosen.shift) - 1), chosen.shift)
    for chosen, gaps, steps in reversed(written):
        turns = [i & 1 for i in range(len(gaps))]
        for turn, y, z in reversed(order(turns, gaps, steps, chosen)):
            coder.put(turn, y, gap_weights(chosen.gaps) if z is None else size_weights(chosen.sizes))
    raw = bits.number.to_bytes(max((bits.count + 7) // 8, 8), "little")
    states = b"".join(state.to_bytes(4, "little") for state in coder.states)
    return np.frombuffer(bytes([least]) + raw + bytes(coder.words) + states, np.uint8)


def order(turns: list[int], gaps: list[int], steps: list[int], chosen: Class) -> list[tuple[int, int, int | None]]:
    """The symbols of a class as they are read: of two changes both gaps, then both sizes."""
    symbols: list[tuple[int, int, int | None]] = []
    for i in range(0, len(gaps), 2):
        pair = range(i, min(i + 2, len(gaps)))
        symbols += [(turns[k], symbol(gaps[k] >> chosen.shift, GAP_BASES), None) for k in pair]
        symbols += [(turns[k], symbol(abs(steps[k]), SIZE_BASES), 1) for k in pair]
    return symbols


def symbol(number: int, bases: list[int]) -> int:
    return max(y for y, base in enumerate(bases) if base <= number)


def next_scale(scale: int) -> int:
    return scale + 2 if scale < 9 else scale + 5


def choose_least(words: Array, mantissa: int) -> int:
    stride = max(words.size // 16, 64)
    sample = np.concatenate([words[start : start + 64] for start in range(0, words.size, stride)])
    counts = np.bincount((sample & 0x7FFF) >> mantissa, minlength=256)
    highest, above = 255, 0
    while highest and above + counts[highest] <= sample.size // 200:
        above += counts[highest]
        highest -= 1
    return max(highest - 15, 0)


def choose_class(gaps: list[int], steps: list[int], sizes: int) -> Class:
    shift = max((sum(gaps) // len(gaps)).bit_length() - 3, 0)
    while max(gaps) >> shift >= 16400:
        shift += 1
    quotients = sum(gap >> shift for gap in gaps)
    ratio = (quotients << 16) // (quotients + len(gaps))
    member = min(range(20), key=lambda j: abs(ratio - GAP_RATIOS[j]))
    counts = np.bincount([symbol(abs(step), SIZE_BASES) for step in steps], minlength=12).tolist()
    costs = [sum(count * cost(w) for count, w in zip(counts, size_weights(j), strict=True)) for j in range(16)]
    costs = [one if j == sizes else one + 4 * 256 for j, one in enumerate(costs)]
    return Class(len(gaps), 5 * shift + (max(member, 15) if shift else member), costs.index(min(costs)))


# --- reading


class Damaged(Exception):
    pass


class Reader:
    def __init__(self, data: bytes) -> None:
        self.number, self.at, self.end = int.from_bytes(data[1:], "little"), 0, len(data) - 8
        self.states = [int.from_bytes(data[self.end + 4 * i : self.end + 4 * i + 4], "little") for i in range(2)]
        self.data = data

    def take(self, count: int) -> int:
        number = self.number >> self.at & ((1 << count) - 1)
        self.at += count
        return number

    def near(self, expected: int, low: int) -> int:
        ones = 0
        while ones < 12 and self.take(1):
            ones += 1
        ones, low = (ones, low) if ones < 12 else (0, 30)
        off = ones << low | self.take(low)
        return expected - (off + 1) // 2 if off & 1 else expected + off // 2

    def symbol(self, turn: int, row: tuple[int, ...]) -> int:
        state, y, begin = self.states[turn], 0, 0
        while state % SUM >= begin + row[y]:
            begin, y = begin + row[y], y + 1
        state = row[y] * (state // SUM) + state % SUM - begin
        if state < LOWEST:
            self.end -= 2
            if self.end < 1:
                raise Damaged
            state = state << 16 | int.from_bytes(self.data[self.end : self.end + 2], "little")
        self.states[turn] = state
        return y


def list_masked_steps(data: Array, before: Array, mantissa: int) -> tuple[Array, Array] | None:
    try:
        changes = read(data.tobytes(), before, mantissa)
    except Damaged:
        return None
    places = np.array(sorted(changes), np.int64)
    return places, np.array([changes[place] for place in places.tolist()], np.uint16)


def read_masked_steps(data: Array, before: Array, mantissa: int, out: Array) -> bool:
    changes = list_masked_steps(data, before, mantissa)
    if changes is not None:
        out[:] = before
        out[changes[0]] = changes[1]
    return changes is not None


def read(data: bytes, before: Array, mantissa: int) -> dict[int, int]:
    """The words after the step, by their places."""
    if len(data) < 9:
        raise Damaged
    which, reader, classes = exponent_buckets(before, mantissa, data[0], CLASSES), Reader(data), []
    last = Class()
    for _ in range(CLASSES):
        last = replace(last, count=reader.near(last.count, max(last.count.bit_length() - 2, 0)))
        if last.count < 0 or sum(one.count for one in classes) + last.count > before.size:
            raise Damaged
        if last.count:
            scale = reader.near(next_scale(last.scale), 1)
            if not 0 <= scale <= 119:
                raise Damaged
            last = replace(last, scale=scale)
            last = replace(last, sizes=reader.take(4)) if reader.take(1) else last
        classes.append(last)
    if not any(one.count for one in classes):
        raise Damaged
    changes: dict[int, int] = {}
    for c, one in enumerate(classes):
        members, ordinal = np.flatnonzero(which == c), -1
        for i in range(0, one.count, 2):
            pair = range(i, min(i + 2, one.count))
            gaps = [reader.symbol(k & 1, gap_weights(one.gaps)) for k in pair]
            sizes = [reader.symbol(k & 1, size_weights(one.sizes)) for k in pair]
            for y, z in zip(gaps, sizes, strict=True):
                down, size = reader.take(1), SIZE_BASES[z] + reader.take(SIZE_BITS[z])
                gap = (GAP_BASES[y] + reader.take(GAP_BITS[y])) << one.shift
                ordinal += 1 + (gap | reader.take(one.shift))
                if ordinal < members.size:
                    place = int(members[ordinal])
                    changes[place] = int(before[place]) + (-size if down else size) & 0xFFFF
        if ordinal >= members.size:
            raise Damaged
    used = max((reader.at + 7) // 8, 8)
    if reader.states != [LOWEST, LOWEST] or used != reader.end - 1 or any(data[1 : 1 + used][reader.at // 8 + 1 :]):
        raise Damaged
    if reader.number >> reader.at & ((1 << -reader.at % 8) - 1):
        raise Damaged
    return changes
