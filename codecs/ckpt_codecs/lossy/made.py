"""What is known of a chunk while it is coded, on both sides alike."""

from typing import Any

import numpy as np

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.delta import States
from ckpt_codecs.lossy import forms, weights
from ckpt_codecs.lossy.factors import Factors
from ckpt_codecs.lossy.weights import Way


class Made:
    """The states before, and those that were made already, in their order."""

    def __init__(self, before: States, shape: Shape) -> None:
        self.before, self.shape, self.matrix = before, shape, forms.as_matrix(shape)
        self.states: dict[str, Array] = {}
        self.found_factors: dict[str, Factors] = {}
        self._way: Way | None = None

    def forget(self, name: str) -> None:
        self.found_factors.pop(name, None)

    def wide_before(self, name: str) -> Array | None:
        """The state before as float32, with zeros for what is no number."""
        old = self.before.get(name)
        if old is None or not forms.is_approximated(old.dtype):
            return None
        made = forms.wide(old)
        return made if np.isfinite(made).all() else np.where(np.isfinite(made), made, np.float32(0))

    def factors(self) -> Factors | None:
        return next((self.found_factors[name] for name in forms.SECOND if name in self.found_factors), None)

    def second(self) -> Array | None:
        """The second moments, as they come out."""
        name = next((name for name in forms.SECOND if name in self.states), None)
        return None if name is None else self._numbers(name)

    def way(self, name: str) -> Way:
        """From these weights to what is quantised of them."""
        if self._way is None:
            self._way = Way(self.matrix, self.wide_before(name), self.factors(), self.last_change(name))
        return self._way

    def last_change(self, name: str) -> Array | None:
        """What the states before say of how the weights moved last."""
        moment = next((m for m in forms.FIRST if m in self.before), None)
        if moment is None or name not in self.before:
            return None
        second = next((s for s in forms.SECOND if s in self.before), None)
        numerator, denominator = self.wide_before(moment), None if second is None else self.wide_before(second)
        return None if numerator is None else weights.direction(numerator, denominator)

    def weights_change(self, form: Any) -> Array | None:
        """By how much the weights have changed, as they come out."""
        name = forms.weights_of(form)
        old = None if name is None else self.wide_before(name)
        if name is None or old is None or name not in self.states:
            return None
        new = self._numbers(name)
        return None if new is None else new - old

    def _numbers(self, name: str) -> Array | None:
        """A state as float32, if it has one, all finite."""
        array = self.states[name]
        made = forms.wide(array) if forms.is_approximated(array.dtype) else None
        return made if made is not None and np.isfinite(made).all() else None
