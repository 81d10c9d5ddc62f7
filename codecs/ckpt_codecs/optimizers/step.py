"""The arithmetic of one optimizer step, with numbers that are fitted to a parameter. docs/delta-codecs.md specifies it.

All arrays of a call have one size n: weights `w`, first moments `m`, second moments `v`, momentum `b` and gradients `g`
are (n,) float32; 0 before and 1 after the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas, lossless

ADAM = ("torch", "divided", "cpu-adam", "apex")
"""Adam's operations in different orders: torch's own, its fused GPU kernels, DeepSpeed's for CPUs, apex's."""
DESCENT = ("momentum", "nesterov")
BETWEEN = "between"
"""Several steps, of which only the states before and after are known."""
RULES = ("", *ADAM, *DESCENT, BETWEEN)
FORMS = 3


@dataclass(frozen=True)
class FittedStep:
    """The numbers of one step of one parameter. docs/delta-codecs.md says what each is used for.

    Attributes:
        scale: The factor of gradients that were bfloat16; 0 if they were not.
    """

    rule: str = ""
    decay: float = 1.0
    step: float = 0.0
    root: float = 1.0
    eps: float = 0.0
    correction: float = 1.0
    beta1: float = 0.0
    beta2: float = 0.0
    first_form: int = 0
    second_form: int = 0
    scale: float = 0.0
    early: float = 0.0
    late: float = 0.0
    fade: float = 1.0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise CodecError(f"no rule is called {self.rule!r}; there are: {', '.join(filter(None, RULES))}")
        for name, value in vars(self).items():
            if name in ("first_form", "second_form"):
                if type(value) is not int or not 0 <= value < FORMS:
                    raise CodecError(f"{name} is 0, 1 or 2, not {value!r}")
            elif name not in ("rule", "level") and not _is_number(value):
                raise CodecError(f"{name} is a number, not {value!r}")
        if self.beta1 == 1 or self.root == 0 or self.correction == 0:
            raise CodecError("nothing can be divided by zero: beta1 is not 1, root and correction are not 0")


def adam_weights(step: FittedStep, w: Array, m: Array, v: Array) -> Array:
    """Return the weights after a step of Adam, (n,) float32. `w`: before it; `m`, `v`: after it; (n,) float32."""
    out = np.empty_like(w)
    numbers = (step.decay, step.step, step.root, step.eps)
    if step.rule == "torch":
        deltas.step_adam_torch(w, m, v, *numbers, out)
    elif step.rule == "divided":
        deltas.step_adam_fused(w, m, v, *numbers, out)
    elif step.rule == "cpu-adam":
        deltas.step_adam_deepspeed_cpu(w, m, v, *numbers, out)
    else:
        deltas.step_adam_apex(w, m, v, *numbers, step.correction, out)
    return out


def descent_weights(step: FittedStep, w: Array, b0: Array, b1: Array) -> Array:
    """Return the weights after a step of gradient descent with momentum, (n,) float32. All arrays: (n,) float32."""
    out = np.empty_like(w)
    if step.rule == "nesterov":
        lookahead = np.empty_like(w)
        deltas.mix(b1, b0, 1 + step.beta1, -step.beta1, lookahead)
        b1 = lookahead
    deltas.step_momentum(w, b1, step.decay, step.step, out)
    return out


def extrapolated_weights(step: FittedStep, w: Array, m0: Array, v0: Array, m1: Array, v1: Array) -> Array:
    """Return the predicted weights after several steps of Adam, (n,) float32. All arrays: (n,) float32."""
    out = np.empty_like(w)
    deltas.extrapolate_weights(w, m0, v0, m1, v1, step.decay, step.early, step.late, out)
    return out


def gradient(step: FittedStep, m0: Array, m1: Array) -> Array:
    """Return the gradients that follow from the first moments, (n,) float32. All arrays: (n,) float32."""
    out = np.empty_like(m0)
    deltas.infer_gradients(m0, m1, 1 - step.beta1, out)
    return out


def first_moment(step: FittedStep, m: Array, g: Array) -> Array:
    """Return the first moments after a step, (n,) float32. All arrays: (n,) float32."""
    out = np.empty_like(m)
    deltas.step_first_moments(m, g, step.beta1, 1 - step.beta1, step.first_form, out)
    return out


def second_moment(step: FittedStep, v: Array, g: Array) -> Array:
    """Return the second moments after a step, (n,) float32. All arrays: (n,) float32."""
    out = np.empty_like(v)
    deltas.step_second_moments(v, g, step.beta2, 1 - step.beta2, step.second_form, out)
    return out


def gradient_bits(step: FittedStep, m0: Array, m1: Array) -> Array:
    """Return the bits of the bfloat16 gradients that follow from the first moments: (n,) uint16.

    `m0`, `m1`: (n,) float32.
    """
    out = np.empty(m0.size, np.uint16)
    deltas.infer_bfloat16_gradients(m0, m1, step.scale, step.beta1, 1 - step.beta1, step.first_form, out)
    return out


def count_first_moment_matches(step: FittedStep, scale: float, form: int, m0: Array, m1: Array) -> int:
    """Return how many of `m1` have the bits that follow from bfloat16 gradients. `m0`, `m1`: (n,) float32."""
    return deltas.count_bfloat16_matches(m0, m1, scale, step.beta1, 1 - step.beta1, form)


def gradients_from_bits(step: FittedStep, bfloat16_bits: Array) -> Array:
    """Return the gradients that the optimizer used, (n,) float32. `bfloat16_bits`: (n,) uint16."""
    out = np.empty(bfloat16_bits.size, np.float32)
    deltas.scale((bfloat16_bits.astype(np.uint32) << np.uint32(16)).view(np.float32), step.scale, out)
    return out


def decayed_moment(step: FittedStep, m: Array) -> Array:
    """Return first moments times their factor, (n,) float32. `m`: (n,) float32."""
    out = np.empty_like(m)
    deltas.scale(m, step.fade, out)
    return out


def running_max(before: Array, after: Array) -> Array:
    """Return the largest second moments so far, (n,) float32. Both arrays: (n,) float32."""
    return np.where(after > before, after, before)


def round_to_bfloat16(masters: Array) -> Array:
    """Return the bits of masters rounded to bfloat16: (n,) uint16. `masters`: (n,) uint32, the bits of float32."""
    out = np.empty(masters.size, np.uint16)
    lossless.to_bfloat16(masters, out)
    return out


def float_bits(values: Array) -> Array:
    """Return the bits of values, (n,) float32, as (n,) uint32; unsigned integers as they are."""
    return values if values.dtype.kind == "u" else values.view(np.uint32)


def number_option(options: Mapping[str, Any], *names: str) -> float | None:
    """Return the first option of these names that is a finite number; None if there is none."""
    for name in names:
        if _is_number(options.get(name)):
            return float(options[name])
    return None


def _is_number(value: Any) -> bool:
    if type(value) is float:
        return isfinite(value)
    try:
        return type(value) in (int, float) and isfinite(value)
    except OverflowError:
        return False
