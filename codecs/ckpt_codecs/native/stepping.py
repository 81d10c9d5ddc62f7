"""The compiled steps of optimizers. `codecs/kernels/stepping.h` specifies them.

States and gradients are (n,) float32. States are updated in place and share no memory. A tensor may be stepped in
parts: `vectors` is how many elements of the part are in whole vectors of the tensor.

Raises:
    CodecError: Arrays have other dtypes or sizes: a bug in ckpt.
"""

from enum import IntEnum

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native.library import ADDRESS, FLOAT, INT, INT64, address, bind, optional_address

SIGNATURES = {
    "step_adam": (INT64, *[ADDRESS] * 5, INT64, INT64, *[FLOAT] * 9),
    "step_sgd": (INT64, *[ADDRESS] * 3, INT64, INT64, *[FLOAT] * 4, INT, INT, FLOAT),
    "step_adam_deepspeed": (INT64, *[ADDRESS] * 4, INT64, INT64, INT, *[FLOAT] * 8),
    "step_adagrad": (INT64, *[ADDRESS] * 3, INT64, *[FLOAT] * 4),
    "step_lion": (INT64, *[ADDRESS] * 3, INT64, *[FLOAT] * 4),
}
kernels = bind(SIGNATURES)

FLOAT32 = np.dtype(np.float32)


class Decaying(IntEnum):
    """What multiples of the weights are added to: NO_DECAY, DECAYS_GRADIENT or DECAYS_WEIGHTS of `stepping.h`."""

    NOTHING = 0
    GRADIENT = 1
    WEIGHTS = 2


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
    second_decay: float,
    second_gain: float,
    step_size: float,
    bias2_root: float,
    eps: float,
) -> None:
    """Step weights by Adam or AdamW. Numbers are rounded to float32.

    All arrays: (n,) float32. `largest`: None without amsgrad.
    """
    _check_sizes(weights, first, second, largest, gradients)
    kernels.step_adam(
        *(address(state, FLOAT32, writable=True) for state in (weights, first, second)),
        *(optional_address(largest, FLOAT32, writable=True), address(gradients, FLOAT32), weights.size, vectors),
        *(gradient_sign, weight_factor, l2, first_gain, second_decay, second_gain, step_size, bias2_root, eps),
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
    """Step weights by gradient descent. Numbers are rounded to float32.

    All arrays: (n,) float32. `buffer`: None without momentum.
    """
    _check_sizes(weights, buffer, gradients)
    kernels.step_sgd(
        *(address(weights, FLOAT32, writable=True), optional_address(buffer, FLOAT32, writable=True)),
        *(address(gradients, FLOAT32), weights.size, vectors),
        *(gradient_sign, l2, momentum, gain, is_first, is_nesterov, step_size),
    )


def step_adam_deepspeed(
    weights: Array,
    first: Array,
    second: Array,
    gradients: Array,
    vectors: int,
    decaying: Decaying,
    decay: float,
    first_decay: float,
    first_gain: float,
    second_decay: float,
    second_gain: float,
    step_size: float,
    bias2_scale: float,
    eps: float,
) -> None:
    """Step weights by DeepSpeed's Adam or AdamW for CPUs. Numbers are rounded to float32. All arrays: (n,) float32."""
    _check_sizes(weights, first, second, gradients)
    kernels.step_adam_deepspeed(
        *(address(state, FLOAT32, writable=True) for state in (weights, first, second)),
        *(address(gradients, FLOAT32), weights.size, vectors, int(decaying)),
        *(decay, first_decay, first_gain, second_decay, second_gain, step_size, bias2_scale, eps),
    )


def step_adagrad(
    weights: Array, total: Array, gradients: Array, gradient_sign: float, l2: float, rate: float, eps: float
) -> None:
    """Step weights by Adagrad. Numbers are rounded to float32.

    All arrays: (n,) float32. `total`: the sum of squares.
    """
    _check_sizes(weights, total, gradients)
    kernels.step_adagrad(
        *(address(state, FLOAT32, writable=True) for state in (weights, total)),
        *(address(gradients, FLOAT32), weights.size, gradient_sign, l2, rate, eps),
    )


def step_lion(
    weights: Array,
    average: Array,
    gradients: Array,
    near_gain: float,
    far_gain: float,
    weight_factor: float,
    rate: float,
) -> None:
    """Step weights by Lion. Numbers are rounded to float32. All arrays: (n,) float32."""
    _check_sizes(weights, average, gradients)
    kernels.step_lion(
        *(address(state, FLOAT32, writable=True) for state in (weights, average)),
        *(address(gradients, FLOAT32), weights.size, near_gain, far_gain, weight_factor, rate),
    )


def _check_sizes(*arrays: Array | None) -> None:
    if len({array.size for array in arrays if array is not None}) > 1:
        raise CodecError("states and gradients of a step have one size: this is a bug in ckpt")
