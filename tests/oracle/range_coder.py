"""The twin of `range_coder.c`: an adaptive binary range coder."""

CHANCE_BITS, RATE_BITS = 22, 20
LEAST, MOST, SLOWEST = 1 << 8, (1 << CHANCE_BITS) - (1 << 8), 4095
MODELED_BITS, MODELS_PER_BIT = 2, 5
WHOLE = (1 << 64) - 1
ONES = (1 << 32) - 1


class _Models:
    """Chances of a bit to be set, and how many bits taught them; the size of the interval."""

    def __init__(self, models: int) -> None:
        self.chance = [1 << (CHANCE_BITS - 1)] * models
        self.seen = [0] * models
        self.size = WHOLE

    def bound(self, model: int) -> int:
        return (self.size >> CHANCE_BITS) * self.chance[model]

    def learn(self, model: int, bit: bool) -> None:
        chance, seen = self.chance[model], self.seen[model]
        rate = (2 << RATE_BITS) // (2 * seen + 3)
        if bit:
            chance = min(chance + (((1 << CHANCE_BITS) - chance) * rate >> RATE_BITS), MOST)
        else:
            chance = max(chance - (chance * rate >> RATE_BITS), LEAST)
        self.chance[model], self.seen[model] = chance, min(seen + 1, SLOWEST)


class Writer(_Models):
    def __init__(self, models: int) -> None:
        super().__init__(models)
        self.low, self.out = 0, bytearray()

    def _take(self, by: int, size: int) -> None:
        """The interval of this size that begins so much higher."""
        self.low, self.size = self.low + by, size
        if self.low > WHOLE:
            self._carry()
        if size <= ONES:
            self.out += (self.low >> 32).to_bytes(4, "big")
            self.low, self.size = (self.low & ONES) << 32, size << 32

    def _carry(self) -> None:
        self.low &= WHOLE
        at = len(self.out) - 1
        while self.out[at] == 255:
            self.out[at] = 0
            at -= 1
        self.out[at] += 1

    def bit(self, model: int, bit: bool) -> None:
        bound = self.bound(model)
        self._take(0 if bit else bound, bound if bit else self.size - bound)
        self.learn(model, bit)

    def even(self, number: int, many: int) -> None:
        size = self.size >> many
        self._take(size * number, size)

    def number(self, base: int, most: int, number: int) -> None:
        size = number.bit_length()
        for i in range(1, size):
            self.bit(base + i - 1, True)
        if size < most:
            self.bit(base + size - 1, False)
        left, prefix = size - 1, 1
        while left > 0 and size - 1 - left < MODELED_BITS:
            left -= 1
            bit = number >> left & 1
            self.bit(base + most + 4 * (size - 1) + prefix, bit == 1)
            prefix = 2 * prefix + bit
        if left > 0:
            self.even(number & ((1 << left) - 1), left)

    def done(self) -> bytes:
        """As few bytes as tell the interval from its neighbours."""
        last = self.low + self.size - 1
        if last > WHOLE:
            self.low = last
            self._carry()
            return bytes(self.out)
        drop = 56
        while drop and last >> drop << drop < self.low:
            drop -= 8
        return bytes(self.out) + (last >> drop << drop).to_bytes(8, "big").rstrip(b"\0")


class Reader(_Models):
    """Past the end of the data, zeros."""

    def __init__(self, models: int, data: bytes) -> None:
        super().__init__(models)
        self.data, self.at = data, 8
        self.code = int.from_bytes(data[:8].ljust(8, b"\0"), "big")

    def _take(self, by: int, size: int) -> None:
        self.code, self.size = self.code - by, size
        if size <= ONES:
            more = int.from_bytes(self.data[self.at : self.at + 4].ljust(4, b"\0"), "big")
            self.code, self.size, self.at = (self.code << 32 | more) & WHOLE, size << 32, self.at + 4

    def bit(self, model: int) -> bool:
        bound = self.bound(model)
        bit = self.code < bound
        self.learn(model, bit)
        self._take(0 if bit else bound, bound if bit else self.size - bound)
        return bit

    def even(self, many: int) -> int:
        size = self.size >> many
        number = min(self.code // size, (1 << many) - 1)
        self._take(number * size, size)
        return number

    def number(self, base: int, most: int) -> int:
        size = 1
        while size < most and self.bit(base + size - 1):
            size += 1
        number, left, prefix = 1, size - 1, 1
        while left > 0 and size - 1 - left < MODELED_BITS:
            left -= 1
            bit = int(self.bit(base + most + 4 * (size - 1) + prefix))
            number, prefix = 2 * number + bit, 2 * prefix + bit
        return number << left | self.even(left) if left > 0 else number

    @property
    def all_read(self) -> bool:
        return self.at >= len(self.data)
