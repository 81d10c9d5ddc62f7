"""Adaptive binary arithmetic coding in Python: bit by bit what the kernels do."""

from ckpt_codecs.base import Array

WORD, HALF, LEAST, SLOWEST = (1 << 32) - 1, 1 << 15, 32, 255
FLAGS, VALUES, VALUE_MODELS, GAPS, MODELS = 0, 16, 40, 656, 817
DENSE, TOLD, EVEN = 255, 2, MODELS - 1


class _Models:
    """Chances of a bit to be set, in 65536ths, and how many bits taught them."""

    def __init__(self) -> None:
        self.chance = [HALF] * MODELS
        self.seen = [0] * MODELS
        self.low, self.high = 0, WORD

    def middle(self, model: int) -> int:
        return self.low + (self.high - self.low) * self.chance[model] // 65536

    def narrow(self, model: int, middle: int, bit: bool) -> None:
        if bit:
            self.high = middle
        else:
            self.low = middle + 1
        if model == EVEN:
            return
        seen, way = self.seen[model], (65535 if bit else 0) - self.chance[model]
        step = abs(way) * 2 // (2 * seen + 3)
        self.chance[model] = min(max(self.chance[model] + (step if way > 0 else -step), LEAST), 65536 - LEAST)
        self.seen[model] = min(seen + 1, SLOWEST)

    def widen(self) -> None:
        self.low = self.low << 8 & WORD
        self.high = self.high << 8 & WORD | 255

    @property
    def settled(self) -> bool:
        return (self.low ^ self.high) >> 24 == 0


class _Writer(_Models):
    def __init__(self) -> None:
        super().__init__()
        self.out = bytearray()

    def bit(self, model: int, bit: bool) -> None:
        self.narrow(model, self.middle(model), bit)
        while self.settled:
            self.out.append(self.high >> 24)
            self.widen()

    def number(self, base: int, most: int, number: int) -> None:
        size = number.bit_length()
        for i in range(1, min(size, most)):
            self.bit(base + i - 1, True)
        if size < most:
            self.bit(base + size - 1, False)
        prefix = 1
        for i in range(size - 2, -1, -1):
            bit, told = number >> i & 1, size - 2 - i < TOLD
            self.bit(base + most + 4 * (size - 1) + prefix if told else EVEN, bit == 1)
            prefix = 2 * prefix + bit if told else prefix

    def gap(self, gap: int, shift: int) -> None:
        self.number(GAPS, 32, (gap >> shift) + 1)
        for i in range(shift - 1, -1, -1):
            self.bit(EVEN, gap >> i & 1 == 1)


class _Reader(_Models):
    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data, self.at = data, 4
        self.word = int.from_bytes(data[:4].ljust(4, b"\0"), "big")

    def bit(self, model: int) -> bool:
        middle = self.middle(model)
        bit = self.word <= middle
        self.narrow(model, middle, bit)
        while self.settled:
            self.widen()
            self.word = self.word << 8 & WORD | (self.data[self.at] if self.at < len(self.data) else 0)
            self.at += 1
        return bit

    def number(self, base: int, most: int) -> int:
        size = 1
        while size < most and self.bit(base + size - 1):
            size += 1
        number, prefix = 1, 1
        for i in range(size - 2, -1, -1):
            told = size - 2 - i < TOLD
            bit = int(self.bit(base + most + 4 * (size - 1) + prefix if told else EVEN))
            number = 2 * number + bit
            prefix = 2 * prefix + bit if told else prefix
        return number


def write_seldom(plane: Array, counts: Array, kinds: Array, out: Array) -> int:
    made, at = _Writer(), 0
    for c, (count, shift) in enumerate(zip(counts.tolist(), kinds.tolist(), strict=True)):
        gap = 0
        for value in plane[at : at + count].tolist():
            if shift == DENSE:
                made.bit(FLAGS + c, value != 0)
            elif value == 0:
                gap += 1
            else:
                made.gap(gap, shift)
                gap = 0
            if value:
                made.number(VALUES + VALUE_MODELS * c, 8, value)
        if shift != DENSE:
            made.gap(gap, shift)
        at += count
    data = bytes(made.out) + made.high.to_bytes(4, "big")
    if len(data) > out.size:
        return 0
    out[: len(data)] = bytearray(data)
    return len(data)


def read_seldom(data: Array, counts: Array, kinds: Array, plane: Array) -> bool:
    held, at = _Reader(data.tobytes()), 0
    plane[:] = 0
    for c, (count, shift) in enumerate(zip(counts.tolist(), kinds.tolist(), strict=True)):
        values, end = VALUES + VALUE_MODELS * c, at + count
        while True:
            if shift == DENSE:
                if at == end:
                    break
                if not held.bit(FLAGS + c):
                    at += 1
                    continue
            else:
                gap = held.number(GAPS, 32) - 1
                if gap > end - at:
                    return False
                for _ in range(shift):
                    gap = 2 * gap + int(held.bit(EVEN))
                at += gap
                if at >= end:
                    break
            plane[at] = held.number(values, 8)
            at += 1
        if at != end:
            return False
    return held.at == len(data)
