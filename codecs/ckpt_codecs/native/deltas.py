"""The kernels of deltas: `codecs/kernels/deltas.h`, with NumPy arrays in place of addresses and lengths.

Unless said otherwise arrays are flat, `words` are unsigned integers, planes and `which` are uint8, `predicted` and
`actual` are words of one size, and `n` is how many there are. What is returned in this thread's scratch is valid until
the next kernel of the same thread.

Raises:
    CodecError: Arrays have other dtypes or sizes than a kernel takes: a mistake of ckpt's own. No byte of a file can
        cause it: a reader of damaged bytes returns False, and what its output holds is then undefined.
"""

import ctypes
from collections.abc import Callable

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
    "find_steps": (
        *(INT64, ADDRESS, ADDRESS, ADDRESS, INT64, INT64, ADDRESS),
        *(ADDRESS, ADDRESS, INT64, ADDRESS, ADDRESS),
    ),
    "write_sparse_steps": (
        *(INT64, ADDRESS, ADDRESS, ADDRESS, INT64, ADDRESS),
        *(ADDRESS, ADDRESS, INT64, ADDRESS, INT64),
    ),
    "read_sparse_steps": (INT64, ADDRESS, INT64, ADDRESS, ADDRESS, INT64, ADDRESS, INT64, ADDRESS),
    "read_sparse_plane": (INT64, ADDRESS, INT64, ADDRESS, ADDRESS, INT64, ADDRESS, INT64),
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
"""Of each kernel: the kind of its result, then those of its arguments."""

kernels = bind(SIGNATURES)

BYTE, INT8, WORD16, WORD32 = np.dtype(np.uint8), np.dtype(np.int8), np.dtype(np.uint16), np.dtype(np.uint32)
SIZE, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
PADDING = 8
"""Bytes after a stream of bits, so that kernels load and store whole words."""
STEP_SYMBOLS, ANS_STATES = 108, 16


def _check_sizes(n: int, *arrays: Array) -> None:
    for array in arrays:
        if array.size != n:
            raise CodecError(f"a kernel needs {n} elements, not {array.size}: this is a mistake of ckpt's own")


# --- zigzagged differences


def zigzag_bits(before: Array, after: Array) -> int:
    """How many bits the largest zigzagged difference has, of words of 1, 2, 4 or 8 bytes."""
    _check_sizes(after.size, before)
    dtype = after.dtype
    return int(kernels.zigzag_bits(dtype.itemsize, address(before, dtype), address(after, dtype), after.size))


def split_zigzags(before: Array, after: Array, planes: list[Array]) -> None:
    """The lowest bytes of the zigzagged differences, a plane each: 1 to as many as a word has bytes."""
    n, dtype = after.size, after.dtype
    _check_sizes(n, before, *planes)
    targets = (ctypes.c_void_p * 8)(*[address(plane, BYTE, writable=True) for plane in planes])
    kernels.split_zigzags(dtype.itemsize, address(before, dtype), address(after, dtype), n, targets, len(planes))


def merge_zigzags(before: Array, planes: list[Array], out: Array) -> None:
    """The words again. Bytes without a plane are 0."""
    n, dtype = out.size, out.dtype
    _check_sizes(n, before, *planes)
    sources = (ctypes.c_void_p * 8)(*[address(plane, BYTE) for plane in planes])
    kernels.merge_zigzags(
        dtype.itemsize, address(before, dtype), sources, len(planes), address(out, dtype, writable=True), n
    )


# --- contexts


def exponent_buckets(words: Array, mantissa: int, least: int, many: int) -> Array:
    """The exponents of 16-bit floats less the least, limited to 0 and `many` - 1: (n,) uint8, this thread's scratch."""
    out = thread_buffer("which", words.size)
    kernels.exponent_buckets(
        address(words, WORD16), words.size, mantissa, least, many, address(out, BYTE, writable=True)
    )
    return out


