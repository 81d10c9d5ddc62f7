"""What encoder and decoder both know of a chunk while they code its states."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.delta import States
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossy import state_types
from ckpt_codecs.lossy.factors import Factors, PredictedFactors
from ckpt_codecs.lossy.first_moment import MomentContext
from ckpt_codecs.lossy.weight_transform import PreviousMoments, WeightTransform


class ChunkContext:
    """The states of the step before, and the decoded states of this step so far."""

    def __init__(self, before: States, shape: Shape, form: Iterable[str] = ()) -> None:
        self.before, self.shape, self.matrix = before, shape, state_types.matrix_shape(shape)
        self._count = max(1, len(state_types.KNOWN & set(form)))
        self._free_buffers: list[Array] = []
        self.states: dict[str, Array] = {}
        self.finite: set[str] = set()
        """The names of the states that are known to be finite."""
        self.decoded_factors: dict[str, Factors] = {}
        self._float32_before: dict[str, Array | None] = {}
        self._predicted_factors: dict[str, PredictedFactors | None] = {}
        self._weight_transform: WeightTransform | None = None

    def new_buffer(self) -> Array:
        """A buffer for one state, (n, m) float32.

        All buffers of a chunk are one allocation, because allocations of this size are mapped and unmapped each time.
        """
        if not self._free_buffers:
            self._free_buffers = [*np.empty((self._count, *self.matrix), np.float32)]
        return self._free_buffers.pop()

    def forget(self, name: str) -> None:
        """Drop the factors of a state."""
        self.decoded_factors.pop(name, None)

    def float32_before(self, name: str) -> Array | None:
        """The state of the step before, (n, m) float32, with zeros for values that are not finite; or None.

        Raises `CodecError` if its shape is not that of the chunk.
        """
        if name not in self._float32_before:
            old = self.before.get(name)
            if old is not None and old.shape != self.shape:  # kernels do not check shapes
                raise CodecError(f"the {name} before a lossy chunk is of another shape")
            values = None
            if old is not None and state_types.is_approximated(old.dtype):
                values = state_types.to_float32(old)
            if values is not None and not state_types.is_finite(values):
                values = np.where(np.isfinite(values), values, np.float32(0))
            self._float32_before[name] = values
        return self._float32_before[name]

    def predicted_factors(self, name: str) -> PredictedFactors | None:
        """The factors of a second moment as predicted from the step before; None if it is missing there."""
        if name not in self._predicted_factors:
            old = self.float32_before(name)
            self._predicted_factors[name] = None if old is None or not old.size else PredictedFactors.by(old)
        return self._predicted_factors[name]

    def factors(self) -> Factors | None:
        """The factors of the first second moment that has any."""
        names = (name for name in state_types.SECOND_MOMENTS if name in self.decoded_factors)
        name = next(names, None)
        return None if name is None else self.decoded_factors[name]

    def second_moments(self) -> Array | None:
        """The decoded second moments, (n, m) float32, or None."""
        name = next((name for name in state_types.SECOND_MOMENTS if name in self.states), None)
        return None if name is None else self._finite_float32(name)

    def weight_transform(self, name: str) -> WeightTransform:
        """The transform of the weights with this name."""
        if self._weight_transform is None:
            self._weight_transform = WeightTransform(
                self.matrix, self.float32_before(name), self.factors(), self.previous_moments(name)
            )
        return self._weight_transform

    def previous_moments(self, name: str) -> PreviousMoments | None:
        """The moments of the step before, which approximate the last change of the weights with this name; or None."""
        moment = next((m for m in state_types.FIRST_MOMENTS if m in self.before), None)
        if moment is None or name not in self.before:
            return None
        second = next((s for s in state_types.SECOND_MOMENTS if s in self.before), None)
        numerator, denominator = self.float32_before(moment), None if second is None else self.float32_before(second)
        return None if numerator is None else PreviousMoments(numerator, denominator)

    def moment_context(self, form: Any) -> MomentContext:
        """The states from which first moments are predicted. `form`: the states of the chunk, by name."""
        name = state_types.weights_of(form)
        old = None if name is None else self.float32_before(name)
        new = None if name is None or old is None or name not in self.states else self._finite_float32(name)
        return MomentContext(new, old, self.second_moments())

    def _finite_float32(self, name: str) -> Array | None:
        """A decoded state, (n, m) float32; None if its dtype is not approximated or a value is not finite."""
        array = self.states[name]
        if name not in self.finite and not (state_types.is_approximated(array.dtype) and state_types.is_finite(array)):
            return None
        self.finite.add(name)
        return state_types.to_float32(array)
