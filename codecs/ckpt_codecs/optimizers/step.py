"""The arithmetic of one optimizer step, with numbers that are fitted to a parameter. docs/delta-codecs.md specifies it.

All arrays of a call have one size n: weights `w`, first moments `m`, second moments `v`, momentum `b` and gradients `g`
are (n,) float32; 0 before and 1 after the step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas, lossless

ADAM = ("adam-torch", "adam-fused", "adam-deepspeed-cpu", "adam-apex")
"""Adam's operations in different orders: torch's own, its fused GPU kernels, DeepSpeed's for CPUs, apex's."""
DESCENT = ("sgd-momentum", "sgd-nesterov")
SEVERAL_STEPS = "several-steps"
"""Several steps, of which only the states before and after are known."""
OPTIMIZERS = ("", *ADAM, *DESCENT, SEVERAL_STEPS)
FORMS = 3
_ADAM_KERNELS = {
    "adam-torch": "step_adam_torch",
    "adam-fused": "step_adam_fused",
    "adam-deepspeed-cpu": "step_adam_deepspeed_cpu",
    "adam-apex": "step_adam_apex",
}


@dataclass(frozen=True)
class FittedStep:
    """The numbers of one step of one parameter. docs/delta-codecs.md says what each is used for.

    Attributes:
        optimizer: One of `OPTIMIZERS`; empty: there is no step, and states are predicted from themselves.
        weight_factor: What the weights are multiplied by; for `adam-apex` the weight decay.
        step_size: What the update is multiplied by; it is negative.
        bias2_root: The square root of the bias correction of second moments; its inverse for `adam-deepspeed-cpu`, its
            square for `adam-apex`.
        bias1_factor: The bias correction of first moments, for `adam-apex`.
        first_form, second_form: The order of operations of first and second moments.
        grad_scale: The factor of gradients that were bfloat16; 0 if they were not.
        old_direction, new_direction: The factors of the first and the last update direction of several steps.
        first_factor: What is left of the first moments.
    """

    optimizer: str = ""
    weight_factor: float = 1.0
    step_size: float = 0.0
    bias2_root: float = 1.0
    eps: float = 0.0
    bias1_factor: float = 1.0
    beta1: float = 0.0
    beta2: float = 0.0
    first_form: int = 0
    second_form: int = 0
    grad_scale: float = 0.0
    old_direction: float = 0.0
    new_direction: float = 0.0
    first_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(filter(None, OPTIMIZERS))
            raise CodecError(f"there is no optimizer {self.optimizer!r}; there are: {known}")
        for name, value in vars(self).items():
            if name in ("first_form", "second_form"):
                if type(value) is not int or not 0 <= value < FORMS:
                    raise CodecError(f"{name} is 0, 1 or 2, not {value!r}")
            elif name not in ("optimizer", "level") and not _is_number(value):
                raise CodecError(f"{name} is a number, not {value!r}")
        if self.beta1 == 1 or self.bias2_root == 0 or self.bias1_factor == 0:
            raise CodecError("a division by zero: beta1 must not be 1, bias2_root and bias1_factor must not be 0")


def adam_weights(step: FittedStep, w: Array, m: Array, v: Array) -> Array:
    """Return the weights after a step of Adam, (n,) float32. `w`: before it; `m`, `v`: after it; (n,) float32."""
    return adam_weights_by(step, w, m, v)(step.weight_factor, step.step_size)


def adam_weights_by(step: FittedStep, w: Array, m: Array, v: Array) -> Callable[[float, float], Array]:
    """Return what gives the same by weight factor and step size, (n,) float32, in an array that each call fills."""
    steps = deltas.adam_steps(_ADAM_KERNELS[step.optimizer], w, m, v, np.empty_like(w))
    others: tuple[float, ...] = (step.bias2_root, step.eps)
    if step.optimizer == "adam-apex":
        others += (step.bias1_factor,)
    return lambda weight_factor, step_size: steps(weight_factor, step_size, *others)


def descent_weights(step: FittedStep, w: Array, b0: Array, b1: Array) -> Array:
    """Return the weights after a step of gradient descent with momentum, (n,) float32. All arrays: (n,) float32."""
    return descent_weights_by(step, w, b0, b1)(step.weight_factor, step.step_size)


def descent_weights_by(step: FittedStep, w: Array, b0: Array, b1: Array) -> Callable[[float, float], Array]:
    """Return what gives the same by weight factor and step size, (n,) float32, in an array that each call fills."""
    out, momentum = np.empty_like(w), b1
    if step.optimizer == "sgd-nesterov":
        momentum = np.empty_like(w)
        deltas.mix(b1, b0, 1 + step.beta1, -step.beta1, momentum)

    def weights(weight_factor: float, step_size: float) -> Array:
        deltas.step_momentum(w, momentum, weight_factor, step_size, out)
        return out

    return weights


def extrapolated_weights(step: FittedStep, w: Array, m0: Array, v0: Array, m1: Array, v1: Array) -> Array:
    """Return the predicted weights after several steps of Adam, (n,) float32. All arrays: (n,) float32."""
    out = np.empty_like(w)
    deltas.extrapolate_weights(w, m0, v0, m1, v1, step.weight_factor, step.old_direction, step.new_direction, out)
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
    deltas.infer_bfloat16_gradients(m0, m1, step.grad_scale, step.beta1, 1 - step.beta1, step.first_form, out)
    return out


def count_first_moment_matches(step: FittedStep, scale: float, form: int, m0: Array, m1: Array) -> int:
    """Return how many of `m1` have the bits that follow from bfloat16 gradients. `m0`, `m1`: (n,) float32."""
    return deltas.count_bfloat16_matches(m0, m1, scale, step.beta1, 1 - step.beta1, form)


def gradients_from_bits(step: FittedStep, bfloat16_bits: Array) -> Array:
    """Return the gradients that the optimizer used, (n,) float32. `bfloat16_bits`: (n,) uint16."""
    out = np.empty(bfloat16_bits.size, np.float32)
    deltas.scale((bfloat16_bits.astype(np.uint32) << np.uint32(16)).view(np.float32), step.grad_scale, out)
    return out


def decayed_moment(step: FittedStep, m: Array) -> Array:
    """Return first moments times their factor, (n,) float32. `m`: (n,) float32."""
    out = np.empty_like(m)
    deltas.scale(m, step.first_factor, out)
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
