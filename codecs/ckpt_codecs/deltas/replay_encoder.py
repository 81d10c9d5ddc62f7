"""A chunk of states that foretell each other, encoded."""

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct

import ml_dtypes
import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.delta import StatePair
from ckpt_codecs.deltas.chunk_parts import second_moments_of, unchanged
from ckpt_codecs.deltas.difference import Difference, smaller
from ckpt_codecs.deltas.format_ids import (
    CARRIED,
    CONSTANT_UNIT,
    FADED,
    GRADIENT,
    REPLAYED,
    ROOT_AFTER,
    ROOT_BEFORE,
    ROUNDED,
)
from ckpt_codecs.deltas.moment_drift import apply_drift, encode_drift, fit_drift
from ckpt_codecs.deltas.residuals.choose import encode_residual
from ckpt_codecs.deltas.residuals.second_moments import SECOND
from ckpt_codecs.lossless.moments import FirstMoment
from ckpt_codecs.optimizers.state_names import FIRST, LARGEST, MOMENTUM, is_told
from ckpt_codecs.optimizers.step import (
    ADAM,
    DESCENT,
    OptimizerStep,
    adam_weights,
    bits,
    decayed_moment,
    descent_weights,
    extrapolated_weights,
    first_moment,
    gradient,
    gradient_bits,
    gradients_from_bits,
    rounded,
    running_max,
    second_moment,
)

SIZE = Struct("<I")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class ReplayEncoder:
    """A chunk whose states foretell each other."""

    rule: OptimizerStep
    level: str
    change: StatePair
    weights: str

    def parts(self) -> dict[str, bytes]:
        rule = self.rule.rule
        if rule in ADAM:
            made = self._adam()
        elif rule in DESCENT:
            made = {MOMENTUM: self._part(MOMENTUM, FADED, decayed_moment(self.rule, self._before(MOMENTUM)))}
            update = self._before(MOMENTUM), self._after(MOMENTUM)
            made[self.weights] = self._part(
                self.weights, REPLAYED, descent_weights(self.rule, self._before(self.weights), *update)
            )
        else:
            made = self._between()
        plain = Difference(self.level)
        for name, values in self.change.after.items():
            if name in made:
                continue
            if name == "param" and self.weights == "fp32" and values.dtype.name == "bfloat16":
                foretold = rounded(as_uints(self.change.after["fp32"]))
                made[name] = self._part(name, ROUNDED, foretold)
            else:
                made[name] = plain.part(name, self.change, self._context)
        return made

    def _adam(self) -> dict[str, bytes]:
        m0, m1, v0, v1 = self._moments()
        made = {}
        if self.rule.scale:
            half = gradient_bits(self.rule, m0, m1)
            g = gradients_from_bits(self.rule, half)
            shape = self.change.after[FIRST].shape
            held = FirstMoment(self.level).encode(half.view(BFLOAT16).reshape(shape), v0.reshape(shape))
            head = bytes([GRADIENT]) + SIZE.pack(len(held)) + held
            made[FIRST] = self._part(FIRST, head, first_moment(self.rule, m0, g), context=_nothing)
        if made.get(FIRST, b"\0")[0] != GRADIENT:
            g = gradient(self.rule, m0, m1)
            made[FIRST] = self._part(FIRST, FADED, decayed_moment(self.rule, m0), ROOT_BEFORE, context=_nothing)
        made[SECOND] = self._part(SECOND, REPLAYED, second_moment(self.rule, v0, g))
        if made[SECOND][0] != REPLAYED and made[FIRST][0] != GRADIENT:
            made[FIRST] = smaller(made[FIRST], FIRST, self.change.after[FIRST], self.level, self._context)
        under = v1
        if self._is_float32(LARGEST):
            under = self._after(LARGEST)
            if is_told(self.change, LARGEST, self.weights):
                made[LARGEST] = self._part(LARGEST, REPLAYED, running_max(self._before(LARGEST), v1))
        made[self.weights] = self._part(
            self.weights, REPLAYED, adam_weights(self.rule, self._before(self.weights), m1, under)
        )
        return made

    def _between(self) -> dict[str, bytes]:
        m0, m1, v0, v1 = self._moments()
        made = {}
        drift = fit_drift(bits(v0), bits(v1), self.change.after[SECOND].shape)
        if drift is not None:
            made[SECOND] = self._part(SECOND, encode_drift(*drift), apply_drift(bits(v0), *drift).view(np.float32))
        else:
            made[SECOND] = Difference(self.level).part(SECOND, self.change, self._context)
        made[FIRST] = self._part(FIRST, FADED, decayed_moment(self.rule, m0), ROOT_AFTER, contexts=True)
        foretold = extrapolated_weights(self.rule, self._before(self.weights), m0, v0, m1, v1)
        made[self.weights] = self._part(self.weights, CARRIED, foretold, contexts=True)
        return made

    def _part(
        self,
        name: str,
        head: int | bytes,
        foretold: Array,
        source: int = CONSTANT_UNIT,
        contexts: bool = False,
        context: Callable[[str], Array | None] | None = None,
    ) -> bytes:
        same = unchanged(self.change, name)
        if same is not None:
            return same
        values = self.change.after[name]
        level, told = self.level, second_moments_of(self.change)
        rest = encode_residual(bits(foretold), as_uints(values), values.dtype, level, told, source, contexts)
        start = bytes([head]) if isinstance(head, int) else head
        part = None if rest is None else start + rest
        return smaller(part, name, values, level, context or self._context)

    def _before(self, name: str) -> Array:
        return as_uints(self.change.before[name]).view(np.float32)

    def _after(self, name: str) -> Array:
        return as_uints(self.change.after[name]).view(np.float32)

    def _moments(self) -> tuple[Array, Array, Array, Array]:
        return self._before(FIRST), self._after(FIRST), self._before(SECOND), self._after(SECOND)

    def _is_float32(self, name: str) -> bool:
        return name in self.change.after and self.change.after[name].dtype == np.float32

    def _context(self, name: str) -> Array | None:
        return self.change.after.get(name)


def _nothing(name: str) -> None:
    return None
