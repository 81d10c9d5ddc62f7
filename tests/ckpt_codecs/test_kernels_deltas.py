"""Every kernel of deltas against its twin in NumPy, at every level that this CPU runs."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import oracle.ans_steps
import oracle.byte_rows
import oracle.class_masks
import oracle.contexts
import oracle.float32_grid
import oracle.masked_steps
import oracle.optimizer_steps
import oracle.second_moments
import oracle.sparse_steps
import oracle.zigzag
from ckpt_codecs import CodecError
from ckpt_codecs.base import Array
from ckpt_codecs.native import deltas, library
from kernel_trials import Engine, Trial, Trials

TRIALS = Trials(
    deltas,
    oracle.zigzag,
    oracle.contexts,
    oracle.second_moments,
    oracle.float32_grid,
    oracle.byte_rows,
    oracle.class_masks,
    oracle.sparse_steps,
    oracle.masked_steps,
    oracle.ans_steps,
    oracle.optimizer_steps,
)
TWINS, PROTOTYPES, KERNELS = TRIALS.twins, TRIALS.prototypes, TRIALS.kernels
trial = TRIALS.of


# --- arguments


def words(random: np.random.Generator, n: int, dtype: Any) -> Array:
    """Random bits, or floats as weights are."""
    width = np.dtype(dtype).itemsize
    if random.random() < 0.4 or width == 1:
        return random.integers(0, 256, n * width, np.uint8).view(dtype)
    values = random.normal(0, 0.02, n).astype(np.float64 if width == 8 else np.float32)
    return values.view(dtype) if width > 2 else (values.view(np.uint32) >> 16).astype(np.uint16)


def near(random: np.random.Generator, before: Array) -> Array:
    """Words that differ by steps of some size where any do."""
    octaves = random.uniform(0, 8 * before.itemsize - 1)
    steps = np.exp2(random.uniform(0, octaves, before.size)).astype(np.int64) * random.choice([-1, 1], before.size)
    share = random.choice([0.0, 0.01, 0.1, 1.0])
    return before + np.where(random.random(before.size) < share, steps, 0).astype(before.dtype)


def floats(random: np.random.Generator, n: int, scale: float = 0.02) -> Array:
    """Float32 of any bits, or normal ones."""
    if random.random() < 0.3:
        return random.integers(0, 1 << 32, n, np.uint32).view(np.float32)
    return random.normal(0, scale, n).astype(np.float32)


def buckets(random: np.random.Generator, n: int, count: int) -> Array:
    return np.minimum(random.geometric(random.uniform(0.1, 1), n) - 1, count - 1).astype(np.uint8)


def damaged(random: np.random.Generator, data: Array) -> Array:
    """The bytes, cut, longer, or with some of them changed; often as they are."""
    way, size = random.integers(6), data.size
    if way == 0:
        return data[: random.integers(size + 1)].copy()
    if way == 1:
        return np.concatenate([data, random.integers(0, 256, random.integers(1, 9), np.uint8)])
    copy = data.copy()
    if way < 4 and size:
        copy[random.integers(0, size, 3)] ^= np.uint8(1 << random.integers(8))
    return copy


def read_by(read: Callable[..., bool], out: Array, *arguments: Any) -> tuple[bool, bytes]:
    """The verdict, and the output where it means anything."""
    accepted = read(*arguments, out)
    return accepted, out.tobytes() if accepted else b""


# --- what is tried of each kernel

DTYPES = (np.uint8, np.uint16, np.uint32, np.uint64)


def change(random: np.random.Generator, n: int, dtypes: Any = DTYPES) -> tuple[Array, Array]:
    before = words(random, n, random.choice(np.array(dtypes, object)))
    return before, near(random, before)


@trial("zigzag_bits")
def _(random: np.random.Generator, n: int) -> Trial:
    before, after = change(random, n)
    return lambda run: run.zigzag_bits(before, after)


@trial("split_zigzags")
def _(random: np.random.Generator, n: int) -> Trial:
    before, after = change(random, n)
    count = int(random.integers(1, before.itemsize + 1))

    def split(run: Engine) -> list[Array]:
        planes = [np.empty(n, np.uint8) for _ in range(count)]
        run.split_zigzags(before, after, planes)
        return planes

    return split


@trial("merge_zigzags")
def _(random: np.random.Generator, n: int) -> Trial:
    before, _ = change(random, n)
    planes = [words(random, n, np.uint8) for _ in range(random.integers(1, before.itemsize + 1))]

    def merge(run: Engine) -> Array:
        out = np.empty_like(before)
        run.merge_zigzags(before, planes, out)
        return out

    return merge


@trial("exponent_buckets")
def _(random: np.random.Generator, n: int) -> Trial:
    values, mantissa = words(random, n, np.uint16), int(random.choice([7, 10]))
    least, count = int(random.integers(256)), int(random.integers(1, 17))
    return lambda run: run.exponent_buckets(values, mantissa, least, count).copy()


@trial("count_contexts")
def _(random: np.random.Generator, n: int) -> Trial:
    which, count = buckets(random, n, int(random.choice([1, 16, 256]))), int(random.integers(1, 17))
    return lambda run: run.count_contexts(which, count)


@trial("gather")
def _(random: np.random.Generator, n: int) -> Trial:
    return moved(random, n, "gather")


@trial("scatter")
def _(random: np.random.Generator, n: int) -> Trial:
    return moved(random, n, "scatter")


def moved(random: np.random.Generator, n: int, name: str) -> Trial:
    which, plane = buckets(random, n, int(random.choice([1, 8, 256]))), words(random, n, np.uint8)

    def move(run: Engine) -> Array:
        out = np.empty(n, np.uint8)
        getattr(run, name)(which, plane, out)
        return out

    return move


@trial("root_units")
def _(random: np.random.Generator, n: int) -> Trial:
    second, shift = words(random, n, np.uint32), int(random.integers(-300, 300))
    return lambda run: run.root_units(second, shift)


@trial("growth_contexts")
def _(random: np.random.Generator, n: int) -> Trial:
    before, after = change(random, n, [np.uint32])
    least, count = int(random.integers(-128, 128)), int(random.integers(1, 17))
    return lambda run: run.growth_contexts(before, after, least, count)


@trial("apply_drift")
def _(random: np.random.Generator, n: int) -> Trial:
    columns = int(random.integers(1, 70))
    rows = n // columns
    by_row, by_column = (random.integers(-128, 128, size, np.int8) for size in (rows, columns))
    values = words(random, rows * columns, np.uint32)
    return lambda run: run.apply_drift(values, by_row, by_column)


def grid(random: np.random.Generator, n: int) -> tuple[Array, Array, Array]:
    before, after = change(random, n, [np.uint32])
    constant = np.full(n, random.integers(1, 255), np.uint8)
    of_values = np.clip((before >> 23 & 255).astype(np.int64) - random.integers(-5, 25), 1, 254).astype(np.uint8)
    return before, after, constant if random.random() < 0.3 else of_values


@trial("to_grid")
def _(random: np.random.Generator, n: int) -> Trial:
    predicted, actual, units = grid(random, n)
    return lambda run: [part.copy() for part in run.to_grid(predicted, actual, units)]


@trial("from_grid")
def _(random: np.random.Generator, n: int) -> Trial:
    predicted, actual, units = grid(random, n)
    symbols, depths, bits = (part.copy() for part in TWINS.to_grid(predicted, actual, units))
    hostile = random.random() < 0.7
    if hostile:
        symbols = np.resize(damaged(random, symbols), n) if symbols.size else symbols
        depths, bits = damaged(random, depths), damaged(random, bits)

    def read(run: Engine) -> Any:
        result = read_by(run.from_grid, np.empty(n, np.uint32), predicted, units, symbols, depths, bits)
        assert hostile or result == (True, actual.tobytes())
        return result

    return read


def rows_of_bytes(random: np.random.Generator, n: int) -> tuple[Array, int]:
    values = random.geometric(random.uniform(0.02, 1), n) - 1
    return (np.cumsum(values) % 255 if random.random() < 0.3 else values % 255).astype(np.uint8), max(1, n // 7)


@trial("write_rows")
def _(random: np.random.Generator, n: int) -> Trial:
    rows, columns = rows_of_bytes(random, n)
    room = int(random.integers(2 * n + 9))

    def write(run: Engine) -> tuple[int, bytes]:
        out = np.empty(room, np.uint8)
        used = run.write_rows(rows, columns, out)
        return used, out[:used].tobytes() if used <= room else b""

    return write


@trial("read_rows")
def _(random: np.random.Generator, n: int) -> Trial:
    rows, columns = rows_of_bytes(random, n)
    out = np.empty(2 * n + 9, np.uint8)
    data = damaged(random, out[: TWINS.write_rows(rows, columns, out)])
    return lambda run: read_by(run.read_rows, np.empty(n, np.uint8), data, columns)


def float16_words(random: np.random.Generator, n: int) -> tuple[Array, Array, Array, int]:
    before, after = change(random, n, [np.uint16])
    count = int(random.integers(1, 17))
    return before, after, buckets(random, n, count), count


@trial("count_changed")
def _(random: np.random.Generator, n: int) -> Trial:
    before, after = change(random, n, [np.uint16])
    return lambda run: run.count_changed(before, after)


def classed_words(random: np.random.Generator, n: int) -> tuple[Array, Array, tuple[int, int, int]]:
    """Words before and after, and what their buckets are: mantissa bits, least exponent, number of buckets."""
    before, after = change(random, n, [np.uint16])
    mantissa, count = int(random.choice([7, 10])), int(random.integers(1, 17))
    least = int(random.integers(256)) if random.random() < 0.5 else int(random.integers(100, 120))
    return before, after, (mantissa, least, count)


@trial("find_steps")
def _(random: np.random.Generator, n: int) -> Trial:
    predicted, actual, buckets = classed_words(random, n)
    changes = int(np.count_nonzero(predicted != actual))
    return lambda run: run.find_steps(predicted, actual, *buckets, changes)


def sparse(random: np.random.Generator, n: int) -> tuple[tuple[Array, ...], Array, tuple[int, int, int]]:
    """What is written, the predictions and what their buckets are."""
    predicted, actual, buckets = classed_words(random, n)
    steps = TWINS.find_steps(predicted, actual, *buckets, int(np.count_nonzero(predicted != actual)))
    shifts = random.integers(0, 25, buckets[2]).astype(np.uint8) // random.integers(1, 9, dtype=np.uint8)
    return (*steps, shifts), predicted, buckets


@trial("write_sparse_steps")
def _(random: np.random.Generator, n: int) -> Trial:
    steps, _, _ = sparse(random, n)
    room = int(random.integers(6 * n + 40))

    def write(run: Engine) -> tuple[int, bytes]:
        out = np.empty(room, np.uint8)
        used = run.write_sparse_steps(*steps, out)
        return used, out[:used].tobytes() if used <= room else b""

    return write


@trial("read_sparse_steps")
def _(random: np.random.Generator, n: int) -> Trial:
    steps, predicted, buckets = sparse(random, n)
    out = np.empty(99 * n + 99, np.uint8)
    data = damaged(random, out[: TWINS.write_sparse_steps(*steps, out)])
    return lambda run: read_by(run.read_sparse_steps, np.empty(n, np.uint16), data, predicted, *buckets)


@trial("fill_masked_tables")
def _(random: np.random.Generator, n: int) -> Trial:
    room = int(random.choice([n, 1 << 19]))

    def fill(run: Engine) -> tuple[int, bytes]:
        out = np.zeros(room // 8, np.uint64).view(np.uint8)
        return run.fill_masked_tables(out), out.tobytes()

    return fill


def masked_words(random: np.random.Generator, n: int) -> tuple[Array, Array, int]:
    """Words before and after, of which a part changes that is small as often as not, and the bits of mantissas."""
    before, after = change(random, n, [np.uint16])
    some = random.random(n) < random.choice([0.001, 0.02, 0.1, 0.3])
    return before, np.where(some, after, before), int(random.choice([7, 10]))


@trial("write_masked_steps")
def _(random: np.random.Generator, n: int) -> Trial:
    arguments = masked_words(random, n)

    def write(run: Engine) -> Array | None:
        data = run.write_masked_steps(*arguments)
        return None if data is None else data.copy()

    return write


def masked(random: np.random.Generator, n: int) -> tuple[Array, Array, int, bytes | None]:
    """Bytes, whole or damaged; the words before, the bits of mantissas, and the words after if the bytes are whole."""
    before, after, mantissa = masked_words(random, n)
    data = TWINS.write_masked_steps(before, after, mantissa)
    coded = data is not None and data.size > 0
    if not coded:
        data = random.integers(0, 256, int(random.integers(40)), np.uint8)
    hostile = damaged(random, data)
    return hostile, before, mantissa, after.tobytes() if coded and hostile.tobytes() == data.tobytes() else None


@trial("read_masked_steps")
def _(random: np.random.Generator, n: int) -> Trial:
    data, before, mantissa, expected = masked(random, n)

    def read(run: Engine) -> Any:
        result = read_by(
            lambda data, out: run.read_masked_steps(data, before, mantissa, out), np.empty(n, np.uint16), data
        )
        assert expected is None or result == (True, expected)
        in_place = before.copy()
        assert run.read_masked_steps(data, in_place, mantissa, in_place) == result[0]
        assert not result[0] or in_place.tobytes() == result[1]
        return result

    return read


@trial("list_masked_steps")
def _(random: np.random.Generator, n: int) -> Trial:
    data, before, mantissa, _ = masked(random, n)
    return lambda run: run.list_masked_steps(data, before, mantissa)


@trial("count_step_symbols")
def _(random: np.random.Generator, n: int) -> Trial:
    arguments = float16_words(random, n)
    return lambda run: [part.copy() for part in run.count_step_symbols(*arguments)]


def weights_for(counts: Array) -> Array:
    """Weights that add up to 4096: at least 1 for each symbol that occurs."""
    weights = (counts * 3900.0 / np.maximum(counts.sum(axis=1, keepdims=True), 1)).astype(np.uint32)
    weights = np.maximum(weights, counts > 0).astype(np.uint32)
    weights[np.arange(len(weights)), weights.argmax(axis=1)] += np.uint32(4096) - weights.sum(axis=1, dtype=np.uint32)
    return weights


@trial("write_ans_steps")
def _(random: np.random.Generator, n: int) -> Trial:
    symbols, counts, _ = TWINS.count_step_symbols(*float16_words(random, n))
    weights = weights_for(counts)
    return lambda run: [part.copy() for part in run.write_ans_steps(symbols, weights)]


@trial("read_ans_steps")
def _(random: np.random.Generator, n: int) -> Trial:
    predicted, actual, which, count = float16_words(random, n)
    symbols, counts, bits = TWINS.count_step_symbols(predicted, actual, which, count)
    weights = weights_for(counts)
    states, encoded = TWINS.write_ans_steps(symbols, weights)
    hostile = random.random() < 0.7
    if hostile:
        bits = damaged(random, bits)
        states = np.resize(damaged(random, states.view(np.uint8)), 64).view(np.uint32)
        data = damaged(random, encoded.view(np.uint8))
        encoded = data[: data.size & ~1].copy().view(np.uint16)

    def read(run: Engine) -> Any:
        arguments = predicted, which, weights, states, encoded, bits
        result = read_by(run.read_ans_steps, np.empty(n, np.uint16), *arguments)
        assert hostile or result == (True, actual.tobytes())
        return result

    return read


@trial("count_bfloat16_matches")
def _(random: np.random.Generator, n: int) -> Trial:
    m0, g = floats(random, n), floats(random, n).view(np.uint32) & np.uint32(0xFFFF0000)
    m1, form = floats(random, n), int(random.integers(3))
    factor = float(random.choice([0.7, 1.0, 1e300]))
    if random.random() < 0.7:  # they do match
        TWINS.scale(g.view(np.float32).copy(), factor, g.view(np.float32))
        TWINS.step_first_moments(m0, g.view(np.float32), 0.9, 0.1, form, m1)
    return lambda run: run.count_bfloat16_matches(m0, m1, factor, 0.9, 0.1, form)


def elementwise(
    name: str, inputs: int, scalars: int, has_form: bool = False, dtype: Any = np.float32, of_adam: bool = False
) -> None:
    """Register a kernel of float32 arrays, then numbers, perhaps a form, and its output.

    `of_adam`: `adam_steps` takes its name and the arrays, and what that returns takes the numbers.
    """

    def make(random: np.random.Generator, n: int) -> Trial:
        arrays = [floats(random, n) for _ in range(inputs)]
        if random.random() < 0.3:
            arrays[-1] = arrays[0].copy()  # where nothing changes
        numbers = [float(random.choice([0.1, 0.9, 1.0, -1e-3, 0.0, 1e-8, 1e300])) for _ in range(scalars)]
        form = [int(random.integers(3))] if has_form else []

        def run_it(run: Engine) -> Array:
            out = np.empty(n, dtype)
            if of_adam:
                return run.adam_steps(name, *arrays, out)(*numbers)
            getattr(run, name)(*arrays, *numbers, *form, out)
            return out

        return run_it

    TRIALS[name] = make


elementwise("infer_gradients", 2, 1)
elementwise("infer_bfloat16_gradients", 2, 3, True, np.uint16)
elementwise("step_first_moments", 2, 2, True)
elementwise("step_second_moments", 2, 2, True)
for kernel in ("step_adam_torch", "step_adam_fused", "step_adam_deepspeed_cpu"):
    elementwise(kernel, 3, 4, of_adam=True)
elementwise("step_adam_apex", 3, 5, of_adam=True)
elementwise("extrapolate_weights", 5, 3)
elementwise("step_momentum", 2, 2)
elementwise("mix", 2, 2)
elementwise("scale", 1, 1)


# --- the tests


def test_every_kernel_has_a_twin() -> None:
    assert set(KERNELS) == set(TRIALS)


@pytest.mark.parametrize("name", KERNELS)
def test_delta_kernel_does_what_its_twin_does(name: str) -> None:
    @given(st.integers(0, 1 << 32), st.integers(0, 700))
    @example(0, 0)
    @example(1, 1)
    @example(2, 2)
    def check(seed: int, n: int) -> None:
        TRIALS.agree(name, seed, n)

    check()


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", KERNELS)
def test_delta_kernel_does_what_its_twin_does_with_a_large_chunk(name: str) -> None:
    slow = name.endswith(("_rows", "_plane", "_sparse_steps"))  # the twin goes bit by bit
    for seed in range(4):
        TRIALS.agree(name, seed, 9001 if slow else (1 << 18) + 3)


@pytest.mark.parametrize("name", KERNELS)
def test_delta_kernels_refuse_sizes_that_do_not_fit(name: str) -> None:
    kernel, types = getattr(deltas.kernels, name), PROTOTYPES[name].arguments
    for bad in (-1, library.INT64(1 << 63).value):
        nowhere = [None if kind == "pointer" else bad if kind == "i64" else 1 for kind in types]
        with pytest.raises(CodecError, match="sizes do not fit"):
            kernel(*nowhere)
    too_many = [None if kind == "pointer" else (1 << 28) + 1 if kind == "i64" else 1 for kind in types]
    with pytest.raises(CodecError, match="sizes do not fit"):
        kernel(*too_many)
    _, arguments = TRIALS.arguments_of(name)
    for i, kind in enumerate(types):
        if kind == "i64":
            with pytest.raises(CodecError, match="sizes do not fit"):
                kernel(*arguments[:i], -1, *arguments[i + 1 :])


@pytest.mark.parametrize("name", [name for name in KERNELS if "int" in PROTOTYPES[name].arguments])
def test_numbers_that_make_no_sense_are_refused(name: str) -> None:
    _, arguments = TRIALS.arguments_of(name)
    for i, kind in enumerate(PROTOTYPES[name].arguments):
        for bad in (-(1 << 31), (1 << 31) - 1) if kind == "int" else ():
            with pytest.raises(CodecError, match="sizes do not fit"):
                getattr(deltas.kernels, name)(*arguments[:i], bad, *arguments[i + 1 :])


def test_values_that_would_leave_a_table_are_refused() -> None:
    """No file can hold them: they are computed by ckpt itself."""
    zeros, ones, out = np.zeros(9, np.uint16), np.ones(9, np.uint16), np.empty(99, np.uint8)
    seventeenth = np.full(9, 16, np.uint8)
    none = np.zeros(9, np.uint8)
    weights = np.zeros((1, 108), np.uint32)
    refused: list[Callable[[], Any]] = [
        lambda: deltas.write_rows(np.full(9, 255, np.uint8), 3, out),
        lambda: deltas.find_steps(zeros, ones, 7, 0, 17, 9),
        lambda: deltas.find_steps(zeros, ones, 7, 0, 1, 8),
        lambda: deltas.find_steps(zeros, ones, 7, 0, 1, 10),
        lambda: deltas.read_sparse_steps(out, zeros, 7, 0, 17, ones),
        lambda: deltas.count_step_symbols(zeros, ones, seventeenth, 16),
        lambda: deltas.write_ans_steps(zeros, weights),
        lambda: deltas.read_ans_steps(zeros, none, weights, np.zeros(16, np.uint32), zeros, out, ones),
    ]
    for call in refused:
        with pytest.raises(CodecError, match="a bug in ckpt"):
            call()


OF_ANY_SIZE = ("write_rows", "read_rows", "write_sparse_steps", "write_ans_steps", "fill_masked_tables")
"""Kernels whose last array has a size of its own."""


def test_arrays_of_other_sizes_are_refused() -> None:
    for name, make in TRIALS.items():
        inputs: list[Any] = []

        def note(function: str, *arguments: Any, inputs: list[Any] = inputs) -> Any:
            inputs.append((function, *arguments))
            raise InterruptedError

        functions = {function: partial(note, function) for function in (*TRIALS, "adam_steps")}
        with pytest.raises(InterruptedError):
            make(np.random.default_rng(1), 50)(SimpleNamespace(**functions))
        function, *arguments, last = inputs[0]
        if not isinstance(last, np.ndarray) or name in OF_ANY_SIZE:
            continue
        with pytest.raises(CodecError, match="a bug in ckpt"):
            getattr(deltas, function)(*arguments, np.concatenate([last, last[:1]]))
