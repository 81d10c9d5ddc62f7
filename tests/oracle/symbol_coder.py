"""The coder of symbols: the same bytes as symbol_coder.c, decision by decision, as docs/lossy-codecs.md says it."""

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from ckpt_formats.core.tensor import Array

GROUP = 8
"""Neighbours in a row that one decision can say to be zero."""
CONTEXTS = 20
MOST_UNARY = 14
"""Magnitudes up to this have a decision for each unit; of larger ones the rest is an Exp-Golomb code."""
MOST_REST_BITS = 30
ANY, SOME, MORE = 0, CONTEXTS, 2 * CONTEXTS
"""Where the probabilities begin: is there any in the group, is this one not zero, is it more."""
PROBABILITIES = 2 * CONTEXTS + CONTEXTS * MOST_UNARY
HALF, LEAST = 1 << 14, 32
QUICK, SLOW = 4, 7
AVERAGED_MOST, AVERAGE_BITS = 8, 12
LOWEST_STATE = 1 << 16
STEPS = (40, 64, 104, 160, 256, 408, 648, 1024, 1624, 2584, 4096, 6504, 10320, 16384, 22000, 30000, 38000, 46000, 56000)
"""Sums of two averages from which the next context begins."""


def context_of(total: int) -> int:
    """The context of the sum of two averages, rounded down to a multiple of 8."""
    return bisect_right(STEPS, total // 8 * 8)


class _Model:
    """Probabilities, and averages of the magnitudes in each column and lately."""

    def __init__(self, columns: int) -> None:
        self._quick, self._slow = [HALF] * PROBABILITIES, [HALF] * PROBABILITIES
        self._column, self._row = [0] * columns, 0

    def chance(self, i: int) -> int:
        """The probability of a 0, in 2^15 parts."""
        return min(max((self._quick[i] + self._slow[i]) >> 1, LEAST), 2 * HALF - LEAST)

    def learn(self, i: int, bit: int) -> None:
        quick, slow = self._quick[i], self._slow[i]
        if bit:
            self._quick[i], self._slow[i] = quick - (quick >> QUICK), slow - (slow >> SLOW)
        else:
            self._quick[i] = quick + ((2 * HALF - quick) >> QUICK)
            self._slow[i] = slow + ((2 * HALF - slow) >> SLOW)

    def of_group(self, left: int, right: int) -> int:
        return ANY + context_of((sum(self._column[left:right]) >> 3) + self._row)

    def of_column(self, j: int) -> int:
        return context_of(self._column[j] + self._row)

    def learn_magnitude(self, j: int, high: int) -> None:
        now = min(high, AVERAGED_MOST) << AVERAGE_BITS
        self._column[j] += (now - self._column[j]) >> 4
        self._row += (now - self._row) >> 4

    def learn_zeros(self, left: int, right: int) -> None:
        for j in range(left, right):
            self._column[j] -= (self._column[j] + 15) >> 4
        self._row -= (self._row * 103) >> 8


def _groups(size: int, columns: int) -> Iterator[tuple[int, int, int]]:
    """Of each group where its row starts, and its first and its end column."""
    for start in range(0, size, columns):
        width = min(columns, size - start)
        for left in range(0, width, GROUP):
            yield start, left, min(left + GROUP, width)


def model_symbols(symbols: Array, columns: int, shift: int, decisions: Array) -> int:
    model, values, chances = _Model(columns), symbols.tolist(), []

    def decide(i: int, bit: int) -> None:
        chances.append(model.chance(i) | bit << 15)
        model.learn(i, bit)

    def add_bits(value: int, bits: int) -> None:
        chances.extend(HALF | ((value >> b) & 1) << 15 for b in range(bits - 1, -1, -1))

    def add_symbol(j: int, symbol: int) -> None:
        context, high = model.of_column(j), abs(symbol) >> shift
        decide(SOME + context, int(high > 0))
        for k in range(1, min(high, MOST_UNARY) + 1):
            decide(MORE + context * MOST_UNARY + k - 1, int(high > k))
        if high > MOST_UNARY:
            bits = (high - MOST_UNARY).bit_length() - 1
            add_bits((1 << bits) - 1, bits)
            add_bits(0, 1)
            add_bits(high - MOST_UNARY, bits)
        add_bits(abs(symbol), shift)
        if symbol:
            add_bits(int(symbol < 0), 1)
        model.learn_magnitude(j, high)

    for start, left, right in _groups(len(values), columns):
        some = any(abs(symbol) >> shift for symbol in values[start + left : start + right])
        if right - left > 1:
            decide(model.of_group(left, right), int(some))
        if not some and right - left > 1 and not shift:
            model.learn_zeros(left, right)
            continue
        for j in range(left, right):
            add_symbol(j, values[start + j])
    decisions[: len(chances)] = chances
    return len(chances)


def code_decisions(decisions: Array, count: int, out: Array) -> int:
    state, words = LOWEST_STATE, []
    for decision in decisions[:count][::-1].tolist():
        chance, bit = decision & 32767, decision >> 15
        share = 32768 - chance if bit else chance
        if state >= share << 17:
            words.append(state & 65535)
            state >>= 16
        state = (state // share << 15) + state % share + (chance if bit else 0)
    data = state.to_bytes(4, "little") + b"".join(word.to_bytes(2, "little") for word in reversed(words))
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
        if self._state < LOWEST_STATE:
            word = self._data[self._at : self._at + 2]
            self._state = self._state << 16 | (int.from_bytes(word, "little") if len(word) == 2 else 0)
            self._at += 2
        return bit

    def take_bits(self, bits: int) -> int:
        value = 0
        for _ in range(bits):
            value = value << 1 | self.take(HALF)
        return value

    @property
    def is_past_its_end(self) -> bool:
        return self._at > len(self._data)

    @property
    def is_at_its_end(self) -> bool:
        return self._at == len(self._data) and self._state == LOWEST_STATE


def decode_symbols(code: Array, columns: int, shift: int, symbols: Array) -> bool:
    if code.size < 4:
        return False
    model, source = _Model(columns), _Source(code.tobytes())

    def decide(i: int) -> int:
        bit = source.take(model.chance(i))
        model.learn(i, bit)
        return bit

    def read_symbol(j: int) -> int | None:
        context = model.of_column(j)
        high = more = decide(SOME + context)
        while more and high <= MOST_UNARY:
            more = decide(MORE + context * MOST_UNARY + high - 1)
            high += more
        if high > MOST_UNARY:
            bits = 0
            while source.take(HALF):
                bits += 1
                if bits > MOST_REST_BITS:
                    return None
            high = MOST_UNARY + (1 << bits | source.take_bits(bits))
        magnitude = high << shift | source.take_bits(shift)
        model.learn_magnitude(j, high)
        if magnitude >= 1 << 31:
            return None
        return -magnitude if magnitude and source.take(HALF) else magnitude

    for start, left, right in _groups(symbols.size, columns):
        if left == 0 and source.is_past_its_end:
            return False
        if right - left > 1 and not decide(model.of_group(left, right)) and not shift:
            model.learn_zeros(left, right)
            symbols[start + left : start + right] = 0
            continue
        for j in range(left, right):
            symbol = read_symbol(j)
            if symbol is None:
                return False
            symbols[start + j] = symbol
    return source.is_at_its_end