def count_contexts(contexts: Array, many: int) -> Array:
    """How often each context occurs, `many` of them at least: int64."""
    counts = np.empty(256, np.int64)
    kernels.count_contexts(address(contexts, BYTE), contexts.size, address(counts, SIZE, writable=True))
    return counts[: max(many, int(contexts.max(initial=0)) + 1)]


def gather(contexts: Array, plane: Array, out: Array) -> None:
    """The symbols of each context together, in their order."""
    _check_sizes(plane.size, contexts, out)
    kernels.gather(address(contexts, BYTE), address(plane, BYTE), plane.size, address(out, BYTE, writable=True))


def scatter(contexts: Array, plane: Array, out: Array) -> None:
    """The symbols in their places again."""
    _check_sizes(plane.size, contexts, out)
    kernels.scatter(address(contexts, BYTE), address(plane, BYTE), plane.size, address(out, BYTE, writable=True))


# --- second moments, words of float32


def root_units(second: Array, shift: int) -> Array:
    """Exponents so many octaves from those of the roots, from 1 to 254: (n,) uint8."""
    out = np.empty(second.size, np.uint8)
    kernels.root_units(address(second, WORD32), second.size, shift, address(out, BYTE, writable=True))
    return out


def growth_contexts(before: Array, after: Array, least: int, many: int) -> Array:
    """By how many quarter octaves words have grown, less the least, limited to 0 and `many` - 1: (n,) uint8."""
    _check_sizes(after.size, before)
    out = np.empty(after.size, np.uint8)
    kernels.growth_contexts(
        *(address(before, WORD32), address(after, WORD32), after.size),
        *(least, many, address(out, BYTE, writable=True)),
    )
    return out


def apply_drift(words: Array, rows: Array, columns: Array) -> Array:
    """Words of rows and columns (int8) that have grown by so many sixteenths of an octave: (n,) uint32."""
    _check_sizes(rows.size * columns.size, words)
    out = np.empty_like(words)
    kernels.apply_drift(
        *(address(words, WORD32), address(rows, INT8), rows.size),
        *(address(columns, INT8), columns.size, address(out, WORD32, writable=True)),
    )
    return out


# --- grids, words of float32


def to_grid(predicted: Array, actual: Array, units: Array) -> tuple[Array, Array, Array]:
    """Symbols, depths and bits, and `PADDING` after these: uint8, this thread's scratch."""
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
    """Fill `out`; False if these are not the symbols, depths and bits of n words."""
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
    """The bytes that so many bits take, and zeros after them."""
    end = (used + 7) >> 3
    bits[end : end + PADDING] = 0
    return bits[: end + PADDING]


# --- rows of bytes


def write_rows(rows: Array, columns: int, out: Array) -> int:
    """Code rows of bytes below 255 of which each is like the one above. Returns how many bytes that takes.

    If these are more than `out` has, it holds none that mean anything.
    """
    return int(kernels.write_rows(address(rows, BYTE), rows.size, columns, address(out, BYTE, writable=True), out.size))


def read_rows(data: Array, columns: int, rows: Array) -> bool:
    """Fill `rows`; False if the data has more bytes than they take."""
    return bool(
        kernels.read_rows(address(data, BYTE), data.size, columns, address(rows, BYTE, writable=True), rows.size)
    )


# --- steps of 16-bit floats


def find_steps(
    predicted: Array, actual: Array, which: Array, contexts: int, many: int
) -> tuple[Array, Array, Array, Array, Array]:
    """Where values change, of which there are `many`.

    Of each change its bucket (uint8), how many unchanged values of this come after it (int64), and the step (uint16).
    Of each bucket how many values it has, and how many come before its first change: int64.
    """
    n = actual.size
    _check_sizes(n, predicted, which)
    buckets, gaps, steps = np.empty(many, np.uint8), np.empty(many, np.int64), np.empty(many, np.uint16)
    sizes, first_gaps = np.empty(contexts, np.int64), np.empty(contexts, np.int64)
    count = kernels.find_steps(
        *(address(predicted, WORD16), address(actual, WORD16), address(which, BYTE), n, contexts),
        *(address(buckets, BYTE, writable=True), address(gaps, SIZE, writable=True)),
        *(address(steps, WORD16, writable=True), many),
        *(address(sizes, SIZE, writable=True), address(first_gaps, SIZE, writable=True)),
    )
    if count != many:
        raise CodecError(f"{count} values change, not {many}: this is a mistake of ckpt's own")
    return buckets, gaps, steps, sizes, first_gaps


