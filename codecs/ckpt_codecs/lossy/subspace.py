"""Our lossy delta codec: weights quantised in the subspace in which they move, moments told from factors and them.

`docs/lossy-codecs.md` specifies the bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import sqrt
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.delta import DeltaCodec, StatePair, States, StateTypes, StepInfo
from ckpt_codecs.errors import CodecError, NotApplicable
from ckpt_codecs.lossless.float_planes import Planes
from ckpt_codecs.lossy import factors
from ckpt_codecs.lossy import first_moment as first
from ckpt_codecs.lossy import state_types as forms
from ckpt_codecs.lossy import weight_transform as weights
from ckpt_codecs.lossy.byte_reader import ByteReader, length_prefixed
from ckpt_codecs.lossy.chunk_context import ChunkContext
from ckpt_codecs.lossy.quantizer import Quantizer
from ckpt_codecs.lossy.weight_transform import WeightTransform

EXACT, SAME, FACTORS, WEIGHTS, FIRST = range(5)
"""How a state is held in a chunk."""
FIRSTS = ("derived", "coarse", "exact", "zero")
SAMPLES = 4
"""Chunks of a parameter that tell its scale."""
_GRAIN = 2
_FINE_RESIDUAL = 2
FINE_STEP, FINE_ANCHOR_STEP = 1 / 8, 1 / 256
ZERO = 0.6
"""Half the width of the bin of zero, in steps."""
_FEW = 256
"""Values that nearly always tell that a state has changed."""
TRIES, SHORTER = 40, 0.8


@dataclass(frozen=True)
class Subspace(DeltaCodec):
    """Approximates all states of a parameter.

    `step`: of the quantiser, in units of the true change's root mean square, or
    `anchor_step` of the weights' own where there is nothing before. `octaves`: second
    moments are off by a factor of about 2^(octaves/2) at most, 0 for no bound. `rank`: of the
    subspace, 0 for none. `first`: what becomes of first moments, one of `FIRSTS`.
    `max_abs_err` bounds the error of every weight, `rel_error` the error of every
    chunk of weights against their change, both in the Euclidean norm for the latter.
    `scale` is the root mean square, which `survey` or `fit` finds.
    """

    name: ClassVar[str] = "subspace"
    lossless: ClassVar[bool] = False

    step: float = 2.0
    rank: int = 32
    octaves: float = 4.0
    first: str = "derived"
    anchor_step: float = 0.25
    max_abs_err: float | None = None
    rel_error: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("step", "anchor_step", "max_abs_err", "rel_error", "scale"):
            value = getattr(self, name)
            if value is None and name in ("max_abs_err", "rel_error", "scale"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
                raise CodecError(f"{name} is a number above 0, not {value!r}")
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 0 <= self.rank <= weights.MOST_RANK:
            raise CodecError(f"rank is a whole number of at most {weights.MOST_RANK}, not {self.rank!r}")
        if not isinstance(self.octaves, int | float) or not 0 <= self.octaves <= 16:
            raise CodecError(f"octaves is a number of at most 16, not {self.octaves!r}")
        if self.first not in FIRSTS:
            raise CodecError(f"first is one of {', '.join(FIRSTS)}, not {self.first!r}")

    def survey(self, samples: Iterable[tuple[int, StatePair]], step: StepInfo) -> "Subspace":
        """The same codec with one scale for the whole state: so much of it, and a change of that."""
        parts = [(size, *self._energy(change)) for size, change in samples if not forms.is_small(_shape(change))]
        count = sum(size for size, _, some in parts if some)
        energy = sum(size * energy / some for size, energy, some in parts if some)
        return replace(self, scale=sqrt(energy / count)) if energy > 0 else self

    def fit(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> "Subspace":
        if self.scale is not None:
            return self
        return self.survey(((1, change) for change in islice(changes(), SAMPLES)), step)

    def at(self, step: float) -> "Subspace":
        """The same codec with another step, that of anchors as much longer or shorter."""
        return replace(self, step=step, anchor_step=self.anchor_step * step / self.step)

    def promised(self, state: str, form: StateTypes) -> Mapping[str, float]:
        if state != forms.weights_of(form):
            return {}
        said = {"promised_max_abs": self.max_abs_err, "promised_rel_change": self.rel_error}
        return {name: value for name, value in said.items() if value is not None}

    def broken_promise(self, change: StatePair, made: States) -> str | None:
        name = forms.weights_of(change.after)
        if name is None:
            return None
        true, state = change.after[name], made[name]
        if _same_bits(true, state):
            return None
        if not self._keeps_bound(true, state):
            return f"a weight is off by more than {self.max_abs_err}"
        before = ChunkContext(change.before, _shape(change)).wide_before(name)
        near = self._is_near(forms.to_float32(true), state, before)
        return None if near else f"the error of a chunk is more than {self.rel_error} of its change"

    def encode(self, change: StatePair) -> bytes:
        form = {name: array.dtype for name, array in change.after.items()}
        forms.check(form)
        if any(array.shape != _shape(change) for array in change.after.values()):
            raise CodecError("the states of a chunk are of one shape")
        made = ChunkContext(change.before, _shape(change), form)
        return b"".join(self._section(name, change, made) for name in forms.in_order(form))

    def decode(
        self, data: bytes, before: States, shape: Shape, form: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        made, source = ChunkContext(before, shape, form), ByteReader(data)
        for name in forms.in_order(form):
            (kind,), held = source.take(1), source.piece()
            if wanted is None or wanted - made.states.keys():
                made.states[name] = self._state(kind, held, name, form, made)
        source.end()
        return {name: made.states[name] for name in form if wanted is None or name in wanted}

    def _section(self, name: str, change: StatePair, made: ChunkContext) -> bytes:
        """A state as bytes; `made` learns what comes of them."""
        form = {n: array.dtype for n, array in change.after.items()}
        true, old = change.after[name], change.before.get(name)
        found = (EXACT, b"")
        if old is not None and _same_bits(true, old):
            found = (SAME, b"")
        elif forms.is_approximated(true.dtype):
            try:
                found = self._approximate(name, change, made)
            except NotApplicable:
                found = (EXACT, b"")
        if found[0] not in (EXACT, SAME):
            state = self._state(*found, name, form, made)
            if forms.is_finite(state):
                made.states[name] = state
                made.finite.add(name)
                return bytes([found[0]]) + length_prefixed(found[1])
            made.forget(name)
            found = (EXACT, b"")
        made.states[name] = true
        return bytes([found[0]]) + length_prefixed(bytes(Planes().encode(true, None)) if found[0] == EXACT else b"")

    def _approximate(self, name: str, change: StatePair, made: ChunkContext) -> tuple[int, bytes]:
        true = forms.to_float32(change.after[name])
        fine = forms.is_small(change.after[name].shape)
        if not true.size:
            raise NotApplicable("there are no values")
        if name in forms.SECOND:
            residual = 0 if true.shape[0] == 1 else _FINE_RESIDUAL if fine else round(8 * self.octaves)
            return FACTORS, factors.encode(true, made.foretold(name), residual, _GRAIN)
        if not forms.is_finite(true):
            raise NotApplicable("some values are no numbers")
        if name == forms.weights_of(change.after):
            return WEIGHTS, self._weights(true, change.after[name], made.way(name), fine)
        if name in forms.FIRST and self.first != "exact":
            return FIRST, first.encode(true, made.told(change.after), self.first, fine)
        raise NotApplicable("such a state is held exactly")

    def _weights(self, true: Array, given: Array, way: WeightTransform, fine: bool) -> bytes:
        """As few bytes as keep what was promised."""
        bound, rank = self.max_abs_err, 0 if fine else self.rank
        if bound is not None:
            way, rank = replace(way, factors=None), 0
        values, energy = way.forward(true)
        size = sqrt(energy / values.size)
        if fine:
            step, zero = size * (FINE_STEP if way.before is not None else FINE_ANCHOR_STEP), 0.5
        elif way.before is not None:
            step, zero = settled_step(self.step) * (self.scale or size), ZERO
        else:
            step, zero = self.anchor_step * size, 0.5
        if bound is not None:
            step, zero = min(2 * bound, step) if fine else 2 * bound, 0.5
        turned = way.into(values, rank)
        for _ in range(TRIES):
            data = way.encode(turned, Quantizer(step or 1.0, zero))
            if bound is None and self.rel_error is None:
                return data
            state = forms.to_state_dtype(way.back(data, np.empty(true.shape, np.float32)), given.dtype, given.shape)
            if self._keeps_bound(given, state) and self._is_near(true, state, way.before):
                return data
            step *= SHORTER if self.rel_error is not None else 0.99
        raise NotApplicable("no step keeps what was promised")

    def _keeps_bound(self, true: Array, state: Array) -> bool:
        """Is every weight as near as was promised?"""
        if self.max_abs_err is None:
            return True
        off = np.abs(true.astype(np.float64) - state.astype(np.float64))
        return bool(off.max(initial=0) <= self.max_abs_err)

    def _is_near(self, true: Array, state: Array, before: Array | None) -> bool:
        if self.rel_error is None:
            return True
        wide = true.astype(np.float64)
        off = np.square(wide - forms.to_float32(state)).sum()
        return bool(off <= self.rel_error**2 * np.square(wide - (0 if before is None else before)).sum())

    def _state(self, kind: int, held: bytes, name: str, form: StateTypes, made: ChunkContext) -> Array:
        """The state that a section holds."""
        dtype, shape = form[name], made.shape
        if kind == EXACT:
            return Planes().decode(held, shape, dtype, None)
        if kind == SAME:
            old = made.before.get(name)
            if old is None or held or old.shape != shape or old.dtype != dtype:
                raise CodecError(f"a lossy chunk needs the {name} before it")
            return old
        if not forms.is_approximated(dtype):
            raise CodecError(f"a lossy chunk does not hold {dtype}")
        if kind == FACTORS and name in forms.SECOND:
            found = factors.decode(held, made.foretold(name), made.room())
            made.found_factors[name] = found
            return forms.to_state_dtype(found.values, dtype, shape)
        if kind == WEIGHTS and name == forms.weights_of(form):
            return forms.to_state_dtype(made.way(name).back(held, made.room()), dtype, shape)
        if kind == FIRST and name in forms.FIRST:
            return forms.to_state_dtype(first.decode(held, made.told(form), made.room()), dtype, shape)
        raise CodecError(f"a lossy chunk holds {name} in no way that is known")

    def _energy(self, change: StatePair) -> tuple[float, int]:
        """The sum of squares of what is to be quantised, and of how many values."""
        made, name = ChunkContext(change.before, _shape(change), change.after), forms.weights_of(change.after)
        if name is None or name not in change.before:
            return 0.0, 0
        for second in forms.SECOND:
            if second in change.after:
                self._section(second, change, made)
        true = forms.to_float32(change.after[name])
        if not forms.is_finite(true):
            return 0.0, 0
        values, energy = made.way(name).forward(true)
        return energy, values.size


def settled_step(step: float) -> float:
    """A step in units of what is to be quantised, for one in units of the true change.

    What is to be quantised is the true change and the error before it. Were steps a multiple of both, long ones would
    feed on their own errors; so the part that errors take of it once they have settled, at most
    evenly spread over the bin of zero, is taken away. Then errors stay where they are, however long the chain.
    """
    return step / sqrt(1 + ZERO**2 / 3 * step**2)


def _shape(change: StatePair) -> Shape:
    shape: Shape = next(iter(change.after.values())).shape
    return shape


def _same_bits(a: Array, b: Array) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    words = f"u{min(a.dtype.itemsize, 8)}"
    one, other = (np.ascontiguousarray(x).reshape(-1).view(words) for x in (a, b))
    return np.array_equal(one[:_FEW], other[:_FEW]) and np.array_equal(one, other)
