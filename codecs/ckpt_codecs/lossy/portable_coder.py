"""The coder of symbols without Numba: the same bytes as `kernels_coder`, slowly."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.lossy.model import (
    FAST,
    GROUP,
    HALF,
    LEAST,
    LONGEST,
    LOWEST,
    MORE,
    MOST_SEEN,
    PROBABILITIES,
    SEEN,
    SLOW,
    UNARY,
    ZERO,
)


class _Beliefs:
    """Probabilities, and what was seen in each column and lately."""

    def __init__(self, columns: int, table: Array) -> None:
        self._fast, self._slow = [HALF] * PROBABILITIES, [HALF] * PROBABILITIES
        self._column, self._row, self._table = [0] * columns, 0, table.tolist()

    def chance(self, i: int) -> int:
        """The probability of a 0, in 2^15 parts."""
        return min(max((self._fast[i] + self._slow[i]) >> 1, LEAST), 2 * HALF - LEAST)

    def learn(self, i: int, bit: int) -> None:
        fast, slow = self._fast[i], self._slow[i]
        if bit:
            self._fast[i], self._slow[i] = fast - (fast >> FAST), slow - (slow >> SLOW)
        else:
            self._fast[i] = fast + ((2 * HALF - fast) >> FAST)
            self._slow[i] = slow + ((2 * HALF - slow) >> SLOW)

    def of_group(self, left: int, right: int) -> int:
        return int(self._table[((sum(self._column[left:right]) >> 3) + self._row) >> 3])

    def of_column(self, j: int) -> int:
        return int(self._table[(self._column[j] + self._row) >> 3])

    def saw(self, j: int, high: int) -> None:
        found = min(high, MOST_SEEN) << SEEN
        self._column[j] += (found - self._column[j]) >> 4
        self._row += (found - self._row) >> 4

    def saw_none(self, left: int, right: int) -> None:
        for j in range(left, right):
            self._column[j] -= (self._column[j] + 15) >> 4
        self._row -= (self._row * 103) >> 8


def note(symbols: Array, columns: int, shift: int, table: Array, records: Array) -> int:
    known, values, made = _Beliefs(columns, table), symbols.tolist(), []

    def decide(i: int, bit: int) -> None:
        made.append(known.chance(i) | bit << 15)
        known.learn(i, bit)

    def raw(value: int, bits: int) -> None:
        made.extend(HALF | ((value >> b) & 1) << 15 for b in range(bits - 1, -1, -1))

    def one(j: int, symbol: int) -> None:
        c, high = known.of_column(j), abs(symbol) >> shift
        decide(ZERO + c, int(high > 0))
        for k in range(1, min(high, UNARY) + 1):
            decide(MORE + c * UNARY + k - 1, int(high > k))
        if high > UNARY:
            bits = (high - UNARY).bit_length() - 1
            raw((1 << bits) - 1, bits)
            raw(0, 1)
            raw(high - UNARY, bits)
        raw(abs(symbol), shift)
        if symbol:
            raw(int(symbol < 0), 1)
        known.saw(j, high)

    for start in range(0, len(values), columns):
        for left in range(0, min(columns, len(values) - start), GROUP):
            right = min(left + GROUP, columns, len(values) - start)
            some = any(abs(symbol) >> shift for symbol in values[start + left : start + right])
            if right - left > 1:
                decide(known.of_group(left, right), int(some))
            if not some and right - left > 1 and not shift:
                known.saw_none(left, right)
                continue
            for j in range(left, right):
                one(j, values[start + j])
    if len(made) > records.size:
        return -1
    records[: len(made)] = made
    return len(made)


def write(records: Array, many: int, out: Array) -> int:
    state, words = LOWEST, []
    for record in records[:many][::-1].tolist():
        chance, bit = record & 32767, record >> 15
        share = 32768 - chance if bit else chance
        if state >= share << 17:
            words.append(state & 65535)
            state >>= 16
        state = (state // share << 15) + state % share + (chance if bit else 0)
    data = state.to_bytes(4, "little") + b"".join(word.to_bytes(2, "little") for word in reversed(words))
    if len(data) > out.size:
        return -1
    out[out.size - len(data) :] = np.frombuffer(data, np.uint8)
    return int(out.size - len(data))


class _Source:
    """The decisions of a code, one after another."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at, self._state = data, 4, int.from_bytes(data[:4], "little")

    def take(self, chance: int) -> int:
        low, rest = self._state & 32767, self._state >> 15
        bit = int(low >= chance)
        self._state = (32768 - chance) * rest + low - chance if bit else chance * rest + low
        if self._state < LOWEST:
            word = self._data[self._at : self._at + 2]
            self._state = self._state << 16 | (int.from_bytes(word, "little") if len(word) == 2 else 0)
            self._at += 2
        return bit

    def raw(self, bits: int) -> int:
        value = 0
        for _ in range(bits):
            value = value << 1 | self.take(HALF)
        return value

    @property
    def is_past_its_end(self) -> bool:
        return self._at > len(self._data)

    @property
    def is_at_its_end(self) -> bool:
        return self._at == len(self._data) and self._state == LOWEST


def read(data: Array, columns: int, shift: int, table: Array, symbols: Array) -> bool:
    if data.size < 4:
        return False
    known, source = _Beliefs(columns, table), _Source(data.tobytes())

    def decide(i: int) -> int:
        bit = source.take(known.chance(i))
        known.learn(i, bit)
        return bit

    def one(j: int) -> int | None:
        c = known.of_column(j)
        high = more = decide(ZERO + c)
        while more and high <= UNARY:
            more = decide(MORE + c * UNARY + high - 1)
            high += more
        if high > UNARY:
            bits = 0
            while source.take(HALF):
                bits += 1
                if bits > LONGEST:
                    return None
            high = UNARY + (1 << bits | source.raw(bits))
        magnitude = high << shift | source.raw(shift)
        known.saw(j, high)
        if magnitude >= 1 << 31:
            return None
        return -magnitude if magnitude and source.take(HALF) else magnitude

    for start in range(0, symbols.size, columns):
        if source.is_past_its_end:
            return False
        for left in range(0, min(columns, symbols.size - start), GROUP):
            right = min(left + GROUP, columns, symbols.size - start)
            if right - left > 1 and not decide(known.of_group(left, right)) and not shift:
                known.saw_none(left, right)
                symbols[start + left : start + right] = 0
                continue
            for j in range(left, right):
                symbol = one(j)
                if symbol is None:
                    return False
                symbols[start + j] = symbol
    return source.is_at_its_end