def write_sparse_steps(
    buckets: Array, gaps: Array, steps: Array, sizes: Array, first_gaps: Array, shifts: Array, out: Array
) -> int:
    """Code what `find_steps` returned. `shifts`: of each bucket, how many bits of a gap are told evenly.

    Returns how many bytes that takes, as `write_rows` does.
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


def read_sparse_steps(data: Array, predicted: Array, which: Array, sizes: Array, out: Array) -> bool:
    """Fill `out`; False if these are not the bytes of n words. `sizes`: how many values each bucket has."""
    n = out.size
    _check_sizes(n, predicted, which)
    return bool(
        kernels.read_sparse_steps(
            *(address(data, BYTE), data.size, address(predicted, WORD16), address(which, BYTE), n),
            *(address(sizes, SIZE), sizes.size, address(out, WORD16, writable=True)),
        )
    )


def read_sparse_plane(data: Array, counts: Array, shifts: Array, plane: Array) -> bool:
    """Fill a plane that is mostly zero; False if these are not its bytes.

    `counts`: how many values each context has, int64. `shifts`: how many bits of its gaps are even, at most 24; 255 if
    there are no gaps.
    """
    _check_sizes(counts.size, shifts)
    return bool(
        kernels.read_sparse_plane(
            *(address(data, BYTE), data.size, address(counts, SIZE), address(shifts, BYTE), counts.size),
            *(address(plane, BYTE, writable=True), plane.size),
        )
    )


def count_step_symbols(predicted: Array, actual: Array, which: Array, contexts: int) -> tuple[Array, Array, Array]:
    """Each value's bucket << 8 and symbol (uint16), how often they occur ((contexts, 108) uint32), and the bits that
    symbols leave, with `PADDING`. All but the counts are this thread's scratch."""
    n = actual.size
    _check_sizes(n, predicted, which)
    symbols, bits = thread_buffer("told", 2 * n).view(np.uint16), thread_buffer("bits", 2 * n + 2 * PADDING)
    counts = np.empty((contexts, STEP_SYMBOLS), np.uint32)
    used = kernels.count_step_symbols(
        *(address(predicted, WORD16), address(actual, WORD16), address(which, BYTE), n),
        *(address(symbols, WORD16, writable=True), address(counts, WORD32, writable=True), contexts),
        *(address(bits, BYTE, writable=True), bits.size, *scratch(kernels.count_step_symbols_scratch())),
    )
    return symbols, counts, _padded(bits, used)


