"""The twins of `gradients.c`. Words are the bits of float32, as uint32; bfloat16 numbers are uint16."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.format_ids import ENTRY, HUFFMAN, STORED
from oracle.entropy import entropy_of
from oracle.huffman import Code, code_of, write_huffman
from oracle.streams import MAX_SPARSE_BITS, MIN_SPARSE_SIZE, MIN_SPARSE_WASTE, read_stream

F32, F64, U32 = np.float32, np.float64, np.uint32
ONE, TWO, LEAST_NORMAL, INFINITE, NAN = 0x3F800000, 0x40000000, 0x00800000, 0x7F800000, 0x7FC00000
BLOCK, LONG_GAP, CLASSES = 512, 255, 4


def count_words(words: Array) -> int:
    return int(np.count_nonzero(words))


def split_sparse(words: Array, shift: int, gaps: Array, lows: Array, values: Array) -> int:
    places = np.flatnonzero(words)
    values[:] = words[places]
    runs = np.diff(places, prepend=-1) - 1
    parts = [part for run in runs >> shift for part in (*[LONG_GAP] * (run // LONG_GAP), run % LONG_GAP)]
    gaps[: len(parts)] = parts
    bits = runs[:, None] >> np.arange(shift) & 1
    lows[: -(-bits.size // 8)] = np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")
    return len(parts)


def merge_sparse(gaps: Array, shift: int, lows: Array, values: Array, words: Array) -> bool:
    words[:] = 0
    ends = gaps != LONG_GAP
    if int(ends.sum()) != values.size or (gaps.size and not ends[-1]):
        return False
    bits = np.unpackbits(lows, bitorder="little")[: values.size * shift].reshape(values.size, shift)
    steps = gaps.astype(np.int64) << shift
    steps[ends] += 1 + (bits.astype(np.int64) << np.arange(shift)).sum(axis=1)
    places = np.cumsum(steps)[ends] - 1
    if values.size and places[-1] >= words.size:
        return False
    words[places] = values
    return True


def find_factor(words: Array) -> int:
    """Sample and candidates in the order of the kernel, since more than one may fit."""
    probes = words[np.arange(min(words.size, 512)) * words.size // max(min(words.size, 512), 1)]
    sample = (probes[_is_normal(probes)][:64] & U32(LEAST_NORMAL - 1)) | U32(ONE)
    if not sample.size:
        return 0
    quotients = sample[:1].view(F32) / (U32(ONE) | np.arange(128, dtype=U32) << U32(16)).view(F32)
    middles = np.where(quotients < 1, quotients * F32(2), quotients).view(U32)
    around = (int(middle) + step for middle in middles for step in (0, 1, -1, 2, -2))
    for factor in (ONE, *(factor for factor in around if ONE < factor < TWO)):
        if _divide(sample, factor)[1].all():
            return factor
    return 0


def divide_by_factor(words: Array, factor: float, out: Array) -> bool:
    """`out` holds something if all words come back only."""
    if factor == 1:
        numbers, is_same = (words >> U32(16)).astype(np.uint16), (words & U32(0xFFFF)) == 0
    elif 1 < F32(factor) < 2:
        numbers, is_same = _divide(words, int(F32(factor).view(U32)))
    else:
        return False
    out[:] = numbers
    return bool(is_same.all())


@np.errstate(all="ignore")
def multiply_by_factor(values: Array, factor: float, words: Array) -> None:
    wide = values.astype(U32) << U32(16)
    product = wide.view(F32) * F32(factor)
    words[:] = wide if factor == 1 else np.where(np.isnan(product), U32(NAN), product.view(U32))


@np.errstate(all="ignore")
def quantise_blocks(words: Array, scales: Array, codes: Array) -> int:
    for i, begin in enumerate(range(0, words.size, BLOCK)):
        block = words[begin : begin + BLOCK]
        scales[i] = _scale(int((block & U32(0x7FFFFFFF)).max()))
        codes[begin : begin + BLOCK] = 0
        if scales[i] not in (0, NAN):
            inverse = 1 / F64(scales[i : i + 1].view(F32)[0])
            codes[begin : begin + BLOCK] = np.rint(block.view(F32).astype(F64) * inverse).astype(np.int8).view(np.uint8)
    return int(np.count_nonzero(scales == NAN))


@np.errstate(all="ignore")
def restore_blocks(codes: Array, scales: Array, words: Array) -> bool:
    is_scale = (scales == 0) | (scales == NAN) | (_is_normal(scales) & (scales < INFINITE) & (scales & U32(0xFF) == 0))
    if not is_scale.all():
        return False
    by = np.repeat(np.where(scales == NAN, U32(0), scales).view(F32), BLOCK)[: codes.size]
    words[:] = (codes.view(np.int8).astype(F32) * by).view(U32)
    return True


def write_columns(codes: Array, columns: int, skipped: int, out: Array) -> int:
    """`out` holds something if the classes are smaller than one stream only."""
    row, column = np.divmod(skipped + np.arange(codes.size), columns)
    (row_groups, row_means), (column_groups, column_means) = (_groups(codes, place) for place in (row, column))
    numbers = np.outer(np.bincount(row_groups, minlength=8), np.bincount(column_groups, minlength=8)).reshape(-1)
    products = np.outer(row_means, column_means).reshape(-1)
    order = np.argsort(np.where(numbers > 0, products, products.max() + 1), kind="stable")
    before = np.cumsum(numbers[order]) - numbers[order]
    table = np.zeros(64, np.int64)
    table[order] = CLASSES * (before + numbers[order] // 2) // numbers.sum()
    table[numbers == 0] = 0
    class_of = table[8 * row_groups[row] + column_groups[column]]
    planes = [codes[class_of == index] for index in range(CLASSES)]
    parts = [code_of(plane, well=True) for plane in planes]
    if np.unique(table[numbers > 0]).size < 2 or any(
        plane.size and (part.used < 2 or part.size >= plane.size) for part, plane in _both(parts, planes)
    ):
        return 0
    streams = [write_huffman(plane, part) if plane.size else b"" for part, plane in _both(parts, planes)]
    heads = [bytes([HUFFMAN if one else STORED]) + len(one).to_bytes(4, "little") for one in streams]
    head = _packed(table, 2) + _packed(column_groups, 4) + _packed(row_groups, 4)
    result = head + b"".join(heads) + b"".join(streams)
    single = code_of(codes)
    counts = single.counts.sum(axis=0)
    size = single.size - int(single.stream_sizes.sum()) + (int(counts @ single.lengths) + 7) // 8
    is_small = codes.size >= MIN_SPARSE_SIZE and 8 * size < MAX_SPARSE_BITS * codes.size
    if is_small and size > MIN_SPARSE_WASTE * entropy_of(counts) / 8:
        return 0
    if not (codes & 128).any():
        size = min(size, codes.size - codes.size // 8)
    if len(result) >= size + ENTRY:
        return 0
    out[: len(result)] = np.frombuffer(result, np.uint8)
    return len(result)


def read_columns(source: Array, columns: int, skipped: int, codes: Array) -> int:
    row, column = np.divmod(skipped + np.arange(codes.size), columns)
    rows = int(row[-1]) + 1
    begins = np.cumsum([0, 16, -(-columns // 2), -(-rows // 2)])
    at = directory = int(begins[-1])
    at += CLASSES * ENTRY
    if at > source.size:
        return 0
    table, column_groups, row_groups = (
        _unpacked(source[begin:end], width) for begin, end, width in zip(begins, begins[1:], (2, 4, 4), strict=False)
    )
    class_of = table[8 * (row_groups[row] & 7) + (column_groups[column] & 7)]
    for index in range(CLASSES):
        kind = int(source[directory + ENTRY * index])
        size = int(source[directory + ENTRY * index + 1 :][:4].copy().view("<u4")[0])
        plane = np.zeros(int(np.count_nonzero(class_of == index)), np.uint8)
        if size > source.size - at or not read_stream(kind, source[at : at + size], plane):
            return 0
        codes[class_of == index] = plane
        at += size
    return at


def _groups(codes: Array, places: Array) -> tuple[Array, Array]:
    """The groups of rows or columns, and the mean of each group, 256ths of the quarters in which means are counted."""
    sums = np.bincount(places, np.abs(codes.view(np.int8).astype(np.int64))).astype(np.int64)
    means = 4 * sums // np.bincount(places)
    number = np.bincount(means, minlength=516)
    groups = (8 * (np.cumsum(number) - number + number // 2) // means.size)[means]
    members = np.bincount(groups, minlength=8)
    totals = np.bincount(groups, means, minlength=8).astype(np.int64)
    return groups, (totals << 8) // np.maximum(members, 1)


def _packed(numbers: Array, width: int) -> bytes:
    bits = (numbers[:, None] >> np.arange(width) & 1).astype(np.uint8).reshape(-1)
    return np.packbits(bits, bitorder="little").tobytes()


def _unpacked(source: Array, width: int) -> Array:
    bits = np.unpackbits(source, bitorder="little").reshape(-1, width)
    return (bits << np.arange(width, dtype=np.uint8)).sum(axis=1)


def _both(parts: list[Code], planes: list[Array]) -> list[tuple[Code, Array]]:
    return list(zip(parts, planes, strict=True))


def _scale(largest: int) -> int:
    """The bits of the scale of a block with this largest magnitude, as bits; NAN if it must be stored."""
    if largest == 0:
        return 0
    quotient = F64(U32(largest).view(F32)) / 127
    if not LEAST_NORMAL <= largest < INFINITE or quotient < 2 * F64(U32(LEAST_NORMAL).view(F32)):
        return NAN
    scale = (int(F32(quotient).view(U32)) + 0xFF) & ~0xFF
    return scale if 127 * F64(U32(scale).view(F32)) <= np.finfo(F32).max else NAN


def _is_normal(words: Array) -> Array:
    exponents = words >> U32(23) & U32(0xFF)
    is_normal: Array = (exponents > 0) & (exponents < 255)
    return is_normal


@np.errstate(all="ignore")
def _divide(words: Array, factor: int) -> tuple[Array, Array]:
    """The nearest bfloat16 numbers, and of which the word comes back."""
    by = U32(factor).view(F32)
    quotients = (words.view(F32) * (F32(1) / by)).view(U32)
    numbers = quotients + U32(0x7FFF) + (quotients >> U32(16) & U32(1)) >> U32(16)
    wide = numbers << U32(16)
    is_zero = (words << U32(1) | wide << U32(1)) == 0
    is_same = (wide.view(F32) * by).view(U32) == words
    return numbers.astype(np.uint16), (is_zero | _is_normal(words) & _is_normal(wide)) & is_same
