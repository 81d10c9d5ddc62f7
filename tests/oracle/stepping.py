"""The twin of `stepping.c`: steps of optimizers, operation by operation. Arrays are flat float32, stepped in place."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.native.stepping import Decaying

F32 = np.float32
NAN = F32(np.nan)


@np.errstate(all="ignore")
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
    g = gradients * F32(gradient_sign)
    if l2:
        g = fused(weights, F32(l2), g)
    moved = weights * F32(weight_factor)
    first[:] = canonical(lerp(first, g, F32(first_gain)))
    gained, decay = F32(second_gain) * g, F32(second_decay)
    in_vectors, at_the_end = fused(gained, g, second * decay), fused(second, decay, gained * g)
    second[:] = canonical(np.concatenate([in_vectors[:vectors], at_the_end[vectors:]]))
    under = second
    if largest is not None:
        largest[:] = canonical(np.maximum(largest, second))
        under = largest
    weights[:] = canonical(moved + (F32(step_size) * first) / (np.sqrt(under) / F32(bias2_root) + F32(eps)))


@np.errstate(all="ignore")
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
    x = gradients * F32(gradient_sign)
    if l2:
        x = fused(weights, F32(l2), x)
    if buffer is not None:
        y = x
        if not is_first:
            in_vectors = fused(x, F32(gain), buffer * F32(momentum))
            at_the_end = fused(buffer, F32(momentum), x * F32(gain))
            y = np.concatenate([in_vectors[:vectors], at_the_end[vectors:]])
        buffer[:] = canonical(y)
        x = fused(y, F32(momentum), x) if is_nesterov else y
    weights[:] = canonical(fused(x, F32(step_size), weights))


@np.errstate(all="ignore")
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
    g = fused(weights, F32(decay), gradients) if decaying == Decaying.GRADIENT else gradients
    decayed = fused(weights, F32(decay), weights) if decaying == Decaying.WEIGHTS else weights
    for state, value, decay, gain in (
        (first, g, F32(first_decay), F32(first_gain)),
        (second, g * g, F32(second_decay), F32(second_gain)),
    ):
        in_vectors, at_the_end = fused(value, gain, state * decay), fused(state, decay, value * gain)
        state[:] = canonical(np.concatenate([in_vectors[:vectors], at_the_end[vectors:]]))
    under = fused(np.sqrt(second), F32(bias2_scale), np.full_like(second, eps))
    weights[:] = canonical(fused(first / under, F32(step_size), decayed))


@np.errstate(all="ignore")
def step_adagrad(
    weights: Array, total: Array, gradients: Array, gradient_sign: float, l2: float, rate: float, eps: float
) -> None:
    x = gradients * F32(gradient_sign)
    if l2:
        x = fused(weights, F32(l2), x)
    total[:] = canonical(fused(x, x, total))
    weights[:] = canonical(weights - (F32(rate) * x) / (np.sqrt(total) + F32(eps)))


@np.errstate(all="ignore")
def step_lion(
    weights: Array,
    average: Array,
    gradients: Array,
    near_gain: float,
    far_gain: float,
    weight_factor: float,
    rate: float,
) -> None:
    direction = lerp(average, gradients, F32(near_gain))
    sign = (direction > 0).astype(F32) - (direction < 0).astype(F32)
    weights[:] = canonical(weights * F32(weight_factor) - F32(rate) * sign)
    average[:] = canonical(lerp(average, gradients, F32(far_gain)))


def lerp(a: Array, b: Array, gain: np.floating) -> Array:
    """a + gain (b - a), as torch rounds it: from the nearer end."""
    return fused(b - a, gain, a) if gain < 0.5 else fused(b - a, gain - F32(1), b)


def fused(a: Array, b: Array | np.floating, c: Array) -> Array:
    """a * b + c, rounded once: the sum is rounded to odd in double (Boldo and Melquiond), then to float32."""
    product, addend = a.astype(np.float64) * np.float64(b), c.astype(np.float64)
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    bits = total.view(np.int64)
    odd = np.where((error > 0) == (total > 0), bits + 1, bits - 1)
    is_inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    return np.where(is_inexact, odd, bits).view(np.float64).astype(F32)


def canonical(x: Array) -> Array:
    """Every NaN as one."""
    return np.where(np.isnan(x), NAN, x)
