"""The twin of `sparse_plane.c`: planes that are mostly zero, as version 0.3.0 wrote them."""

from ckpt_codecs.base import Array

WORD, HALF, LEAST, SLOWEST = (1 << 32) - 1, 1 << 15, 32, 255
FLAGS, VALUES, VALUE_MODELS, GAPS, MODELS = 0, 16, 40, 656, 817
DENSE, TOLD, EVEN = 255, 2, MODELS - 1


class Reader:
    def __init__(self, data: bytes) -> None:
        self.chance = [HALF] * MODELS
        """Of a bit to be set, in 65536ths."""
        self.seen = [0] * MODELS
        self.low, self.high = 0, WORD
        self.data, self.at = data, 4
        self.word = int.from_bytes(data[:4].ljust(4, b"\0"), "big")

    def learn(self, model: int, bit: bool) -> None:
        if model == EVEN:
            return
        seen, way = self.seen[model], (65535 if bit else 0) - self.chance[model]
        step = abs(way) * 2 // (2 * seen + 3)
        self.chance[model] = min(max(self.chance[model] + (step if way > 0 else -step), LEAST), 65536 - LEAST)
        self.seen[model] = min(seen + 1, SLOWEST)

    def bit(self, model: int) -> bool:
        middle = self.low + (self.high - self.low) * self.chance[model] // 65536
        bit = self.word <= middle
        self.low, self.high = (self.low, middle) if bit else (middle + 1, self.high)
        self.learn(model, bit)
        while (self.low ^ self.high) >> 24 == 0:
            self.low, self.high = self.low << 8 & WORD, self.high << 8 & WORD | 255
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


def read_sparse_plane(data: Array, counts: Array, shifts: Array, plane: Array) -> bool:
    reader = Reader(data.tobytes())
    return read_values(reader, counts, shifts, plane) and reader.at == data.size


def read_values(reader: Reader, counts: Array, shifts: Array, plane: Array) -> bool:
    """Fill the plane; False if a gap goes past the end of its context."""
    plane[:], at = 0, 0
    for c, (count, shift) in enumerate(zip(counts.tolist(), shifts.tolist(), strict=True)):
        values, end = VALUES + VALUE_MODELS * c, at + count
        while True:
            if shift == DENSE:
                if at == end:
                    break
                if not reader.bit(FLAGS + c):
                    at += 1
                    continue
            else:
                gap = reader.number(GAPS, 32) - 1
                if gap > end - at:
                    return False
                for _ in range(shift):
                    gap = 2 * gap + int(reader.bit(EVEN))
                at += gap
                if at >= end:
                    break
            plane[at] = reader.number(values, 8)
            at += 1
        if at != end:
            return False
    return True
