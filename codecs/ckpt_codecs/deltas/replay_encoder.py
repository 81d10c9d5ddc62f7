"""A chunk of states that foretell each other, encoded."""

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct

import ml_dtypes
import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.chunk.frame import words
from ckpt_codecs.delta import Change
from ckpt_codecs.deltas.chunk_parts import told_of, unchanged
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
from ckpt_codecs.deltas.moment_drift import drift_of, drifted, encode_drift
from ckpt_codecs.deltas.residuals.choose import encode_residual
from ckpt_codecs.deltas.residuals.second_moments import SECOND
from ckpt_codecs.lossless.moments import FirstMoment
from ckpt_codecs.optimizers.state_names import FIRST, LARGEST, MOMENTUM, is_told
from ckpt_codecs.optimizers.step import (
    ADAM,
    DESCENT,
    Rule,
    adam_weights,
    bits,
    carried_weights,
    descent_weights,
    faded,
    first_moment,
    gradient,
    halves,
    larger,
    rounded,
    second_moment,
    widened,
)

SIZE = Struct("<I")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Joint:
    """A chunk whose states foretell each other."""

    rule: Rule
    level: str
    change: Change
    weights: str

    def parts(self) -> dict[str, bytes]:
        rule = self.rule.rule
        if rule in ADAM:
            made = self._adam()
        elif rule in DESCENT:
            made = {MOMENTUM: self._part(MOMENTUM, FADED, faded(self.rule, self._before(MOMENTUM)))}
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
                foretold = rounded(words(self.change.after["fp32"]))
                made[name] = self._part(name, ROUNDED, foretold)
            else:
                made[name] = plain.part(name, self.change, self._context)
        return made

    def _adam(self) -> dict[str, bytes]:
        m0, m1, v0, v1 = self._moments()
        made = {}
        if self.rule.scale:
            half = halves(self.rule, m0, m1)
            g = widened(self.rule, half)
            shape = self.change.after[FIRST].shape
            held = FirstMoment(self.level).encode(half.view(BFLOAT16).reshape(shape), v0.reshape(shape))
            head = bytes([GRADIENT]) + SIZE.pack(len(held)) + held
            made[FIRST] = self._part(FIRST, head, first_moment(self.rule, m0, g), context=_nothing)
        if made.get(FIRST, b"\0")[0] != GRADIENT:
            g = gradient(self.rule, m0, m1)
            made[FIRST] = self._part(FIRST, FADED, faded(self.rule, m0), ROOT_BEFORE, context=_nothing)
        made[SECOND] = self._part(SECOND, REPLAYED, second_moment(self.rule, v0, g))
        if made[SECOND][0] != REPLAYED and made[FIRST][0] != GRADIENT:
            made[FIRST] = smaller(made[FIRST], FIRST, self.change.after[FIRST], self.level, self._context)
        under = v1
        if self._is_float32(LARGEST):
            under = self._after(LARGEST)
            if is_told(self.change, LARGEST, self.weights):
                made[LARGEST] = self._part(LARGEST, REPLAYED, larger(self._before(LARGEST), v1))
        made[self.weights] = self._part(
            self.weights, REPLAYED, adam_weights(self.rule, self._before(self.weights), m1, under)
        )
        return made

    def _between(self) -> dict[str, bytes]:
        m0, m1, v0, v1 = self._moments()
        made = {}
        drift = drift_of(bits(v0), bits(v1), self.change.after[SECOND].shape)
        if drift is not None:
            made[SECOND] = self._part(SECOND, encode_drift(*drift), drifted(bits(v0), *drift).view(np.float32))
        else:
            made[SECOND] = Difference(self.level).part(SECOND, self.change, self._context)
        made[FIRST] = self._part(FIRST, FADED, faded(self.rule, m0), ROOT_AFTER, contexts=True)
        foretold = carried_weights(self.rule, self._before(self.weights), m0, v0, m1, v1)
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
        level, told = self.level, told_of(self.change)
        rest = encode_residual(bits(foretold), words(values), values.dtype, level, told, source, contexts)
        start = bytes([head]) if isinstance(head, int) else head
        part = None if rest is None else start + rest
        return smaller(part, name, values, level, context or self._context)

    def _before(self, name: str) -> Array:
        return words(self.change.before[name]).view(np.float32)

    def _after(self, name: str) -> Array:
        return words(self.change.after[name]).view(np.float32)

    def _moments(self) -> tuple[Array, Array, Array, Array]:
        return self._before(FIRST), self._after(FIRST), self._before(SECOND), self._after(SECOND)

    def _is_float32(self, name: str) -> bool:
        return name in self.change.after and self.change.after[name].dtype == np.float32

    def _context(self, name: str) -> Array | None:
        return self.change.after.get(name)


def _nothing(name: str) -> None:
    return None
