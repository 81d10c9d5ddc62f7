"""The twin of `huffman.c`: Huffman codes of at most 11 bits over a plane, as eight bit streams."""

import heapq
from dataclasses import dataclass

import numpy as np

from ckpt_codecs.base import Array

STREAMS = 8
MAX_LENGTH = 11
TABLE_SIZE = 1 << MAX_LENGTH


@dataclass(frozen=True)
class Code:
    """The code of a plane."""

    lengths: Array
    """(256,) int64, in bits; 0: the symbol does not occur, or it is the only one."""
    counts: Array
    """(8, 256) int64: how often each symbol occurs in each stream."""

    @property
    def used(self) -> int:
        return int(np.count_nonzero(self.counts.sum(axis=0)))

    @property
    def size(self) -> int:
        """Bytes of the plane in this code."""
        symbols = np.flatnonzero(self.lengths)
        return 2 + (int(symbols[-1] - symbols[0]) + 2) // 2 + 4 * STREAMS + int(self.stream_sizes.sum())

    @property
    def stream_sizes(self) -> Array:
        sizes: Array = (self.counts @ self.lengths + 7) >> 3
        return sizes


def parts_of(plane: Array) -> list[Array]:
    """What each bit stream holds."""
    share = -(-plane.size // STREAMS)
    return [plane[s * share : (s + 1) * share] for s in range(STREAMS)]


def code_of(plane: Array, well: bool = False) -> Code:
    """`well`: with the lengths of `_well_limited`."""
    counts = np.stack([np.bincount(part, minlength=256) for part in parts_of(plane)])
    totals = counts.sum(axis=0)
    symbols = np.flatnonzero(totals)
    symbols = symbols[np.argsort(totals[symbols], kind="stable")]
    lengths = np.zeros(256, np.int64)
    if symbols.size > 1:
        depths, weights = _depths(totals[symbols].tolist()), totals[symbols].tolist()
        lengths[symbols] = _well_limited(depths, weights) if well else _limited(depths)
    return Code(lengths, counts)


def _depths(weights: list[int]) -> list[int]:
    """The lengths of an optimal code for ascending weights, in descending order.

    Of equal weights leaves are joined before roots, and older roots before younger ones: then the longest code is as
    short as it can be, and lengths do not depend on how the tree is built.
    """
    heap = [(weight, i, [i]) for i, weight in enumerate(weights)]
    depths = [0] * len(weights)
    for number in range(len(weights), 2 * len(weights) - 1):
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        leaves = first[2] + second[2]
        for leaf in leaves:
            depths[leaf] += 1
        heapq.heappush(heap, (first[0] + second[0], number, leaves))
    return sorted(depths, reverse=True)


def _limited(lengths: list[int]) -> list[int]:
    """Lengths of at most 11 bits: the rarest pay for it, the most frequent get what is left over."""
    lengths = [min(length, MAX_LENGTH) for length in lengths]
    taken = sum(TABLE_SIZE >> length for length in lengths)
    rarest = 0
    while taken > TABLE_SIZE:
        while lengths[rarest] == MAX_LENGTH:
            rarest += 1
        lengths[rarest] += 1
        taken -= TABLE_SIZE >> lengths[rarest]
    while taken < TABLE_SIZE:
        fitting = (i for i, n in enumerate(lengths) if n > 1 and taken + (TABLE_SIZE >> n) <= TABLE_SIZE)
        most_frequent = max(fitting)
        taken += TABLE_SIZE >> lengths[most_frequent]
        lengths[most_frequent] -= 1
    return lengths


def _well_limited(lengths: list[int], weights: list[int]) -> list[int]:
    """The same: those pay whose bits cost the least for the room, and those get what is left that save the most."""
    lengths = [min(length, MAX_LENGTH) for length in lengths]
    taken = sum(TABLE_SIZE >> length for length in lengths)
    while taken > TABLE_SIZE:
        payers = (i for i, n in enumerate(lengths) if n < MAX_LENGTH)
        payer = min(payers, key=lambda i: (weights[i] << lengths[i], -i))
        lengths[payer] += 1
        taken -= TABLE_SIZE >> lengths[payer]
    while taken < TABLE_SIZE:
        fitting = (i for i, n in enumerate(lengths) if taken + (TABLE_SIZE >> n) <= TABLE_SIZE)
        heir = max(fitting, key=lambda i: (weights[i] << lengths[i], i))
        taken += TABLE_SIZE >> lengths[heir]
        lengths[heir] -= 1
    return lengths


def canonical(lengths: Array) -> dict[int, str]:
    """The code of each symbol, as the digits 0 and 1, the first one first."""
    codes, code = {}, 0
    for length in range(1, MAX_LENGTH + 1):
        for symbol in np.flatnonzero(lengths == length).tolist():
            codes[symbol] = f"{code:0{length}b}"
            code += 1
        code <<= 1
    return codes


def write_huffman(plane: Array, code: Code) -> bytes:
    codes = canonical(code.lengths)
    first, last = min(codes), max(codes)
    lengths = code.lengths[first : last + 1].astype(np.uint8)
    lengths = np.append(lengths, np.zeros(lengths.size % 2, np.uint8))
    head = bytes([first, last]) + (lengths[::2] | lengths[1::2] << np.uint8(4)).tobytes()
    streams = [_write_stream(part, code.lengths, codes) for part in parts_of(plane)]
    sizes = np.array([len(stream) for stream in streams], "<u4")
    return head + sizes.tobytes() + b"".join(streams)


def _write_stream(symbols: Array, lengths: Array, codes: dict[int, str]) -> bytes:
    """The bits of each code go to their places, one position of all codes at a time."""
    digits = np.zeros((256, MAX_LENGTH), np.uint8)
    for symbol, code in codes.items():
        digits[symbol, : len(code)] = np.frombuffer(code.encode(), np.uint8) - ord("0")
    length = lengths[symbols]
    ends = np.cumsum(length)
    bits = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
    for i in range(MAX_LENGTH):
        has = length > i
        bits[(ends - length + i)[has]] = digits[symbols, i][has]
    return np.packbits(bits, bitorder="little").tobytes()


def read_huffman(source: Array, plane: Array) -> bool:
    """Every bit of a stream is asked what symbol would begin there; then the chain of those that do is followed."""
    code = _read_lengths(source)
    if code is None:
        return False
    lengths, at = code
    symbols, steps = _table(lengths)
    ends = at + 4 * STREAMS + np.cumsum(source[at : at + 4 * STREAMS].copy().view("<u4").astype(np.int64))
    if ends[-1] != source.size:
        return False
    begin = at + 4 * STREAMS
    for part, end in zip(parts_of(plane), ends.tolist(), strict=True):
        bits = np.unpackbits(source[begin:end], bitorder="little")
        padded = np.concatenate([bits, np.zeros(MAX_LENGTH, np.uint8)]).astype(np.uint16)
        window = np.zeros(bits.size, np.uint16)
        for i in range(MAX_LENGTH):
            window |= padded[i : i + bits.size] << np.uint16(i)
        jumps = (steps[window] + np.arange(bits.size)).tolist()
        places, place = [], 0
        for _ in range(part.size):
            if place >= bits.size:
                return False
            places.append(place)
            place = jumps[place]
        if -(-place // 8) != end - begin:
            return False
        part[:] = symbols[window[places]] if places else 0
        begin = end
    return True


def _read_lengths(source: Array) -> tuple[Array, int] | None:
    """Lengths of the symbols and how many bytes they took; None if this is no complete code."""
    if source.size < 2:
        return None
    first, last = int(source[0]), int(source[1])
    size = (last - first + 2) // 2
    if last <= first or source.size < 2 + size + 4 * STREAMS:
        return None
    nibbles = np.stack([source[2 : 2 + size] & np.uint8(15), source[2 : 2 + size] >> np.uint8(4)], axis=1).reshape(-1)
    lengths = np.zeros(256, np.int64)
    lengths[first : last + 1] = nibbles[: last - first + 1]
    if lengths.max() > MAX_LENGTH or (TABLE_SIZE >> lengths[lengths > 0]).sum() != TABLE_SIZE:
        return None
    return lengths, 2 + size


def _table(lengths: Array) -> tuple[Array, Array]:
    """For every 11 bits: the symbol that begins in them, and its length."""
    symbols, steps = np.zeros(TABLE_SIZE, np.uint8), np.zeros(TABLE_SIZE, np.int64)
    for symbol, code in canonical(lengths).items():
        begin = int(code[::-1], 2)
        symbols[begin :: 1 << len(code)] = symbol
        steps[begin :: 1 << len(code)] = len(code)
    return symbols, steps
