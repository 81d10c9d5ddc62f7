"""The arithmetic of lossy codecs: kernels and what does without Numba give the same bits, whatever they are given."""

from collections.abc import Callable, Sequence
from itertools import product
from types import ModuleType

import numpy as np
import pytest

from ckpt_codecs.lossy import kernels, lattice, portable
from ckpt_codecs.lossy.model import FAST, HALF, LEAST, SLOW
from ckpt_formats.tensor import Array
from held import bits

F32 = np.float32
Make = Callable[..., Array]
SHAPES = [(1, 1), (1, 50), (50, 1), (7, 33), (64, 32), (33, 100), (130, 48), (5, 512)]
EACH = pytest.mark.parametrize("shape", SHAPES, ids=str)


def same(name: str, given: Sequence[object], *outputs: Array) -> None:
    """Both engines, each on outputs of its own: the same result, and the same in every output."""
    found = []
    for engine in (kernels, portable):
        mine = [out.copy() for out in outputs]
        found.append((repr(getattr(engine, name)(*given, *mine)), [bits(out) for out in mine]))
    assert found[0] == found[1]


def room(*shape: int, dtype: type = F32) -> Array:
    """Full of what nothing makes."""
    return np.full(shape, -77, dtype)


def normal(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def any_bits(shape: tuple[int, ...], seed: int = 0) -> Array:
    """All kinds of float32 but what is no number: denormals, both zeros, the largest."""
    words = np.random.default_rng(seed).integers(0, 1 << 32, shape, np.uint32)
    words[np.random.default_rng(seed + 1).random(shape) < 0.2] &= np.uint32(0x807FFFFF)
    words[np.random.default_rng(seed + 2).random(shape) < 0.1] &= np.uint32(0x80000000)
    found = words.view(F32)
    return np.where(np.isfinite(found), found, F32(1.5))


def positive(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.abs(any_bits(shape, seed))


def scales(shape: tuple[int, int], seed: int = 0) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    return tuple(lattice.power(random.integers(-200, 200, size)) for size in shape)  # type: ignore[return-value]


@EACH
@pytest.mark.parametrize("width", [1, 4, 13, 32, 40, 64])
def test_products_have_one_order_of_sums(shape: tuple[int, int], width: int) -> None:
    n, m = shape
    a, x, y, b = normal(shape), normal((m, width), 1), normal((n, width), 2), normal((width, m), 3)
    same("times", (a, x), room(n, width))
    same("turned_times", (a, y), room(m, width))
    assert bits(subtracted(kernels, a, y, b)) == bits(subtracted(portable, a, y, b))


def subtracted(engine: ModuleType, y: Array, p: Array, b: Array) -> Array:
    made = y.copy()
    engine.subtract(made, p, b)
    return made


@EACH
@pytest.mark.parametrize("size", [1, 1e-120, 0])
def test_reflections(shape: tuple[int, int], size: float) -> None:
    n, k = max(shape), min(shape)
    y = normal((n, k)).astype(np.float64) * size
    y[:, k // 2] = 0
    found = []
    for engine in (kernels, portable):
        w, t = room(n, k, dtype=np.float64), room(k, k, dtype=np.float64)
        engine.reflect(y.copy(), w, t)
        found.append((bits(w), bits(t)))
    assert found[0] == found[1]


@EACH
def test_passes_over_second_moments(shape: tuple[int, int]) -> None:
    n, m = shape
    random = np.random.default_rng(0)
    rows, columns = (random.integers(-900, 900, size, np.int32) for size in shape)
    codes, zeros = random.integers(-5000, 5000, shape, np.int32), random.integers(0, 2, shape, np.int32)
    for values in (positive(shape), normal(shape) ** 2, np.zeros(shape, F32)):
        words = values.view(np.uint32)
        same("sums", (words, values), room(n, dtype=np.float64), room(m, dtype=np.float64))
        same("level_sums", (words,), room(n, dtype=np.int64), room(m, dtype=np.int64))
        for step in (1, 3, 32):
            given = words, rows, columns, lattice.fine(), 1 / step
            same("residuals", given, room(n, m, dtype=np.int32))
    for coded, holed in product((True, False), repeat=2):
        same("from_levels", (rows, columns, 7, codes, zeros, coded, holed, lattice.values()), room(n, m))


@EACH
@pytest.mark.parametrize("make", [normal, any_bits])
def test_passes_over_weights_and_first_moments(shape: tuple[int, int], make: Make) -> None:
    new, old, true, second = (make(shape, seed) for seed in range(4))
    for flag in (True, False):
        same("forward", (new, old, flag, *scales(shape)), room(*shape))
        same("back", (new, *scales(shape), old, flag), room(*shape))
        same("momentum", (F32(0.3), new, old, second, flag), room(*shape))
        same("told", (new, old, second, flag, true))
    same("direction", (new, second, *scales(shape)), room(*shape))


@EACH
@pytest.mark.parametrize("step", [1e-3, 0.4, 7.0])
def test_quantising_and_back(shape: tuple[int, int], step: float) -> None:
    values, near = normal(shape), np.array([0, 0.7, 1.6, 2.5], F32)
    codes, sizes, counts = np.zeros(shape, np.int32), np.zeros(4), np.zeros(4, np.int64)
    same("quantise", (values, F32(step), F32(0.4)), codes, sizes, counts)
    kernels.quantise(values, F32(step), F32(0.4), codes, sizes, counts)
    same("from_codes", (codes, near, F32(step)), room(*shape))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_what_has_no_multiple_is_told(value: float) -> None:
    values = np.array([[1, value, 2]], F32)
    for engine in (kernels, portable):
        sums = np.zeros(4), np.zeros(4, np.int64)
        assert engine.quantise(values, F32(1e-3), F32(0.5), np.zeros((1, 3), np.int32), *sums) == -1
        assert engine.is_finite(values.reshape(-1).view(np.uint32)) == np.isfinite(values).all()


def test_residuals_are_the_nearest_multiples_of_the_logarithm() -> None:
    values, step = positive((300, 40)), 5
    values[values == 0] = 1
    codes, levels = np.empty(values.shape, np.int32), [np.zeros(size, np.int32) for size in values.shape]
    kernels.residuals(values.view(np.uint32), *levels, lattice.fine(), 1 / step, codes)
    assert np.abs(codes * step - 8 * np.log2(values.astype(np.float64))).max() <= step / 2 + 1e-5


def test_chances_stay_within_their_bounds_unclipped() -> None:
    """As the compiled coder takes for granted: `portable_coder` clips them."""
    for bit in (0, 1):
        fast = slow = HALF
        for _ in range(5000):
            fast, slow = (
                number - (number >> rate) if bit else number + ((2 * HALF - number) >> rate)
                for number, rate in ((fast, FAST), (slow, SLOW))
            )
            assert LEAST <= (fast + slow) >> 1 <= 2 * HALF - LEAST
