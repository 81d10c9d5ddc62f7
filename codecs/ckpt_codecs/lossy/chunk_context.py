"""What is known of a chunk while it is coded, on both sides alike."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.delta import States
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossy import state_types as forms
from ckpt_codecs.lossy.factors import Factors, PredictedFactors
from ckpt_codecs.lossy.first_moment import MomentContext
from ckpt_codecs.lossy.weight_transform import PreviousMoments, WeightTransform


class ChunkContext:
    """The states before, and those of a form that were made already, in their order."""

    def __init__(self, before: States, shape: Shape, form: Iterable[str] = ()) -> None:
        self.before, self.shape, self.matrix = before, shape, forms.matrix_shape(shape)
        self._many = max(1, len(forms.KNOWN & set(form)))
        self._free: list[Array] = []
        self.states: dict[str, Array] = {}
        self.finite: set[str] = set()
        """Of the states, those that are known to be finite."""
        self.found_factors: dict[str, Factors] = {}
        self._wide_before: dict[str, Array | None] = {}
        self._foretold: dict[str, PredictedFactors | None] = {}
        self._way: WeightTransform | None = None

    def room(self) -> Array:
        """Memory for a state. That of all is one piece: pieces of their size would be mapped and unmapped each time."""
        if not self._free:
            self._free = [*np.empty((self._many, *self.matrix), np.float32)]
        return self._free.pop()

    def forget(self, name: str) -> None:
        self.found_factors.pop(name, None)

    def wide_before(self, name: str) -> Array | None:
        """The state before as float32, with zeros for what is no number."""
        if name not in self._wide_before:
            old = self.before.get(name)
            if old is not None and old.shape != self.shape:  # kernels take it for granted
                raise CodecError(f"the {name} before a lossy chunk is of another shape")
            made = None if old is None or not forms.is_approximated(old.dtype) else forms.to_float32(old)
            if made is not None and not forms.is_finite(made):
                made = np.where(np.isfinite(made), made, np.float32(0))
            self._wide_before[name] = made
        return self._wide_before[name]

    def foretold(self, name: str) -> PredictedFactors | None:
        """What a second moment before says of the same one now."""
        if name not in self._foretold:
            old = self.wide_before(name)
            self._foretold[name] = None if old is None or not old.size else PredictedFactors.by(old)
        return self._foretold[name]

    def factors(self) -> Factors | None:
        return next((self.found_factors[name] for name in forms.SECOND if name in self.found_factors), None)

    def second(self) -> Array | None:
        """The second moments, as they come out."""
        name = next((name for name in forms.SECOND if name in self.states), None)
        return None if name is None else self._numbers(name)

    def way(self, name: str) -> WeightTransform:
        """From these weights to what is quantised of them."""
        if self._way is None:
            self._way = WeightTransform(self.matrix, self.wide_before(name), self.factors(), self.last_change(name))
        return self._way

    def last_change(self, name: str) -> PreviousMoments | None:
        """What the states before say of how the weights moved last."""
        moment = next((m for m in forms.FIRST if m in self.before), None)
        if moment is None or name not in self.before:
            return None
        second = next((s for s in forms.SECOND if s in self.before), None)
        numerator, denominator = self.wide_before(moment), None if second is None else self.wide_before(second)
        return None if numerator is None else PreviousMoments(numerator, denominator)

    def told(self, form: Any) -> MomentContext:
        """What first moments are told from."""
        name = forms.weights_of(form)
        old = None if name is None else self.wide_before(name)
        new = None if name is None or old is None or name not in self.states else self._numbers(name)
        return MomentContext(new, old, self.second())

    def _numbers(self, name: str) -> Array | None:
        """A state as float32, if it has one, all finite."""
        array = self.states[name]
        if name not in self.finite and not (forms.is_approximated(array.dtype) and forms.is_finite(array)):
            return None
        self.finite.add(name)
        return forms.to_float32(array)
