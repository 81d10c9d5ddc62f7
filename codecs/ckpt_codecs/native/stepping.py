"""The compiled steps of optimizers. `stepping.h` says what each computes.

States and gradients are flat float32 arrays of one size; states are stepped in place and share no memory. A step may be
done in pieces: `vectors` is how many elements of the piece belong to whole vectors of the whole tensor.

Raises:
    CodecError: Arrays have other dtypes or sizes: a mistake of ckpt's own.
"""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native.library import ADDRESS, FLOAT, INT, INT64, address, bind, optional_address

SIGNATURES = {
    "step_adam": (INT64, *[ADDRESS] * 5, INT64, INT64, *[FLOAT] * 9),
    "step_sgd": (INT64, *[ADDRESS] * 3, INT64, INT64, *[FLOAT] * 4, INT, INT, FLOAT),
}
kernels = bind(SIGNATURES)

FLOAT32 = np.dtype(np.float32)


def step_adam(
    weights: Array,
    first: Array,
    second: Array,
    largest: Array | None,
    gradients: Array,
    vectors: int,
    gradient_sign: float,
    weight_factor: float,
    l2: float,
    first_gain: float,
    second_kept: float,
    second_gain: float,
    step_size: float,
    bias2_root: float,
    eps: float,
) -> None:
    """Adam and AdamW. `largest` is None without amsgrad. Numbers are rounded to float32."""
    _check_sizes(weights, first, second, largest, gradients)
    kernels.step_adam(
        *(address(state, FLOAT32, writable=True) for state in (weights, first, second)),
        *(optional_address(largest, FLOAT32, writable=True), address(gradients, FLOAT32), weights.size, vectors),
        *(gradient_sign, weight_factor, l2, first_gain, second_kept, second_gain, step_size, bias2_root, eps),
    )


def step_sgd(
    weights: Array,
    buffer: Array | None,
    gradients: Array,
    vectors: int,
    gradient_sign: float,
    l2: float,
    momentum: float,
    gain: float,
    is_first: bool,
    is_nesterov: bool,
    step_size: float,
) -> None:
    """Gradient descent. `buffer` is None without momentum. Numbers are rounded to float32."""
    _check_sizes(weights, buffer, gradients)
    kernels.step_sgd(
        *(address(weights, FLOAT32, writable=True), optional_address(buffer, FLOAT32, writable=True)),
        *(address(gradients, FLOAT32), weights.size, vectors),
        *(gradient_sign, l2, momentum, gain, is_first, is_nesterov, step_size),
    )


def _check_sizes(*arrays: Array | None) -> None:
    if len({array.size for array in arrays if array is not None}) > 1:
        raise CodecError("states and gradients of a step have one size: this is a mistake of ckpt's own")
