"""The encoder of a chunk whose states are predicted from each other by an optimizer step."""

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct

import ml_dtypes
import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.delta import StatePair
from ckpt_codecs.deltas.chunk_parts import encode_unchanged, second_moments_of
from ckpt_codecs.deltas.difference import Difference, smaller_part
from ckpt_codecs.deltas.format_ids import (
    CONSTANT_UNIT,
    DECAYED,
    EXTRAPOLATED,
    GRADIENT,
    OPTIMIZER_STEP,
    ROOT_AFTER,
    ROOT_BEFORE,
    ROUNDED,
)
from ckpt_codecs.deltas.moment_drift import apply_drift, encode_drift, fit_drift
from ckpt_codecs.deltas.residuals.choose import encode_residual
from ckpt_codecs.lossless.moments import FirstMoment
from ckpt_codecs.optimizers.state_names import FIRST, LARGEST, MOMENTUM, SECOND, has_state
from ckpt_codecs.optimizers.step import (
    ADAM,
    DESCENT,
    FittedStep,
    adam_weights,
    decayed_moment,
    descent_weights,
    extrapolated_weights,
    first_moment,
    float_bits,
    gradient,
    gradient_bits,
    gradients_from_bits,
    round_to_bfloat16,
    running_max,
    second_moment,
)

SIZE = Struct("<I")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class ReplayEncoder:
    """Encodes a chunk by predicting its states from each other.

    Attributes:
        step: The arithmetic of the predictions.
        level: The level of the lossless codecs and of streams.
        change: The chunk, with the states that the step needs.
        weights: The name of the state that the optimizer steps.
    """

    step: FittedStep
    level: str
    change: StatePair
    weights: str

    def parts(self) -> dict[str, bytes]:
        """Return the part of each state."""
        if self.step.optimizer in ADAM:
            parts = self._adam_parts()
        elif self.step.optimizer in DESCENT:
            parts = self._descent_parts()
        else:
            parts = self._extrapolated_parts()
        difference = Difference(self.level)
        for name, values in self.change.after.items():
            if name in parts:
                continue
            if name == "param" and self.weights == "fp32" and values.dtype.name == "bfloat16":
                predicted = round_to_bfloat16(as_uints(self.change.after["fp32"]))
                parts[name] = self._part(name, ROUNDED, predicted)
            else:
                parts[name] = difference.part(name, self.change, self._context)
        return parts

    def _adam_parts(self) -> dict[str, bytes]:
        m0, m1, v0, v1 = self._moments()
        parts = {}
        if self.step.grad_scale:
            bfloat16_bits = gradient_bits(self.step, m0, m1)
            g = gradients_from_bits(self.step, bfloat16_bits)
            shape = self.change.after[FIRST].shape
            gradients = bfloat16_bits.view(BFLOAT16).reshape(shape)
            chunk = FirstMoment(self.level).encode(gradients, v0.reshape(shape))
            head = bytes([GRADIENT]) + SIZE.pack(len(chunk)) + chunk
            parts[FIRST] = self._part(FIRST, head, first_moment(self.step, m0, g), context=_no_context)
        if parts.get(FIRST, b"\0")[0] != GRADIENT:
            g = gradient(self.step, m0, m1)
            parts[FIRST] = self._part(FIRST, DECAYED, decayed_moment(self.step, m0), ROOT_BEFORE, context=_no_context)
        parts[SECOND] = self._part(SECOND, OPTIMIZER_STEP, second_moment(self.step, v0, g))
        if parts[SECOND][0] != OPTIMIZER_STEP and parts[FIRST][0] != GRADIENT:
            # The second moments do not depend on the first ones, so these may be encoded with them as base.
            parts[FIRST] = smaller_part(parts[FIRST], FIRST, self.change.after[FIRST], self.level, self._context)
        divisors = v1
        if self._is_float32(LARGEST):
            divisors = self._after(LARGEST)
            if has_state(self.change, LARGEST, self.weights):
                parts[LARGEST] = self._part(LARGEST, OPTIMIZER_STEP, running_max(self._before(LARGEST), v1))
        predicted = adam_weights(self.step, self._before(self.weights), m1, divisors)
        parts[self.weights] = self._part(self.weights, OPTIMIZER_STEP, predicted)
        return parts

    def _descent_parts(self) -> dict[str, bytes]:
        b0, b1 = self._before(MOMENTUM), self._after(MOMENTUM)
        predicted = descent_weights(self.step, self._before(self.weights), b0, b1)
        return {
            MOMENTUM: self._part(MOMENTUM, DECAYED, decayed_moment(self.step, b0)),
            self.weights: self._part(self.weights, OPTIMIZER_STEP, predicted),
        }

    def _extrapolated_parts(self) -> dict[str, bytes]:
        m0, m1, v0, v1 = self._moments()
        parts = {}
        bits0, bits1 = float_bits(v0), float_bits(v1)
        drift = fit_drift(bits0, bits1, self.change.after[SECOND].shape)
        if drift is not None:
            parts[SECOND] = self._part(SECOND, encode_drift(*drift), apply_drift(bits0, *drift).view(np.float32))
        else:
            parts[SECOND] = Difference(self.level).part(SECOND, self.change, self._context)
        parts[FIRST] = self._part(FIRST, DECAYED, decayed_moment(self.step, m0), ROOT_AFTER, use_contexts=True)
        predicted = extrapolated_weights(self.step, self._before(self.weights), m0, v0, m1, v1)
        parts[self.weights] = self._part(self.weights, EXTRAPOLATED, predicted, use_contexts=True)
        return parts

    def _part(
        self,
        name: str,
        head: int | bytes,
        predicted: Array,
        source: int = CONSTANT_UNIT,
        use_contexts: bool = False,
        context: Callable[[str], Array | None] | None = None,
    ) -> bytes:
        """Return the part of one state.

        Args:
            head: What precedes the residuals: the kind of the prediction, or that and its data.
            predicted: (n,) float32, or (n,) uint16 or uint32, the bits of floats.
            source: Where the units of a grid come from.
            use_contexts: Use contexts for the symbols of a grid.
            context: As in `Difference.part`; None: all states after the step.
        """
        unchanged = encode_unchanged(self.change, name)
        if unchanged is not None:
            return unchanged
        values = self.change.after[name]
        residuals = encode_residual(
            float_bits(predicted),
            as_uints(values),
            values.dtype,
            self.level,
            second_moments_of(self.change),
            source=source,
            contexts=use_contexts,
        )
        start = bytes([head]) if isinstance(head, int) else head
        part = None if residuals is None else start + residuals
        return smaller_part(part, name, values, self.level, context or self._context)

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


def _no_context(name: str) -> None:
    return None
