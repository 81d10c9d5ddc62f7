"""How optimizers step, as far as it is the same for each value: names, numbers and the arithmetic that they go into."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas, lossless

ADAM = ("torch", "divided", "cpu-adam", "apex")
"""Orders in which Adam's operations are done: torch's own, its kernels for GPUs, DeepSpeed's for CPUs, apex's."""
DESCENT = ("momentum", "nesterov")
BETWEEN = "between"
"""Some steps on: nobody knows what was between."""
RULES = ("", *ADAM, *DESCENT, BETWEEN)
FORMS = 3


@dataclass(frozen=True)
class OptimizerStep:
    """The numbers of one step of one parameter; docs/delta-codecs.md has what is done with them."""

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
    """Of gradients in bfloat16; 0 if they are not."""
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


def adam_weights(rule: OptimizerStep, w: Array, m: Array, v: Array) -> Array:
    """Weights after a step, from those before it and the moments after it."""
    out = np.empty_like(w)
    numbers = (rule.decay, rule.step, rule.root, rule.eps)
    if rule.rule == "torch":
        deltas.step_adam_torch(w, m, v, *numbers, out)
    elif rule.rule == "divided":
        deltas.step_adam_fused(w, m, v, *numbers, out)
    elif rule.rule == "cpu-adam":
        deltas.step_adam_deepspeed_cpu(w, m, v, *numbers, out)
    else:
        deltas.step_adam_apex(w, m, v, *numbers, rule.correction, out)
    return out


def descent_weights(rule: OptimizerStep, w: Array, b0: Array, b1: Array) -> Array:
    """The same of gradient descent, from the momentum before and after the step."""
    out = np.empty_like(w)
    if rule.rule == "nesterov":
        ahead = np.empty_like(w)
        deltas.mix(b1, b0, 1 + rule.beta1, -rule.beta1, ahead)
        b1 = ahead
    deltas.step_momentum(w, b1, rule.decay, rule.step, out)
    return out


def extrapolated_weights(rule: OptimizerStep, w: Array, m0: Array, v0: Array, m1: Array, v1: Array) -> Array:
    out = np.empty_like(w)
    deltas.extrapolate_weights(w, m0, v0, m1, v1, rule.decay, rule.early, rule.late, out)
    return out


def gradient(rule: OptimizerStep, m0: Array, m1: Array) -> Array:
    """What the first moments say of it."""
    out = np.empty_like(m0)
    deltas.infer_gradients(m0, m1, 1 - rule.beta1, out)
    return out


def first_moment(rule: OptimizerStep, m: Array, g: Array) -> Array:
    out = np.empty_like(m)
    deltas.step_first_moments(m, g, rule.beta1, 1 - rule.beta1, rule.first_form, out)
    return out


def second_moment(rule: OptimizerStep, v: Array, g: Array) -> Array:
    out = np.empty_like(v)
    deltas.step_second_moments(v, g, rule.beta2, 1 - rule.beta2, rule.second_form, out)
    return out


def gradient_bits(rule: OptimizerStep, m0: Array, m1: Array) -> Array:
    """The gradients in bfloat16, as words."""
    out = np.empty(m0.size, np.uint16)
    deltas.infer_bfloat16_gradients(m0, m1, rule.scale, rule.beta1, 1 - rule.beta1, rule.first_form, out)
    return out


def count_replayed(rule: OptimizerStep, scale: float, form: int, m0: Array, m1: Array) -> int:
    """How many first moments come out to the bit with gradients in bfloat16, times this scale, in this form."""
    return deltas.count_bfloat16_matches(m0, m1, scale, rule.beta1, 1 - rule.beta1, form)


def gradients_from_bits(rule: OptimizerStep, half: Array) -> Array:
    """Gradients as the optimizer got them."""
    out = np.empty(half.size, np.float32)
    deltas.scale((half.astype(np.uint32) << np.uint32(16)).view(np.float32), rule.scale, out)
    return out


def decayed_moment(rule: OptimizerStep, m: Array) -> Array:
    out = np.empty_like(m)
    deltas.scale(m, rule.fade, out)
    return out


def running_max(before: Array, after: Array) -> Array:
    """The largest second moments so far."""
    return np.where(after > before, after, before)


def rounded(master: Array) -> Array:
    """The words of a copy in bfloat16."""
    made = np.empty(master.size, np.uint16)
    lossless.to_bfloat16(master, made)
    return made


def bits(values: Array) -> Array:
    """The words of floats; words as they are."""
    return values if values.dtype.kind == "u" else values.view(np.uint32)


def number(options: Mapping[str, Any], *names: str) -> float | None:
    """An option by the first of these names that is a plain number."""
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
