"""The twin of `optimizer_steps.c`: the steps of optimizers, operation by operation."""

from collections.abc import Callable

import numpy as np

from ckpt_codecs.base import Array

LERP, SUM, FUSED_SUM = 0, 1, 2
LEFT, SQUARE, PLAIN = 0, 1, 2
TINY = np.float32(1e-12)
NAN = np.float32(np.nan)


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def _narrow(x: Array) -> Array:
    return x.astype(np.float32)


def _finish(x: Array, out: Array) -> None:
    out[:] = x
    out[np.isnan(out)] = NAN


@np.errstate(all="ignore")
def infer_gradients(m0: Array, m1: Array, gain: float, out: Array) -> None:
    _finish(_infer_gradients(m0, m1, gain), out)


def _infer_gradients(m0: Array, m1: Array, gain: float) -> Array:
    return _narrow(_wide(m0) + (_wide(m1) - _wide(m0)) / np.float64(gain))


@np.errstate(all="ignore")
def infer_bfloat16_gradients(
    m0: Array, m1: Array, scale: float, decay: float, gain: float, form: int, out: Array
) -> None:
    decay32, gain32 = np.float32(decay), np.float32(gain)
    g = _infer_gradients(m0, m1, float(gain32))
    still = _first_moments(m0, np.zeros_like(m0), decay32, gain32, form) == m1
    x = _narrow(_wide(g) / np.float64(scale))
    word = x.view(np.uint32)
    near = word + np.uint32(0x7FFF) + (word >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    sign = np.where(np.isnan(m0), m0.view(np.uint32), np.where(np.isnan(m1), m1.view(np.uint32), np.uint32(1 << 31)))
    nan = sign >> np.uint32(16) & np.uint32(0x8000) | np.uint32(0x7FC0)
    out[:] = np.where(still, np.uint32(0), np.where(np.isnan(x), nan, near))


def count_bfloat16_matches(m0: Array, m1: Array, factor: float, decay: float, gain: float, form: int) -> int:
    words, g, replayed = np.empty(m0.size, np.uint16), np.empty_like(m0), np.empty_like(m0)
    infer_bfloat16_gradients(m0, m1, factor, decay, gain, form, words)
    scale((words.astype(np.uint32) << np.uint32(16)).view(np.float32), factor, g)
    step_first_moments(m0, g, decay, gain, form, replayed)
    return int(np.count_nonzero(replayed.view(np.uint32) == m1.view(np.uint32)))


@np.errstate(all="ignore")
def step_first_moments(m: Array, g: Array, decay: float, gain: float, form: int, out: Array) -> None:
    _finish(_first_moments(m, g, np.float32(decay), np.float32(gain), form), out)


def _first_moments(m: Array, g: Array, decay: np.float32, gain: np.float32, form: int) -> Array:
    if form == LERP:
        return _narrow(np.float64(gain) * _wide(g - m) + _wide(m))
    if form == SUM:
        return gain * g + decay * m
    return _narrow(np.float64(gain) * _wide(g) + _wide(decay * m))


@np.errstate(all="ignore")
def step_second_moments(v: Array, g: Array, decay: float, gain: float, form: int, out: Array) -> None:
    decay32, gain32 = np.float32(decay), np.float32(gain)
    if form == LEFT:
        stepped = _narrow(_wide(gain32 * g) * _wide(g) + _wide(v * decay32))
    elif form == SQUARE:
        stepped = _narrow(_wide(g * g) * np.float64(gain32) + _wide(v * decay32))
    else:
        stepped = gain32 * g * g + v * decay32
    _finish(stepped, out)


@np.errstate(all="ignore")
def step_adam_torch(
    w: Array, m: Array, v: Array, weight_factor: float, step_size: float, bias2_root: float, eps: float, out: Array
) -> None:
    under = np.sqrt(v) / np.float32(bias2_root) + np.float32(eps)
    _finish(_narrow(_wide(w) * weight_factor) + _narrow(step_size * _wide(m)) / under, out)


@np.errstate(all="ignore")
def step_adam_fused(
    w: Array, m: Array, v: Array, weight_factor: float, step_size: float, bias2_root: float, eps: float, out: Array
) -> None:
    under = np.sqrt(v) / np.float32(bias2_root) + np.float32(eps)
    _finish(_narrow(_wide(w) * weight_factor) + _narrow(step_size * _wide(m / under)), out)


@np.errstate(all="ignore")
def step_adam_deepspeed_cpu(
    w: Array, m: Array, v: Array, weight_factor: float, step_size: float, bias2_root: float, eps: float, out: Array
) -> None:
    under = _narrow(_wide(np.sqrt(v)) * np.float64(np.float32(bias2_root)) + np.float64(np.float32(eps)))
    _finish(_narrow(_wide(_narrow(_wide(w) * weight_factor)) + step_size * _wide(m / under)), out)


@np.errstate(all="ignore")
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
    under = np.sqrt(v / np.float32(bias2_factor)) + np.float32(eps)
    update = _narrow(_wide(w) * weight_factor + _wide(m / np.float32(bias1_factor) / under))
    _finish(_narrow(_wide(w) + step_size * _wide(update)), out)


_ADAM: dict[str, Callable[..., None]] = {
    "step_adam_torch": step_adam_torch,
    "step_adam_fused": step_adam_fused,
    "step_adam_deepspeed_cpu": step_adam_deepspeed_cpu,
    "step_adam_apex": step_adam_apex,
}


def adam_steps(kernel: str, w: Array, m: Array, v: Array, out: Array) -> Callable[..., Array]:
    def step(*numbers: float) -> Array:
        _ADAM[kernel](w, m, v, *numbers, out)
        return out

    return step


@np.errstate(all="ignore")
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
    old = _wide(m0 / (np.sqrt(v0) + TINY)) * old_direction
    new = _wide(m1 / (np.sqrt(v1) + TINY)) * new_direction
    _finish(_narrow(_wide(w) * weight_factor + (old + new)), out)


@np.errstate(all="ignore")
def step_momentum(w: Array, b: Array, weight_factor: float, step_size: float, out: Array) -> None:
    _finish(_narrow(_wide(w) * weight_factor + step_size * _wide(b)), out)


@np.errstate(all="ignore")
def mix(x: Array, y: Array, a: float, b: float, out: Array) -> None:
    _finish(_narrow(_wide(x) * a + _wide(y) * b), out)


@np.errstate(all="ignore")
def scale(x: Array, factor: float, out: Array) -> None:
    _finish(_narrow(_wide(x) * factor), out)
