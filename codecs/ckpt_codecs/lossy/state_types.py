"""The roles of a parameter's states by their names, and the dtypes that lossy codecs approximate."""

from collections.abc import Mapping
from math import prod

import numpy as np

from ckpt_codecs.base import Array, DType, Shape
from ckpt_codecs.delta import StateTypes
from ckpt_codecs.errors import NotApplicable
from ckpt_codecs.native import lossy

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
"""Second moments, by the names that optimizers give them."""
FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
WEIGHTS = ("fp32", "param")
KNOWN = {*SECOND_MOMENTS, *FIRST_MOMENTS, *WEIGHTS}
MAX_VECTOR = 1 << 14
"""The most values of a flat chunk that counts as one row. A longer one is a part of a matrix with very long rows."""
SMALL = 1024
"""Chunks with fewer values are stored nearly exactly, because they are a small share of all bytes."""
_FLOAT32, _FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)


def weights_of(form: Mapping[str, object]) -> str | None:
    """The name of the state that has the weights in the highest precision, or None."""
    return next((name for name in WEIGHTS if name in form), None)


def in_order(form: StateTypes) -> list[str]:
    """The names of the states in the order of encoding: second moments, weights, first moments, all others.

    So each state follows those that its prediction needs.
    """
    weights = weights_of(form)
    ranks = {
        **dict.fromkeys(SECOND_MOMENTS, 0),
        **({weights: 1} if weights else {}),
        **dict.fromkeys(FIRST_MOMENTS, 2),
    }
    return sorted(form, key=lambda name: (ranks.get(name, 3), name))


def check(form: StateTypes) -> None:
    """Raise `NotApplicable` if a state is not of a float dtype."""
    for name, dtype in form.items():
        if dtype.kind not in "fV" and dtype.name != "bfloat16":
            raise NotApplicable(f"{name} is of {dtype}: only floats are approximated")


def is_approximated(dtype: DType) -> bool:
    """Do lossy codecs approximate values of this dtype: float32, float16 or bfloat16?"""
    # The comparisons come first, because NumPy takes microseconds to compute a name.
    return dtype in (_FLOAT32, _FLOAT16) or dtype.name == "bfloat16"


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """The rows and columns (n, m) as which a chunk of this shape is encoded."""
    if len(shape) == 2:
        return shape[0], shape[1]
    size = prod(shape)
    width = 512
    return (size // width, width) if size > MAX_VECTOR and size % width == 0 else (1, size)


def is_small(shape: Shape) -> bool:
    """Is a chunk of this shape, such as a norm or a bias, small enough to be stored nearly exactly?"""
    return matrix_shape(shape)[0] == 1 or prod(shape) < SMALL


def to_float32(array: Array) -> Array:
    """The array as a matrix, (n, m) float32, C-contiguous. `array`: any shape of an approximated dtype."""
    return np.ascontiguousarray(array.astype(np.float32, copy=False)).reshape(matrix_shape(array.shape))


def is_finite(array: Array) -> bool:
    """Are all values finite? `array`: any shape of a float dtype."""
    if array.dtype != _FLOAT32:
        return bool(np.isfinite(array).all())
    return lossy.is_finite(np.ascontiguousarray(array))


def to_state_dtype(values: Array, dtype: DType, shape: Shape) -> Array:
    """The values with the dtype and the shape of their state. `values`: (n, m) float32."""
    with np.errstate(over="ignore"):
        return values.astype(dtype, copy=False).reshape(shape)
