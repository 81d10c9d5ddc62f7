"""Every lossless kernel against its twin in NumPy, at every level that this CPU runs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import oracle.bfloat16
import oracle.chunks
import oracle.entropy
import oracle.float16
import oracle.huffman
import oracle.masked
import oracle.planes
from ckpt_codecs import CodecError
from ckpt_codecs.base import Array
from ckpt_codecs.format_ids import CONSTANT, DIGITS, HUFFMAN, PACKED7, RUNS, STORED
from ckpt_codecs.native import library, lossless
from cpu_levels import LEVELS, at_level
from kernel_trials import Engine, Trial, Trials

TRIALS = Trials(
    lossless,
    oracle.entropy,
    oracle.planes,
    oracle.bfloat16,
    oracle.float16,
    oracle.masked,
    oracle.chunks,
)
TWINS, PROTOTYPES, KERNELS = TRIALS.twins, TRIALS.prototypes, TRIALS.kernels
trial = TRIALS.of


# --- arguments


def plane(random: np.random.Generator, n: int) -> Array:
    """Of all symbols or of few, of equal shares or not, or mostly of one."""
    alphabet = int(random.choice([1, 2, 3, 4, 7, 16, 17, 40, 128, 256]))
    shares = random.random(alphabet) ** random.choice([0, 1, 4, 20])
    symbols = random.permutation(256)[:alphabet] if random.random() < 0.5 else np.arange(alphabet)
    values = symbols[random.choice(alphabet, n, p=shares / shares.sum())]
    if random.random() < 0.3:
        values = np.where(random.random(n) < random.choice([0.76, 0.9, 0.999]), symbols[0], values)
    return values.astype(np.uint8)


def words(random: np.random.Generator, n: int, widths: tuple[int, ...] = (1, 2, 4, 8)) -> Array:
    """Bytes of one kind in each place, or values as training makes them."""
    width = int(random.choice(widths))
    if width == 1 or random.random() < 0.5:
        parts = [plane(random, n) for _ in range(width)]
        return np.ascontiguousarray(np.stack(parts, axis=-1)).reshape(-1).view(f"u{width}")
    values = random.normal(0, 0.02, n) * (random.random(n) < random.choice([1.0, 0.5]))
    if width == 2:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(f"f{width}").view(f"u{width}")


def effort(random: np.random.Generator) -> tuple[float, bool]:
    """`max_ratio` and `sampled`."""
    return float(random.choice([0.6, 0.95, 1.0])), bool(random.integers(2))


def damaged(random: np.random.Generator, data: Array, head: int) -> Array:
    """The bytes, cut, longer, or with some changed, in the first ones as often as anywhere; often as they are."""
    way, size = random.integers(7), data.size
    if way == 0:
        return data[: random.integers(size + 1)].copy()
    if way == 1:
        return np.concatenate([data, random.integers(0, 256, random.integers(1, 9), np.uint8)])
    copy = data.copy()
    if way < 5 and size:
        places = random.integers(0, min(size, head) if way == 2 else size, 3)
        copy[places] = random.integers(0, 256, 3) if way < 4 else copy[places] ^ (1 << random.integers(8))
    return copy


def written(write: Callable[..., int], size: int, *arguments: Any) -> Array:
    """The chunk, with its first byte."""
    out = np.full(size, 7, np.uint8)
    return out[: write(*arguments, out)].copy()


def read_by(read: Callable[..., bool], *arguments: Any) -> tuple[bool, bytes]:
    """The verdict, and the output, which is the last argument, where it means anything."""
    accepted = read(*arguments)
    return accepted, arguments[-1].tobytes() if accepted else b""


# --- what is tried of each kernel


@trial("write_planes")
def _(random: np.random.Generator, n: int) -> Trial:
    values, floats = words(random, n), bool(random.integers(2))
    given, size = effort(random), 1 + values.itemsize * (5 + n)
    return lambda run: written(run.write_planes, size, values, floats, *given)


@trial("read_planes")
def _(random: np.random.Generator, n: int) -> Trial:
    values, floats = words(random, n), bool(random.integers(2))
    data = written(TWINS.write_planes, 1 + values.itemsize * (5 + n), values, floats, *effort(random))
    data = damaged(random, data, 5 * values.itemsize + 80)
    return lambda run: read_by(run.read_planes, data, floats, np.empty_like(values))


def moments(random: np.random.Generator, n: int) -> tuple[Array, Array | None, int]:
    """Values by rows and columns, their base if they have one, and values in a row."""
    columns = max(int(random.choice([1, 7, 64, 600, 3000])), 1)
    rows = max(n // columns, 1)
    scales = np.exp(random.normal(0, 3, columns)) * np.exp(random.normal(0, 2, (rows, 1)))
    second = (scales * random.chisquare(3, (rows, columns)) * 1e-8).astype(np.float32).reshape(-1)
    first = np.sqrt(second) * random.normal(0, 1, second.size).astype(np.float32)
    if random.random() < 0.3:
        first = np.where(random.random(second.size) < 0.1, np.float32(0), first)
    if random.random() < 0.2:
        first = random.integers(0, 1 << 32, second.size, np.uint32).view(np.float32)
    if random.random() < 0.2:
        second = random.integers(0, 1 << 32, second.size, np.uint32).view(np.float32)
    bits = [part.view(np.uint32) for part in (first, second)]
    narrow = [part if random.random() < 0.6 else (part >> 16).astype(np.uint16) for part in bits]
    return narrow[0], narrow[1] if random.random() < 0.6 else None, columns


def residuals_size(values: Array, columns: int) -> int:
    return 1 + 5 * (values.itemsize + 3) + values.nbytes + 2 + 2 * (values.size // columns)


@trial("write_residuals")
def _(random: np.random.Generator, n: int) -> Trial:
    values, base, columns = moments(random, n)
    given = values, base, columns, *effort(random), 0.6
    return lambda run: written(run.write_residuals, residuals_size(values, columns), *given)


@trial("read_residuals")
def _(random: np.random.Generator, n: int) -> Trial:
    values, base, columns = moments(random, n)
    size = residuals_size(values, columns)
    data = written(TWINS.write_residuals, size, values, base, columns, *effort(random), 0.6)
    if not data.size:  # nothing would be gained: any residuals will do
        sizes = [*[values.size] * (values.itemsize - 1), 2, *[values.size // columns] * 2, values.size]
        data = random.integers(0, 256, size, np.uint8)
        data[1 : 1 + 5 * len(sizes)] = np.frombuffer(
            b"".join(bytes([0]) + n.to_bytes(4, "little") for n in sizes), "u1"
        )
    data = damaged(random, data, 5 * values.itemsize + 80)
    return lambda run: read_by(run.read_residuals, data, base, columns, np.empty_like(values))


def streams(random: np.random.Generator, n: int) -> tuple[list[int], Array]:
    """Planes of these sizes, together of n bytes or so, behind the room for their directory."""
    planes = [plane(random, size) for size in random.integers(0, n + 1, random.integers(1, 5)).tolist()]
    return [one.size for one in planes], np.concatenate([np.zeros(1 + 5 * len(planes), np.uint8), *planes])


@trial("write_streams")
def _(random: np.random.Generator, n: int) -> Trial:
    sizes, planes = streams(random, n)
    given = list(zip(*(effort(random) for _ in sizes), strict=True))

    def write(run: Engine) -> Array:
        out = planes.copy()
        return out[: run.write_streams(sizes, *given, out)]

    return write


@trial("read_streams")
def _(random: np.random.Generator, n: int) -> Trial:
    sizes, chunk = streams(random, n)
    given = list(zip(*(effort(random) for _ in sizes), strict=True))
    source = chunk[: TWINS.write_streams(sizes, *given, chunk)]
    directory = source[1 : 1 + 5 * len(sizes)].reshape(-1, 5)
    kinds = directory[:, 0].tolist()
    lengths = np.ascontiguousarray(directory[:, 1:]).view("<u4").reshape(-1).tolist()
    starts = np.cumsum([1 + 5 * len(sizes), *lengths]).tolist()
    if random.random() < 0.7:
        begin = starts[0]
        changed = damaged(random, source[begin:], 60)
        source = np.resize(np.concatenate([source[:begin], changed]), source.size)
    if random.random() < 0.2:
        kinds[random.integers(len(kinds))] = int(random.integers(9))
    places = np.cumsum([0, *sizes]).tolist()

    def read(run: Engine) -> Any:
        out = np.zeros(places[-1], np.uint8)
        done = run.read_streams(source, kinds, starts, sizes, places[:-1], out)
        return done, out[: places[done]].tobytes()

    return read


@trial("entropy_code")
def _(random: np.random.Generator, n: int) -> Trial:
    values = plane(random, n)

    def code(run: Engine) -> Array:
        out = np.zeros(n, np.uint8)
        return out[: run.entropy_code(values, out)]

    return code


@trial("estimate_bits")
def _(random: np.random.Generator, n: int) -> Trial:
    values = plane(random, n)
    return lambda run: run.estimate_bits(values)


@trial("split_planes")
def _(random: np.random.Generator, n: int) -> Trial:
    values, floats = words(random, n), bool(random.integers(2))
    return lambda run: run.split_planes(values, floats)


@trial("to_bfloat16")
def _(random: np.random.Generator, n: int) -> Trial:
    values = words(random, n, (4,))

    def cast(run: Engine) -> Array:
        out = np.empty(n, np.uint16)
        run.to_bfloat16(values, out)
        return out

    return cast


@trial("to_float16")
def make_float16(random: np.random.Generator, n: int) -> Trial:
    values = random.integers(0, 1 << 32, n, np.uint32)
    near = random.random(n) < 0.5  # the sizes that float16 has, and ties
    values[near] = values[near] % (48 << 23) + (96 << 23) & 0xFFFFF000

    def run(run: Engine) -> Any:
        out = np.zeros(n, np.uint16)
        run.to_float16(values, out)
        return out

    return run


@trial("from_float16")
def make_from_float16(random: np.random.Generator, n: int) -> Trial:
    halves = random.integers(0, 1 << 16, n, np.uint16)

    def run(run: Engine) -> Any:
        out = np.zeros(n, np.uint32)
        run.from_float16(halves, out)
        return out

    return run


@trial("is_bfloat16_of")
def _(random: np.random.Generator, n: int) -> Trial:
    values, copy = words(random, n, (4,)), np.empty(n, np.uint16)
    TWINS.to_bfloat16(values, copy)
    if n and random.random() < 0.3:
        copy[random.integers(n)] ^= np.uint16(1 << random.integers(16))
    if n and random.random() < 0.2:
        values[random.integers(n)] = 0xFF800001
    return lambda run: run.is_bfloat16_of(values, copy)


@trial("count_masked")
def _(random: np.random.Generator, n: int) -> Trial:
    values = words(random, n)
    mask = (
        int(random.integers(1 << 8 * values.itemsize, dtype=np.uint64, endpoint=False)) if random.random() < 0.5 else 0
    )
    mask = mask or int(values[0] if n else 1)
    value = (int(values[random.integers(n)]) if n else 0) & mask
    return lambda run: run.count_masked(values, mask, value)


# --- the tests


def test_every_kernel_has_a_twin() -> None:
    assert set(KERNELS) == set(TRIALS)


@pytest.mark.parametrize("name", KERNELS)
def test_lossless_kernel_does_what_its_twin_does(name: str) -> None:
    @given(st.integers(0, 1 << 32), st.one_of(st.integers(0, 700), st.integers(2040, 9000)))
    @example(0, 0)
    @example(1, 1)
    @example(2, 2)
    @example(3, 31)
    def check(seed: int, n: int) -> None:
        TRIALS.agree(name, seed, n)

    check()


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", KERNELS)
def test_lossless_kernel_does_what_its_twin_does_with_a_large_chunk(name: str) -> None:
    for seed in range(3):
        TRIALS.agree(name, seed, (1 << 17) + 3)


def test_streams_of_every_kind_are_written_by_both() -> None:
    random, kinds = np.random.default_rng(0), set()
    planes = [(plane(random, n), False) for n in (100, 3000, 3001, 9000, 20_000) * 8]
    for values, sampled in (*planes, (random.integers(0, 128, 9001, np.uint8), True)):
        given = [values.size], [1.0], [sampled]
        out = np.concatenate([np.zeros(6, np.uint8), values])
        expected, again = out.copy(), np.empty(values.size, np.uint8)
        end = TWINS.write_streams(*given, expected)
        assert lossless.write_streams(*given, out) == end
        assert out[1:end].tobytes() == expected[1:end].tobytes()
        if out[1] != STORED:
            assert lossless.read_streams(out[:end], [int(out[1])], [6, end], [values.size], [0], again) == 1
            assert again.tobytes() == values.tobytes()
        kinds.add(int(out[1]))
    assert kinds == {STORED, CONSTANT, PACKED7, HUFFMAN, RUNS, DIGITS}


@pytest.mark.parametrize(
    "lengths", [[1, 1], [*range(1, 12), 11], [11] * 2 + [1] + [10] * 511, [8] * 256, [2, 2, 2, 3, 3]]
)
def test_codes_of_any_shape_are_read(lengths: list[int]) -> None:
    """Complete codes that our own writer would not choose, and some that are not complete."""
    random = np.random.default_rng(0)
    lengths = lengths[:256]
    code = oracle.huffman.Code(np.pad(np.array(lengths), (0, 256 - len(lengths))), np.zeros((8, 256), np.int64))
    values = random.integers(0, len(lengths), 5000).astype(np.uint8)
    source = np.frombuffer(oracle.huffman.write_huffman(values, code), np.uint8)
    is_complete = sum(2.0**-length for length in lengths) == 1
    for level in LEVELS:
        plane = np.zeros(values.size, np.uint8)
        with at_level(level):
            done = lossless.read_streams(source, [HUFFMAN], [0, source.size], [plane.size], [0], plane)
        assert done == is_complete
        assert not is_complete or plane.tobytes() == values.tobytes()


def is_refused(name: str, arguments: list[Any]) -> bool:
    if PROTOTYPES[name].result == "double":
        return getattr(lossless.kernels, name)(*arguments) == -1
    with pytest.raises(CodecError, match="sizes do not fit"):
        getattr(lossless.kernels, name)(*arguments)
    return True


@pytest.mark.parametrize("name", PROTOTYPES)
def test_lossless_kernels_refuse_sizes_that_do_not_fit(name: str) -> None:
    types = PROTOTYPES[name].arguments
    for bad in (-1, library.INT64(1 << 63).value, (1 << 28) + 1):
        assert is_refused(name, [None if kind == "pointer" else bad if kind == "i64" else 1 for kind in types])
    if name.endswith("_scratch"):
        return
    _, arguments = TRIALS.arguments_of(name)
    for i, kind in enumerate(types):
        if kind == "i64":
            assert is_refused(name, [*arguments[:i], -1, *arguments[i + 1 :]])


@pytest.mark.parametrize("name", [name for name in KERNELS if name.startswith(("write", "read", "entropy"))])
def test_too_little_scratch_is_refused(name: str) -> None:
    _, arguments = TRIALS.arguments_of(name)
    for size in (0, 1, 4096, 1 << 19):
        assert is_refused(name, [*arguments[:-1], size])


def test_arrays_of_other_sizes_are_refused() -> None:
    four, two, short = np.zeros(90, np.uint32), np.zeros(90, np.uint16), np.zeros(89, np.uint16)
    out, bytes_, small = np.zeros(2000, np.uint8), np.zeros(90, np.uint8), np.zeros(80, np.uint8)
    refused: list[Callable[[], Any]] = [
        lambda: lossless.to_bfloat16(four, short),
        lambda: lossless.to_float16(four, short),
        lambda: lossless.from_float16(short, four),
        lambda: lossless.is_bfloat16_of(four, short),
        lambda: lossless.to_bfloat16(two, two),
        lambda: lossless.write_planes(four, True, 1.0, True, out[:380]),
        lambda: lossless.write_planes(four[::2], True, 1.0, True, out),
        lambda: lossless.write_residuals(four, short, 9, 1.0, True, 0.6, out),
        lambda: lossless.write_residuals(four, four, 11, 1.0, True, 0.6, out),
        lambda: lossless.write_residuals(bytes_, None, 9, 1.0, True, 0.6, out),
        lambda: lossless.write_residuals(four, bytes_, 9, 1.0, True, 0.6, out),
        lambda: lossless.write_residuals(four, None, 9, 1.0, True, 0.6, out[:400]),
        lambda: lossless.read_residuals(out, short, 9, four),
        lambda: lossless.read_residuals(out, None, 91, four),
        lambda: lossless.read_residuals(out, None, 0, four),
        lambda: lossless.write_streams([90], [1.0], [True], bytes_),
        lambda: lossless.write_streams([1] * 65, [1.0] * 65, [True] * 65, out),
        lambda: lossless.read_streams(bytes_, [1], [0, 91], [90], [0], out),
        lambda: lossless.read_streams(bytes_, [1], [5, 4], [90], [0], out),
        lambda: lossless.read_streams(bytes_, [1], [-1, 1], [90], [0], out),
        lambda: lossless.read_streams(bytes_, [1], [0, 1], [90], [1911], out),
        lambda: lossless.read_streams(bytes_, [1], [0, 1], [90], [-1], out),
        lambda: lossless.read_streams(bytes_, [1], [0, 1], [-1], [0], out),
        lambda: lossless.entropy_code(bytes_, small),
        lambda: lossless.entropy_code(four, small),
        lambda: lossless.estimate_bits(four),
    ]
    for call in refused:
        with pytest.raises(CodecError, match="a bug in ckpt"):
            call()
