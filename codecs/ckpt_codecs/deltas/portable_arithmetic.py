"""The steps of optimizers in NumPy: operation by operation what the kernels do."""

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
def gradients(m0: Array, m1: Array, gain: float, out: Array) -> None:
    _finish(_narrow(_wide(m0) + (_wide(m1) - _wide(m0)) / gain), out)


@np.errstate(all="ignore")
def first(m: Array, g: Array, kept: float, gain: float, form: int, out: Array) -> None:
    _finish(_first(m, g, np.float32(kept), np.float32(gain), form), out)


def _first(m: Array, g: Array, kept: np.float32, gain: np.float32, form: int) -> Array:
    if form == LERP:
        return _narrow(np.float64(gain) * _wide(g - m) + _wide(m))
    if form == SUM:
        return gain * g + kept * m
    return _narrow(np.float64(gain) * _wide(g) + _wide(kept * m))


@np.errstate(all="ignore")
def second(v: Array, g: Array, kept: float, gain: float, form: int, out: Array) -> None:
    kept32, gain32 = np.float32(kept), np.float32(gain)
    if form == LEFT:
        made = _narrow(_wide(gain32 * g) * _wide(g) + _wide(v * kept32))
    elif form == SQUARE:
        made = _narrow(_wide(g * g) * np.float64(gain32) + _wide(v * kept32))
    else:
        made = gain32 * g * g + v * kept32
    _finish(made, out)


@np.errstate(all="ignore")
def weights_torch(w: Array, m: Array, v: Array, decay: float, step: float, root: float, eps: float, out: Array) -> None:
    under = np.sqrt(v) / np.float32(root) + np.float32(eps)
    _finish(_narrow(_wide(w) * decay) + _narrow(step * _wide(m)) / under, out)


@np.errstate(all="ignore")
def weights_divided(
    w: Array, m: Array, v: Array, decay: float, step: float, root: float, eps: float, out: Array
) -> None:
    under = np.sqrt(v) / np.float32(root) + np.float32(eps)
    _finish(_narrow(_wide(w) * decay) + _narrow(step * _wide(m / under)), out)


@np.errstate(all="ignore")
def weights_cpu_adam(
    w: Array, m: Array, v: Array, decay: float, step: float, root: float, eps: float, out: Array
) -> None:
    under = _narrow(_wide(np.sqrt(v)) * np.float64(np.float32(root)) + np.float64(np.float32(eps)))
    _finish(_narrow(_wide(_narrow(_wide(w) * decay)) + step * _wide(m / under)), out)


@np.errstate(all="ignore")
def weights_apex(
    w: Array, m: Array, v: Array, decay: float, step: float, root: float, eps: float, correction: float, out: Array
) -> None:
    under = np.sqrt(v / np.float32(root)) + np.float32(eps)
    update = _narrow(_wide(w) * decay + _wide(m / np.float32(correction) / under))
    _finish(_narrow(_wide(w) + step * _wide(update)), out)


@np.errstate(all="ignore")
def carried(
    w: Array, m0: Array, v0: Array, m1: Array, v1: Array, decay: float, early: float, late: float, out: Array
) -> None:
    a = _wide(m0 / (np.sqrt(v0) + TINY)) * early
    b = _wide(m1 / (np.sqrt(v1) + TINY)) * late
    _finish(_narrow(_wide(w) * decay + (a + b)), out)


@np.errstate(all="ignore")
def descended(w: Array, b: Array, decay: float, step: float, out: Array) -> None:
    _finish(_narrow(_wide(w) * decay + step * _wide(b)), out)


@np.errstate(all="ignore")
def mixed(x: Array, y: Array, a: float, b: float, out: Array) -> None:
    _finish(_narrow(_wide(x) * a + _wide(y) * b), out)


@np.errstate(all="ignore")
def scaled(x: Array, factor: float, out: Array) -> None:
    _finish(_narrow(_wide(x) * factor), out)


@np.errstate(all="ignore")
def halves(m0: Array, m1: Array, scale: float, kept: float, gain: float, form: int, out: Array) -> None:
    kept32, gain32 = np.float32(kept), np.float32(gain)
    g = _narrow(_wide(m0) + (_wide(m1) - _wide(m0)) / np.float64(gain32))
    still = _first(m0, np.zeros_like(m0), kept32, gain32, form) == m1
    x = _narrow(_wide(g) / scale)
    word = x.view(np.uint32)
    near = word + np.uint32(0x7FFF) + (word >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    nan = word >> np.uint32(16) & np.uint32(0x8000) | np.uint32(0x7FC0)
    out[:] = np.where(still, np.uint32(0), np.where(np.isnan(x), nan, near))