def write_ans_steps(symbols: Array, weights: Array) -> tuple[Array, Array]:
    """16 states (uint32), and words (uint16, this thread's scratch) that tell the symbols.

    `weights`: (contexts, 108) uint32; those of a context add up to 4096, and none of a symbol that occurs is 0.
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
    """Fill `out`; False if states, words and bits are not those of n words."""
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


# --- steps of optimizers, arrays of float32. `codecs/kernels/optimizer_steps.c` explains the dialects.


def infer_gradients(m0: Array, m1: Array, gain: float, out: Array) -> None:
    """The gradients that lead from one first moment to the next."""
    _check_sizes(out.size, m0, m1)
    kernels.infer_gradients(_read(m0), _read(m1), out.size, gain, _write(out))


def infer_bfloat16_gradients(
    m0: Array, m1: Array, scale: float, kept: float, gain: float, form: int, out: Array
) -> None:
    """The same in bfloat16, as words, before they were multiplied by `scale`: zero wherever zero leads to `m1`."""
    _check_sizes(out.size, m0, m1)
    kernels.infer_bfloat16_gradients(
        _read(m0), _read(m1), out.size, scale, kept, gain, form, address(out, WORD16, writable=True)
    )


def count_bfloat16_matches(m0: Array, m1: Array, scale: float, kept: float, gain: float, form: int) -> int:
    """How many first moments come out to the bit if gradients were bfloat16 times `scale`."""
    _check_sizes(m1.size, m0)
    return int(kernels.count_bfloat16_matches(_read(m0), _read(m1), m1.size, scale, kept, gain, form))


def step_first_moments(m: Array, g: Array, kept: float, gain: float, form: int, out: Array) -> None:
    _check_sizes(out.size, m, g)
    kernels.step_first_moments(_read(m), _read(g), out.size, kept, gain, form, _write(out))


def step_second_moments(v: Array, g: Array, kept: float, gain: float, form: int, out: Array) -> None:
    _check_sizes(out.size, v, g)
    kernels.step_second_moments(_read(v), _read(g), out.size, kept, gain, form, _write(out))


def step_adam_torch(
    w: Array, m: Array, v: Array, weight_factor: float, step_size: float, bias2_root: float, eps: float, out: Array
) -> None:
    _step_adam(kernels.step_adam_torch, w, m, v, (weight_factor, step_size, bias2_root, eps), out)


def step_adam_fused(
    w: Array, m: Array, v: Array, weight_factor: float, step_size: float, bias2_root: float, eps: float, out: Array
) -> None:
    _step_adam(kernels.step_adam_fused, w, m, v, (weight_factor, step_size, bias2_root, eps), out)


def step_adam_deepspeed_cpu(
    w: Array, m: Array, v: Array, weight_factor: float, step_size: float, bias2_root: float, eps: float, out: Array
) -> None:
    _step_adam(kernels.step_adam_deepspeed_cpu, w, m, v, (weight_factor, step_size, bias2_root, eps), out)


def step_adam_apex(
    w: Array,
    m: Array,
    v: Array,
    weight_factor: float,
    step_size: float,
    bias2_factor: float,
    eps: float,
    bias1_factor: float,
    out: Array,
) -> None:
    _step_adam(kernels.step_adam_apex, w, m, v, (weight_factor, step_size, bias2_factor, eps, bias1_factor), out)


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
    """Weights some steps on, from the moments before and after these."""
    _check_sizes(out.size, w, m0, v0, m1, v1)
    kernels.extrapolate_weights(
        *(_read(w), _read(m0), _read(v0), _read(m1), _read(v1), out.size),
        *(weight_factor, old_direction, new_direction, _write(out)),
    )


def step_momentum(w: Array, b: Array, weight_factor: float, step_size: float, out: Array) -> None:
    """A step of gradient descent with momentum `b`."""
    _check_sizes(out.size, w, b)
    kernels.step_momentum(_read(w), _read(b), out.size, weight_factor, step_size, _write(out))


def mix(x: Array, y: Array, a: float, b: float, out: Array) -> None:
    """a x + b y."""
    _check_sizes(out.size, x, y)
    kernels.mix(_read(x), _read(y), out.size, a, b, _write(out))


def scale(x: Array, factor: float, out: Array) -> None:
    _check_sizes(out.size, x)
    kernels.scale(_read(x), out.size, factor, _write(out))


def _step_adam(
    kernel: Callable[..., int], w: Array, m: Array, v: Array, numbers: tuple[float, ...], out: Array
) -> None:
    _check_sizes(out.size, w, m, v)
    kernel(_read(w), _read(m), _read(v), out.size, *numbers, _write(out))


def _read(array: Array) -> int:
    return address(array, FLOAT32)


def _write(array: Array) -> int:
    return address(array, FLOAT32, writable=True)
