"""Which states of a parameter are what, and what types can be approximated."""

from collections.abc import Mapping
from math import prod

import numpy as np

from ckpt_codecs.base import Array, DType, Shape
from ckpt_codecs.delta import StateTypes
from ckpt_codecs.errors import NotApplicable
from ckpt_codecs.native import lossy

SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
"""Second moments, by the names that optimizers give them."""
FIRST = ("exp_avg", "momentum_buffer")
WEIGHTS = ("fp32", "param")
KNOWN = {*SECOND, *FIRST, *WEIGHTS}
NARROW = 1 << 14
"""Values of a flat chunk that is still a vector; longer ones are pieces of something whose rows are too long."""
SMALL = 1024
"""Values of a chunk that is held nearly exactly: of fewer there are few."""
_FLOAT32, _FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)


def weights_of(form: Mapping[str, object]) -> str | None:
    """The state that holds the weights in the highest precision."""
    return next((name for name in WEIGHTS if name in form), None)


def in_order(form: StateTypes) -> list[str]:
    """The states, each after those that it is told from: second moments, weights, first moments, others."""
    weights = weights_of(form)
    ranks = {**dict.fromkeys(SECOND, 0), **({weights: 1} if weights else {}), **dict.fromkeys(FIRST, 2)}
    return sorted(form, key=lambda name: (ranks.get(name, 3), name))


def check(form: StateTypes) -> None:
    """Raises `NotApplicable` for states that nobody wants approximated."""
    for name, dtype in form.items():
        if dtype.kind not in "fV" and dtype.name != "bfloat16":
            raise NotApplicable(f"{name} is of {dtype}: only floats are approximated")


def is_approximated(dtype: DType) -> bool:
    # NumPy takes microseconds to compute a name.
    return dtype in (_FLOAT32, _FLOAT16) or dtype.name == "bfloat16"


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Rows and columns of a chunk."""
    if len(shape) == 2:
        return shape[0], shape[1]
    size = prod(shape)
    width = 512
    return (size // width, width) if size > NARROW and size % width == 0 else (1, size)


def is_small(shape: Shape) -> bool:
    """Is a chunk of this shape so small that precision costs nothing: a norm, a bias?"""
    return matrix_shape(shape)[0] == 1 or prod(shape) < SMALL


def to_float32(array: Array) -> Array:
    """As float32, n x m."""
    return np.ascontiguousarray(array.astype(np.float32, copy=False)).reshape(matrix_shape(array.shape))


def is_finite(array: Array) -> bool:
    """Are all numbers?"""
    if array.dtype != _FLOAT32:
        return bool(np.isfinite(array).all())
    return lossy.is_finite(np.ascontiguousarray(array))


def to_state_dtype(values: Array, dtype: DType, shape: Shape) -> Array:
    """Back in its own type."""
    with np.errstate(over="ignore"):
        return values.astype(dtype, copy=False).reshape(shape)
