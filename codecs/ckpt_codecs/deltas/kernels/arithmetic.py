# mypy: ignore-errors
"""The steps of optimizers, rounded where they round; docs/delta-codecs.md has the arithmetic.

A product and a sum in float64, rounded once to float32, stand for a fused multiply-add. Every
operation is one of IEEE 754, so each machine gives the same bits; NaNs, whose bits it leaves open, become one.
"""

import numpy as np
from numba import types

from ckpt_codecs.deltas.kernels.floats import FLOATS, OUT_FLOATS, float_kernel
from ckpt_codecs.kernels.jit import OUT16, part

F32, F64, U16, U32 = types.float32, types.float64, types.uint16, types.uint32
LERP, SUM, FUSED_SUM = 0, 1, 2
LEFT, SQUARE, PLAIN = 0, 1, 2
TINY = np.float32(1e-12)


@part
def _first(m, g, kept, gain, form):
    if form == LERP:
        return F32(F64(gain) * F64(F32(g - m)) + F64(m))
    if form == SUM:
        return F32(F32(gain * g) + F32(kept * m))
    return F32(F64(gain) * F64(g) + F64(F32(kept * m)))


@part
def _second(v, g, kept, gain, form):
    if form == LEFT:
        return F32(F64(F32(gain * g)) * F64(g) + F64(F32(v * kept)))
    if form == SQUARE:
        return F32(F64(F32(g * g)) * F64(gain) + F64(F32(v * kept)))
    return F32(F32(F32(gain * g) * g) + F32(v * kept))


@part
def _only_nan(x):
    return x if x == x else F32(np.nan)


@float_kernel(FLOATS, FLOATS, F64, OUT_FLOATS)
def gradients(m0, m1, gain, out):
    """What a first moment says of the gradient."""
    for i in range(out.size):
        out[i] = _only_nan(F32(F64(m0[i]) + (F64(m1[i]) - F64(m0[i])) / gain))


@float_kernel(FLOATS, FLOATS, F32, F32, types.intp, OUT_FLOATS)
def first(m, g, kept, gain, form, out):
    for i in range(out.size):
        out[i] = _only_nan(_first(m[i], g[i], kept, gain, form))


@float_kernel(FLOATS, FLOATS, F32, F32, types.intp, OUT_FLOATS)
def second(v, g, kept, gain, form, out):
    for i in range(out.size):
        out[i] = _only_nan(_second(v[i], g[i], kept, gain, form))


@float_kernel(FLOATS, FLOATS, FLOATS, F64, F64, F32, F32, OUT_FLOATS)
def weights_torch(w, m, v, decay, step, root, eps, out):
    for i in range(out.size):
        under = F32(F32(np.sqrt(v[i]) / root) + eps)
        out[i] = _only_nan(F32(F32(F64(w[i]) * decay) + F32(F32(step * F64(m[i])) / under)))


@float_kernel(FLOATS, FLOATS, FLOATS, F64, F64, F32, F32, OUT_FLOATS)
def weights_divided(w, m, v, decay, step, root, eps, out):
    for i in range(out.size):
        under = F32(F32(np.sqrt(v[i]) / root) + eps)
        out[i] = _only_nan(F32(F32(F64(w[i]) * decay) + F32(step * F64(F32(m[i] / under)))))


@float_kernel(FLOATS, FLOATS, FLOATS, F64, F64, F32, F32, OUT_FLOATS)
def weights_cpu_adam(w, m, v, decay, step, root, eps, out):
    for i in range(out.size):
        under = F32(F64(np.sqrt(v[i])) * F64(root) + F64(eps))
        out[i] = _only_nan(F32(F64(F32(F64(w[i]) * decay)) + step * F64(F32(m[i] / under))))


@float_kernel(FLOATS, FLOATS, FLOATS, F64, F64, F32, F32, F32, OUT_FLOATS)
def weights_apex(w, m, v, decay, step, root, eps, correction, out):
    for i in range(out.size):
        under = F32(np.sqrt(F32(v[i] / root)) + eps)
        update = F32(F64(w[i]) * decay + F64(F32(F32(m[i] / correction) / under)))
        out[i] = _only_nan(F32(F64(w[i]) + step * F64(update)))


@float_kernel(FLOATS, FLOATS, FLOATS, FLOATS, FLOATS, F64, F64, F64, OUT_FLOATS)
def carried(w, m0, v0, m1, v1, decay, early, late, out):
    """Weights some steps on: the updates between are not known, the first and the last one are."""
    for i in range(out.size):
        a = F64(F32(m0[i] / F32(np.sqrt(v0[i]) + TINY))) * early
        b = F64(F32(m1[i] / F32(np.sqrt(v1[i]) + TINY))) * late
        out[i] = _only_nan(F32(F64(w[i]) * decay + F64(a + b)))


@float_kernel(FLOATS, FLOATS, F64, F64, OUT_FLOATS)
def descended(w, b, decay, step, out):
    """Gradient descent with momentum."""
    for i in range(out.size):
        out[i] = _only_nan(F32(F64(w[i]) * decay + step * F64(b[i])))


@float_kernel(FLOATS, FLOATS, F64, F64, OUT_FLOATS)
def mixed(x, y, a, b, out):
    for i in range(out.size):
        out[i] = _only_nan(F32(F64(x[i]) * a + F64(y[i]) * b))


@float_kernel(FLOATS, F64, OUT_FLOATS)
def scaled(x, factor, out):
    for i in range(out.size):
        out[i] = _only_nan(F32(F64(x[i]) * factor))


@part
def _bfloat16(x):
    word = np.float32(x).view(np.uint32)
    odd = U32(U32(word >> U32(16)) & U32(1))
    nan = U32(U32(U32(word >> U32(16)) & U32(0x8000)) | U32(0x7FC0))
    return U16(nan if x != x else U32(U32(U32(word + U32(0x7FFF)) + odd) >> U32(16)))


@float_kernel(FLOATS, FLOATS, F64, F32, F32, types.intp, OUT16)
def halves(m0, m1, scale, kept, gain, form, out):
    """The bfloat16 gradients that lead from one first moment to the next, zero where zero does."""
    for i in range(out.size):
        g = F32(F64(m0[i]) + (F64(m1[i]) - F64(m0[i])) / F64(gain))
        still = _first(m0[i], F32(0), kept, gain, form) == m1[i]
        out[i] = U16(0) if still else _bfloat16(F32(F64(g) / scale))
