"""The kernels of delta codecs as functions of arrays: `codecs/kernels/deltas.h`.

All arrays are flat and without gaps; n is their size. `words` are the bits of values as unsigned integers. A result in
this thread's buffer is valid until the thread calls the next kernel.

Raises:
    CodecError: Arrays have other dtypes or sizes than a kernel takes: a bug in ckpt. No content of a file causes it: a
        reader of damaged bytes returns False, and its output is then undefined.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native.library import ADDRESS, DOUBLE, FLOAT, INT, INT64, address, bind, scratch
from ckpt_codecs.scratch import thread_buffer

_ADAM = (INT64, ADDRESS, ADDRESS, ADDRESS, INT64, DOUBLE, DOUBLE, FLOAT, FLOAT)

SIGNATURES = {
    "zigzag_bits": (INT64, INT, ADDRESS, ADDRESS, INT64),
    "split_zigzags": (INT64, INT, ADDRESS, ADDRESS, INT64, ADDRESS, INT),
    "merge_zigzags": (INT64, INT, ADDRESS, ADDRESS, INT, ADDRESS, INT64),
    "exponent_buckets": (INT64, ADDRESS, INT64, INT, INT, INT, ADDRESS),
    "count_contexts": (INT64, ADDRESS, INT64, ADDRESS),
    "gather": (INT64, ADDRESS, ADDRESS, INT64, ADDRESS),
    "scatter": (INT64, ADDRESS, ADDRESS, INT64, ADDRESS),
    "root_units": (INT64, ADDRESS, INT64, INT, ADDRESS),
    "growth_contexts": (INT64, ADDRESS, ADDRESS, INT64, INT, INT, ADDRESS),
    "apply_drift": (INT64, ADDRESS, ADDRESS, INT64, ADDRESS, INT64, ADDRESS),
    "to_grid": (INT64, ADDRESS, ADDRESS, ADDRESS, INT64, ADDRESS, ADDRESS, ADDRESS, ADDRESS, INT64),
    "from_grid": (INT64, ADDRESS, ADDRESS, ADDRESS, INT64, ADDRESS, INT64, ADDRESS, INT64, ADDRESS),
    "write_rows": (INT64, ADDRESS, INT64, INT64, ADDRESS, INT64),
    "read_rows": (INT64, ADDRESS, INT64, INT64, ADDRESS, INT64),
    "count_changed": (INT64, ADDRESS, ADDRESS, INT64),
    "find_steps": (
        *(INT64, ADDRESS, ADDRESS, INT64, INT, INT, INT64, ADDRESS),
        *(ADDRESS, ADDRESS, INT64, ADDRESS, ADDRESS),
    ),
    "write_sparse_steps": (
        *(INT64, ADDRESS, ADDRESS, ADDRESS, INT64, ADDRESS),
        *(ADDRESS, ADDRESS, INT64, ADDRESS, INT64),
    ),
    "read_sparse_steps": (INT64, ADDRESS, INT64, ADDRESS, INT64, INT, INT, INT64, ADDRESS),
    "count_step_symbols_scratch": (INT64,),
    "count_step_symbols": (
        *(INT64, ADDRESS, ADDRESS, ADDRESS, INT64, ADDRESS, ADDRESS),
        *(INT64, ADDRESS, INT64, ADDRESS, INT64),
    ),
    "write_ans_steps_scratch": (INT64,),
    "write_ans_steps": (INT64, ADDRESS, INT64, ADDRESS, INT64, ADDRESS, ADDRESS, INT64, ADDRESS, INT64),
    "read_ans_steps_scratch": (INT64, INT64),
    "read_ans_steps": (
        *(INT64, ADDRESS, ADDRESS, INT64, ADDRESS, INT64, ADDRESS),
        *(ADDRESS, INT64, ADDRESS, INT64, ADDRESS, ADDRESS, INT64),
    ),
    "fill_masked_tables": (INT64, ADDRESS, INT64),
    "write_masked_steps_scratch": (INT64, INT64),
    "write_masked_steps": (
        *(INT64, ADDRESS, ADDRESS, INT64, INT, ADDRESS, INT64),
        *(ADDRESS, INT64, ADDRESS, INT64),
    ),
    "read_masked_steps_scratch": (INT64, INT64),
    "read_masked_steps": (
        *(INT64, ADDRESS, INT64, ADDRESS, INT64, INT, ADDRESS, INT64),
        *(ADDRESS, ADDRESS, INT64),
    ),
    "list_masked_steps": (
        *(INT64, ADDRESS, INT64, ADDRESS, INT64, INT, ADDRESS, INT64),
        *(ADDRESS, ADDRESS, INT64, ADDRESS, INT64),
    ),
    "infer_gradients": (INT64, ADDRESS, ADDRESS, INT64, DOUBLE, ADDRESS),
    "infer_bfloat16_gradients": (INT64, ADDRESS, ADDRESS, INT64, DOUBLE, FLOAT, FLOAT, INT, ADDRESS),
    "count_bfloat16_matches": (INT64, ADDRESS, ADDRESS, INT64, DOUBLE, FLOAT, FLOAT, INT),
    "step_first_moments": (INT64, ADDRESS, ADDRESS, INT64, FLOAT, FLOAT, INT, ADDRESS),
    "step_second_moments": (INT64, ADDRESS, ADDRESS, INT64, FLOAT, FLOAT, INT, ADDRESS),
    "step_adam_torch": (*_ADAM, ADDRESS),
    "step_adam_fused": (*_ADAM, ADDRESS),
    "step_adam_deepspeed_cpu": (*_ADAM, ADDRESS),
    "step_adam_apex": (*_ADAM, FLOAT, ADDRESS),
    "extrapolate_weights": (
        *(INT64, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, INT64),
        *(DOUBLE, DOUBLE, DOUBLE, ADDRESS),
    ),
    "step_momentum": (INT64, ADDRESS, ADDRESS, INT64, DOUBLE, DOUBLE, ADDRESS),
    "mix": (INT64, ADDRESS, ADDRESS, INT64, DOUBLE, DOUBLE, ADDRESS),
    "scale": (INT64, ADDRESS, INT64, DOUBLE, ADDRESS),
}
"""The C types of each kernel: of its result, then of its arguments."""

kernels = bind(SIGNATURES)

BYTE, INT8, WORD16, WORD32 = np.dtype(np.uint8), np.dtype(np.int8), np.dtype(np.uint16), np.dtype(np.uint32)
SIZE, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
PADDING = 8
"""Zero bytes after a stream of bits, because kernels load and store 8 bytes at a time."""
STEP_SYMBOLS, ANS_STATES = 108, 16


def _check_sizes(n: int, *arrays: Array) -> None:
    for array in arrays:
        if array.size != n:
            raise CodecError(f"a kernel needs {n} elements, not {array.size}: this is a bug in ckpt")


# --- zigzagged differences


def zigzag_bits(before: Array, after: Array) -> int:
    """Return the number of bits of the largest zigzagged difference.

    `before`, `after`: (n,) uint8, uint16, uint32 or uint64.
    """
    _check_sizes(after.size, before)
    dtype = after.dtype
    return int(kernels.zigzag_bits(dtype.itemsize, address(before, dtype), address(after, dtype), after.size))


def split_zigzags(before: Array, after: Array, planes: list[Array]) -> None:
    """Fill planes with the lowest bytes of the zigzagged differences: 1 to as many planes as a word has bytes.

    `before`, `after`: (n,) uint8, uint16, uint32 or uint64. `planes`: (n,) uint8 each.
    """
    n, dtype = after.size, after.dtype
    _check_sizes(n, before, *planes)
    targets = (ctypes.c_void_p * 8)(*[address(plane, BYTE, writable=True) for plane in planes])
    kernels.split_zigzags(dtype.itemsize, address(before, dtype), address(after, dtype), n, targets, len(planes))


def merge_zigzags(before: Array, planes: list[Array], out: Array) -> None:
    """Fill `out` from the planes of `split_zigzags`. Bytes without a plane are 0.

    `before`, `out`: (n,) uint8, uint16, uint32 or uint64. `planes`: (n,) uint8 each.
    """
    n, dtype = out.size, out.dtype
    _check_sizes(n, before, *planes)
    sources = (ctypes.c_void_p * 8)(*[address(plane, BYTE) for plane in planes])
    kernels.merge_zigzags(
        dtype.itemsize, address(before, dtype), sources, len(planes), address(out, dtype, writable=True), n
    )


# --- contexts


def exponent_buckets(words: Array, mantissa_bits: int, min_exponent: int, count: int) -> Array:
    """Return the exponents of floats minus the least one, limited to 0 and `count` - 1: (n,) uint8, thread's buffer.

    `words`: (n,) uint16, the bits of 16-bit floats.
    """
    out = thread_buffer("which", words.size)
    kernels.exponent_buckets(
        address(words, WORD16), words.size, mantissa_bits, min_exponent, count, address(out, BYTE, writable=True)
    )
    return out


def count_contexts(contexts: Array, count: int) -> Array:
    """Return how often each context occurs: (m,) int64, m >= count. `contexts`: (n,) uint8."""
    counts = np.empty(256, np.int64)
    kernels.count_contexts(address(contexts, BYTE), contexts.size, address(counts, SIZE, writable=True))
    return counts[: max(count, int(contexts.max(initial=0)) + 1)]


def gather(contexts: Array, plane: Array, out: Array) -> None:
    """Fill `out` with the symbols grouped by context, in their order. All arrays: (n,) uint8."""
    _check_sizes(plane.size, contexts, out)
    kernels.gather(address(contexts, BYTE), address(plane, BYTE), plane.size, address(out, BYTE, writable=True))


def scatter(contexts: Array, plane: Array, out: Array) -> None:
    """Fill `out` with grouped symbols in their original order. All arrays: (n,) uint8."""
    _check_sizes(plane.size, contexts, out)
    kernels.scatter(address(contexts, BYTE), address(plane, BYTE), plane.size, address(out, BYTE, writable=True))


# --- second moments: the bits of float32


def root_units(second: Array, shift: int) -> Array:
    """Return the exponents of square roots plus `shift`, limited to 1 and 254: (n,) uint8. `second`: (n,) uint32."""
    out = np.empty(second.size, np.uint8)
    kernels.root_units(address(second, WORD32), second.size, shift, address(out, BYTE, writable=True))
    return out


def growth_contexts(before: Array, after: Array, least: int, count: int) -> Array:
    """Return how much values grew in quarter octaves, minus `least`, limited to 0 and `count` - 1: (n,) uint8.

    `before`, `after`: (n,) uint32, the bits of float32.
    """
    _check_sizes(after.size, before)
    out = np.empty(after.size, np.uint8)
    kernels.growth_contexts(
        *(address(before, WORD32), address(after, WORD32), after.size),
        *(least, count, address(out, BYTE, writable=True)),
    )
    return out


def apply_drift(words: Array, rows: Array, columns: Array) -> Array:
    """Return values grown by a drift in sixteenths of an octave: (n * m,) uint32.

    `words`: (n * m,) uint32, the bits of float32. `rows`: (n,) int8. `columns`: (m,) int8.
    """
    _check_sizes(rows.size * columns.size, words)
    out = np.empty_like(words)
    kernels.apply_drift(
        *(address(words, WORD32), address(rows, INT8), rows.size),
        *(address(columns, INT8), columns.size, address(out, WORD32, writable=True)),
    )
    return out


# --- grids: the bits of float32


def to_grid(predicted: Array, actual: Array, units: Array) -> tuple[Array, Array, Array]:
    """Return symbols, (n,) uint8, depths, (d,) uint8, and bits, (b,) uint8, all in this thread's buffers.

    The bits end with `PADDING`. `predicted`, `actual`: (n,) uint32, the bits of float32. `units`: (n,) uint8.
    """
    n = actual.size
    _check_sizes(n, predicted, units)
    symbols, depths, bits = (
        thread_buffer("symbols", n),
        thread_buffer("depths", n),
        thread_buffer("bits", 4 * n + 2 * PADDING),
    )
    count = ctypes.c_int64()
    used = kernels.to_grid(
        *(address(predicted, WORD32), address(actual, WORD32), address(units, BYTE), n),
        *(address(symbols, BYTE, writable=True), address(depths, BYTE, writable=True), ctypes.addressof(count)),
        *(address(bits, BYTE, writable=True), bits.size),
    )
    return symbols, depths[: count.value], _padded(bits, used)


def from_grid(predicted: Array, units: Array, symbols: Array, depths: Array, bits: Array, out: Array) -> bool:
    """Fill `out` from symbols, depths and bits of `to_grid`; False if they do not belong to n values.

    `predicted`, `out`: (n,) uint32, the bits of float32. `units`, `symbols`: (n,) uint8. `depths`: (d,) uint8. `bits`:
    (b,) uint8.
    """
    n = out.size
    _check_sizes(n, predicted, units, symbols)
    return bool(
        kernels.from_grid(
            *(address(predicted, WORD32), address(units, BYTE), address(symbols, BYTE), n),
            *(address(depths, BYTE), depths.size, address(bits, BYTE), bits.size),
            address(out, WORD32, writable=True),
        )
    )


def _padded(bits: Array, used: int) -> Array:
    """Return the bytes of the first `used` bits, and `PADDING`: (m,) uint8."""
    end = (used + 7) >> 3
    bits[end : end + PADDING] = 0
    return bits[: end + PADDING]


# --- rows of bytes


def write_rows(rows: Array, columns: int, out: Array) -> int:
    """Code rows of bytes below 255, each of which is similar to the one above. Return the number of coded bytes.

    If that is more than the size of `out`, its content is undefined. `rows`: (n,) uint8, whole rows of `columns`.
    `out`: (m,) uint8.
    """
    return int(kernels.write_rows(address(rows, BYTE), rows.size, columns, address(out, BYTE, writable=True), out.size))


def read_rows(data: Array, columns: int, rows: Array) -> bool:
    """Fill `rows`, (n,) uint8, from the bytes of `write_rows`; False if `data`, (m,) uint8, has more than these."""
    return bool(
        kernels.read_rows(address(data, BYTE), data.size, columns, address(rows, BYTE, writable=True), rows.size)
    )


# --- steps of 16-bit floats


def count_changed(before: Array, after: Array) -> int:
    """Return how many words differ. `before`, `after`: (n,) uint16."""
    _check_sizes(after.size, before)
    return int(kernels.count_changed(address(before, WORD16), address(after, WORD16), after.size))


def find_steps(
    predicted: Array, actual: Array, mantissa_bits: int, min_exponent: int, buckets: int, changed: int
) -> tuple[Array, Array, Array, Array, Array]:
    """Return where the `changed` values are that differ, and by how much.

    The bucket of a value is the one of `exponent_buckets`; there are up to 16.

    Returns:
        Of each change: its bucket, (changed,) uint8; the number of unchanged values of the bucket after it, (changed,)
        int64; the step, (changed,) uint16. Of each bucket: its number of values, (buckets,) int64; the number of those
        before its first change, (buckets,) int64.

    `predicted`, `actual`: (n,) uint16.
    """
    n = actual.size
    _check_sizes(n, predicted)
    step_buckets = np.empty(changed, np.uint8)
    gaps, steps = np.empty(changed, np.int64), np.empty(changed, np.uint16)
    sizes, first_gaps = np.empty(buckets, np.int64), np.empty(buckets, np.int64)
    count = kernels.find_steps(
        *(address(predicted, WORD16), address(actual, WORD16), n, mantissa_bits, min_exponent, buckets),
        *(address(step_buckets, BYTE, writable=True), address(gaps, SIZE, writable=True)),
        *(address(steps, WORD16, writable=True), changed),
        *(address(sizes, SIZE, writable=True), address(first_gaps, SIZE, writable=True)),
    )
    if count != changed:
        raise CodecError(f"{count} values change, not {changed}: this is a bug in ckpt")
    return step_buckets, gaps, steps, sizes, first_gaps


def write_sparse_steps(
    buckets: Array, gaps: Array, steps: Array, sizes: Array, first_gaps: Array, shifts: Array, out: Array
) -> int:
    """Code the results of `find_steps`. Return the number of coded bytes, as `write_rows` does.

    `shifts`: (buckets,) uint8, how many bits of a gap are coded with equal probabilities. `out`: (m,) uint8.
    """
    _check_sizes(buckets.size, gaps, steps)
    _check_sizes(shifts.size, sizes, first_gaps)
    return int(
        kernels.write_sparse_steps(
            *(address(buckets, BYTE), address(gaps, SIZE), address(steps, WORD16), buckets.size),
            *(address(sizes, SIZE), address(first_gaps, SIZE), address(shifts, BYTE), shifts.size),
            *(address(out, BYTE, writable=True), out.size),
        )
    )


def read_sparse_steps(
    data: Array, predicted: Array, mantissa_bits: int, min_exponent: int, buckets: int, out: Array
) -> bool:
    """Fill `out` from the bytes of `write_sparse_steps`, (m,) uint8; False if they do not belong to n values.

    `predicted`, `out`: (n,) uint16; they may be the same array. The buckets are those of `find_steps`.
    """
    n = out.size
    _check_sizes(n, predicted)
    return bool(
        kernels.read_sparse_steps(
            *(address(data, BYTE), data.size, address(predicted, WORD16), n),
            *(mantissa_bits, min_exponent, buckets, address(out, WORD16, writable=True)),
        )
    )


def count_step_symbols(predicted: Array, actual: Array, which: Array, buckets: int) -> tuple[Array, Array, Array]:
    """Return the symbols of steps, how often they occur, and the bits of steps that no symbol has.

    Returns:
        Each value's bucket << 8 plus symbol, (n,) uint16; the counts, (buckets, 108) uint32; the bits with `PADDING`,
        (m,) uint8. All but the counts are this thread's buffers.

    `predicted`, `actual`: (n,) uint16. `which`: (n,) uint8, the bucket of each value.
    """
    n = actual.size
    _check_sizes(n, predicted, which)
    symbols, bits = thread_buffer("step symbols", 2 * n).view(np.uint16), thread_buffer("bits", 2 * n + 2 * PADDING)
    counts = np.empty((buckets, STEP_SYMBOLS), np.uint32)
    used = kernels.count_step_symbols(
        *(address(predicted, WORD16), address(actual, WORD16), address(which, BYTE), n),
        *(address(symbols, WORD16, writable=True), address(counts, WORD32, writable=True), buckets),
        *(address(bits, BYTE, writable=True), bits.size, *scratch(kernels.count_step_symbols_scratch())),
    )
    return symbols, counts, _padded(bits, used)


def write_ans_steps(symbols: Array, weights: Array) -> tuple[Array, Array]:
    """Return the states, (16,) uint32, and words, (w,) uint16 in this thread's buffer, that code symbols.

    `symbols`: (n,) uint16, of `count_step_symbols`. `weights`: (buckets, 108) uint32; the sum of those of a bucket is
    4096, and no symbol that occurs has weight 0.
    """
    _check_sizes(len(weights) * STEP_SYMBOLS, weights)
    states, words = np.empty(ANS_STATES, np.uint32), thread_buffer("words", 2 * symbols.size + 2).view(np.uint16)
    begin = kernels.write_ans_steps(
        *(address(symbols, WORD16), symbols.size, address(weights, WORD32), len(weights)),
        *(address(states, WORD32, writable=True), address(words, WORD16, writable=True), words.size),
        *scratch(kernels.write_ans_steps_scratch()),
    )
    return states, words[begin:]


def read_ans_steps(
    predicted: Array, which: Array, weights: Array, states: Array, words: Array, bits: Array, out: Array
) -> bool:
    """Fill `out`; False if states, words and bits do not belong to n values.

    `predicted`, `out`: (n,) uint16. `which`: (n,) uint8. `weights`: (buckets, 108) uint32. `states`: (16,) uint32.
    `words`: (w,) uint16. `bits`: (m,) uint8.
    """
    n = out.size
    _check_sizes(n, predicted, which)
    _check_sizes(len(weights) * STEP_SYMBOLS, weights)
    _check_sizes(ANS_STATES, states)
    return bool(
        kernels.read_ans_steps(
            *(address(predicted, WORD16), address(which, BYTE), n, address(weights, WORD32), len(weights)),
            *(address(states, WORD32), address(words, WORD16), words.size, address(bits, BYTE), bits.size),
            *(address(out, WORD16, writable=True), *scratch(kernels.read_ans_steps_scratch(n))),
        )
    )


def fill_masked_tables(out: Array) -> int:
    """Fill the tables of masked steps, and return how many bytes they have; fill nothing if `out` is smaller.

    `out`: (m,) uint8.
    """
    return int(kernels.fill_masked_tables(address(out, BYTE, writable=True), out.size))


@cache
def _masked_tables() -> tuple[Array, int, int]:
    """Return the tables with their address and size: the kernels store nothing between calls."""
    tables = np.empty(fill_masked_tables(np.empty(0, np.uint8)) // 8, np.uint64).view(np.uint8)
    fill_masked_tables(tables)
    return tables, address(tables, BYTE), tables.size


def write_masked_steps(before: Array, after: Array, mantissa_bits: int) -> Array | None:
    """Return coded steps, (m,) uint8 in this thread's buffer, empty if nothing changed; None if too much changed.

    `before`, `after`: (n,) uint16.
    """
    n = after.size
    _check_sizes(n, before)
    out = thread_buffer("changes", 2 * n + 1024)
    used = kernels.write_masked_steps(
        *(address(before, WORD16), address(after, WORD16), n, mantissa_bits, *_masked_tables()[1:]),
        *(address(out, BYTE, writable=True), out.size, *scratch(kernels.write_masked_steps_scratch(n))),
    )
    return None if used > out.size else out[:used]


def read_masked_steps(data: Array, before: Array, mantissa_bits: int, out: Array) -> bool:
    """Fill `out` from the bytes of `write_masked_steps`, (m,) uint8; False if they do not belong to n values.

    `before`, `out`: (n,) uint16; they may be the same array.
    """
    n = out.size
    _check_sizes(n, before)
    return bool(
        kernels.read_masked_steps(
            *(address(data, BYTE), data.size, address(before, WORD16), n, mantissa_bits, *_masked_tables()[1:]),
            *(address(out, WORD16, writable=True), *scratch(kernels.read_masked_steps_scratch(n))),
        )
    )


def list_masked_steps(data: Array, before: Array, mantissa_bits: int) -> tuple[Array, Array] | None:
    """Return the places, (k,) int64 in ascending order, and the words there after the step, (k,) uint16.

    None if the bytes of `write_masked_steps`, `data`, (m,) uint8, do not belong to n values. `before`: (n,) uint16.
    """
    n = before.size
    places, words = thread_buffer("places", 8 * n).view(np.int64), thread_buffer("words", 2 * n).view(np.uint16)
    count = kernels.list_masked_steps(
        *(address(data, BYTE), data.size, address(before, WORD16), n, mantissa_bits, *_masked_tables()[1:]),
        *(address(places, SIZE, writable=True), address(words, WORD16, writable=True), n),
        *scratch(kernels.read_masked_steps_scratch(n)),
    )
    return (places[:count].copy(), words[:count].copy()) if count else None


# --- steps of optimizers: `codecs/kernels/optimizer_steps.c` explains the orders of operations


def infer_gradients(m0: Array, m1: Array, gain: float, out: Array) -> None:
    """Fill `out` with the gradients that lead from `m0` to `m1`. All arrays: (n,) float32."""
    _check_sizes(out.size, m0, m1)
    kernels.infer_gradients(_read(m0), _read(m1), out.size, gain, _write(out))


def infer_bfloat16_gradients(
    m0: Array, m1: Array, scale: float, decay: float, gain: float, form: int, out: Array
) -> None:
    """Fill `out`, (n,) uint16, with the bfloat16 gradients before their multiplication by `scale`.

    They are zero wherever zero leads to `m1`. `m0`, `m1`: (n,) float32.
    """
    _check_sizes(out.size, m0, m1)
    kernels.infer_bfloat16_gradients(
        _read(m0), _read(m1), out.size, scale, decay, gain, form, address(out, WORD16, writable=True)
    )


def count_bfloat16_matches(m0: Array, m1: Array, scale: float, decay: float, gain: float, form: int) -> int:
    """Return how many of `m1` are exact if gradients are bfloat16 times `scale`. `m0`, `m1`: (n,) float32."""
    _check_sizes(m1.size, m0)
    return int(kernels.count_bfloat16_matches(_read(m0), _read(m1), m1.size, scale, decay, gain, form))


def step_first_moments(m: Array, g: Array, decay: float, gain: float, form: int, out: Array) -> None:
    """Fill `out` with the first moments after a step. All arrays: (n,) float32."""
    _check_sizes(out.size, m, g)
    kernels.step_first_moments(_read(m), _read(g), out.size, decay, gain, form, _write(out))


def step_second_moments(v: Array, g: Array, decay: float, gain: float, form: int, out: Array) -> None:
    """Fill `out` with the second moments after a step. All arrays: (n,) float32."""
    _check_sizes(out.size, v, g)
    kernels.step_second_moments(_read(v), _read(g), out.size, decay, gain, form, _write(out))


def extrapolate_weights(
    w: Array,
    m0: Array,
    v0: Array,
    m1: Array,
    v1: Array,
    weight_factor: float,
    old_direction: float,
    new_direction: float,
    out: Array,
) -> None:
    """Fill `out` with predicted weights after several steps, from the moments before and after these.

    All arrays: (n,) float32.
    """
    _check_sizes(out.size, w, m0, v0, m1, v1)
    kernels.extrapolate_weights(
        *(_read(w), _read(m0), _read(v0), _read(m1), _read(v1), out.size),
        *(weight_factor, old_direction, new_direction, _write(out)),
    )


def step_momentum(w: Array, b: Array, weight_factor: float, step_size: float, out: Array) -> None:
    """Fill `out` with the weights after a step of gradient descent with momentum `b`. All arrays: (n,) float32."""
    _check_sizes(out.size, w, b)
    kernels.step_momentum(_read(w), _read(b), out.size, weight_factor, step_size, _write(out))


def mix(x: Array, y: Array, a: float, b: float, out: Array) -> None:
    """Fill `out` with a x + b y. All arrays: (n,) float32."""
    _check_sizes(out.size, x, y)
    kernels.mix(_read(x), _read(y), out.size, a, b, _write(out))


def scale(x: Array, factor: float, out: Array) -> None:
    """Fill `out` with `factor` x. All arrays: (n,) float32."""
    _check_sizes(out.size, x)
    kernels.scale(_read(x), out.size, factor, _write(out))


def adam_steps(kernel: str, w: Array, m: Array, v: Array, out: Array) -> Callable[..., Array]:
    """Return what fills `out` with the weights after a step, by the numbers of the step, and returns it.

    The addresses of the arrays, (n,) float32, are looked up once: that takes longer than a step of a few weights.
    """
    _check_sizes(out.size, w, m, v)
    function, inputs, filled = getattr(kernels, kernel), (_read(w), _read(m), _read(v), out.size), _write(out)
    arrays = (w, m, v, out)  # they stay as long as the function that has their addresses

    def step(*numbers: float) -> Array:
        function(*inputs, *numbers, filled)
        return arrays[-1]

    return step


def _read(array: Array) -> int:
    return address(array, FLOAT32)


def _write(array: Array) -> int:
    return address(array, FLOAT32, writable=True)
