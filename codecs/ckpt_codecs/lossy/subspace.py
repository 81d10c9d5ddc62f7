"""The lossy codecs `subspace` and `subspace-rows`: weights are quantized in the subspace in which they change.

Moments are predicted: second moments become row and column factors, first moments a multiple of the change.
`docs/lossy-codecs.md` specifies the bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import sqrt
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.chunk.row_marks import decode_marks, encode_marks, states_of_rows, with_rows
from ckpt_codecs.delta import DeltaCodec, StatePair, States, StateTypes, StepInfo, only_changed_rows
from ckpt_codecs.errors import CodecError, NotApplicable
from ckpt_codecs.lossless.float_planes import Planes
from ckpt_codecs.lossy import factors, first_moment, state_types
from ckpt_codecs.lossy.byte_reader import ByteReader, length_prefixed
from ckpt_codecs.lossy.chunk_context import ChunkContext
from ckpt_codecs.lossy.quantizer import Quantizer
from ckpt_codecs.lossy.weight_transform import MAX_RANK, WeightTransform

EXACT, SAME, FACTORS, WEIGHTS, FIRST_MOMENTS, RELATIVE_FACTORS = range(6)
"""The kind of a section: how a chunk stores a state. Earlier decoders ignore the flag of relative factors, so these
have a kind of their own, which they refuse."""
FIRST_MOMENT_OPTIONS = ("derived", "coarse", "exact", "zero")
SAMPLES = 4
"""The chunks of a parameter from which `fit` computes the RMS."""
_GRAIN, MAX_VECTOR_GRAIN = 2, 8
_SMALL_RESIDUAL = 2
"""The step of factors, the largest one of those of vectors, and that of the residuals of small chunks: in levels of 1/8
octave."""
SMALL_STEP_SIZE, SMALL_BASE_STEP_SIZE = 1 / 4, 1 / 256
"""The step size of small chunks: in units of `step_size` times the RMS of their change; of the RMS of their weights."""
DEAD_ZONE = 0.6
"""Half the width of the bin of zero, in steps."""
_PREFIX = 256
"""Values at the start of two states that almost always show whether they differ."""
MAX_TRIES, STEP_REDUCTION = 40, 0.8
_ALL, _SOME = bytes([0]), bytes([1])
"""The first byte of a chunk: it has all rows, or says which ones it has."""


@dataclass(frozen=True)
class Subspace(DeltaCodec):
    """Approximates all float states of a parameter.

    `step_size`: that of the quantizer, in units of the root mean square (RMS) of the true change. `base_step_size`: the
    same for chunks without a state before, in units of the RMS of the weights. `second_octaves`: second moments are off
    by a factor of about 2^(second_octaves/2) at most; 0 means no bound. `rank`: the rank of the subspace; 0 means none.
    `first_moments`: the method for first moments, one of `FIRST_MOMENT_OPTIONS`. `max_abs_err`: a bound of the absolute
    error of every weight. `rel_error`: a bound, for every chunk, of the Euclidean norm of the weights' error over that
    of their change. `rms`: the RMS in which steps are measured, set by `survey` or `fit`.
    """

    name: ClassVar[str] = "subspace"
    lossless: ClassVar[bool] = False

    step_size: float = 2.0
    rank: int = 32
    second_octaves: float = 4.0
    first_moments: str = "derived"
    base_step_size: float = 0.25
    max_abs_err: float | None = None
    rel_error: float | None = None
    rms: float | None = None

    def __post_init__(self) -> None:
        for name in ("step_size", "base_step_size", "max_abs_err", "rel_error", "rms"):
            value = getattr(self, name)
            if value is None and name in ("max_abs_err", "rel_error", "rms"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
                raise CodecError(f"{name} must be a number above 0, not {value!r}")
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 0 <= self.rank <= MAX_RANK:
            raise CodecError(f"rank must be an integer from 0 to {MAX_RANK}, not {self.rank!r}")
        if not isinstance(self.second_octaves, int | float) or not 0 <= self.second_octaves <= 16:
            raise CodecError(f"second_octaves must be a number from 0 to 16, not {self.second_octaves!r}")
        if self.first_moments not in FIRST_MOMENT_OPTIONS:
            options = ", ".join(FIRST_MOMENT_OPTIONS)
            raise CodecError(f"first_moments must be one of {options}, not {self.first_moments!r}")

    def survey(self, samples: Iterable[tuple[int, StatePair]], step: StepInfo) -> "Subspace":
        """The same codec with one RMS for all parameters.

        `samples`: for each parameter its number of elements, and one of its chunks.
        """
        parts = [(size, *self._energy(change)) for size, change in samples if not state_types.is_small(_shape(change))]
        count = sum(size for size, _, sampled in parts if sampled)
        energy = sum(size * energy / sampled for size, energy, sampled in parts if sampled)
        return replace(self, rms=sqrt(energy / count)) if energy > 0 else self

    def fit(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> "Subspace":
        """The same codec with the RMS of one parameter, unless the RMS is known."""
        if self.rms is not None:
            return self
        return self.survey(((1, change) for change in islice(changes(), SAMPLES)), step)

    def of_rows(self) -> DeltaCodec | None:
        return SubspaceRows(**asdict(self))

    def at(self, step_size: float) -> "Subspace":
        """The same codec with another step size; `base_step_size` changes by the same factor."""
        return replace(self, step_size=step_size, base_step_size=self.base_step_size * step_size / self.step_size)

    def promised(self, state: str, form: StateTypes) -> Mapping[str, float]:
        if state != state_types.weights_of(form):
            return {}
        bounds = {"promised_max_abs": self.max_abs_err, "promised_rel_change": self.rel_error}
        return {name: value for name, value in bounds.items() if value is not None}

    def broken_promise(self, change: StatePair, decoded: States) -> str | None:
        name = state_types.weights_of(change.after)
        if name is None:
            return None
        true, state = change.after[name], decoded[name]
        if _same_bits(true, state):
            return None
        if not self._keeps_bound(true, state):
            return f"the error of a weight is more than {self.max_abs_err}"
        before = ChunkContext(change.before, _shape(change)).float32_before(name)
        is_near = self._is_near(state_types.to_float32(true), state, before)
        return None if is_near else f"the error of a chunk is more than {self.rel_error} of its change"

    def encode(self, change: StatePair) -> bytes:
        form = {name: array.dtype for name, array in change.after.items()}
        state_types.check(form)
        if any(array.shape != _shape(change) for array in change.after.values()):
            raise CodecError("the states of a chunk must have one shape")
        context = ChunkContext(change.before, _shape(change), form)
        return b"".join(self._encode_section(name, change, context) for name in state_types.in_order(form))

    def decode(
        self, data: bytes, before: States, shape: Shape, form: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        context, source = ChunkContext(before, shape, form), ByteReader(data)
        for name in state_types.in_order(form):
            (kind,), content = source.take(1), source.part()
            if wanted is None or wanted - context.states.keys():
                context.states[name] = self._decode_section(kind, content, name, form, context)
        source.end()
        return {name: context.states[name] for name in form if wanted is None or name in wanted}

    def _encode_section(self, name: str, change: StatePair, context: ChunkContext) -> bytes:
        """The bytes of a state. Adds its decoded values to `context`."""
        form = {n: array.dtype for n, array in change.after.items()}
        true, old = change.after[name], change.before.get(name)
        kind, content = EXACT, b""
        if old is not None and _same_bits(true, old):
            kind = SAME
        elif state_types.is_approximated(true.dtype):
            try:
                kind, content = self._approximate(name, change, context)
            except NotApplicable:
                kind = EXACT
        if kind not in (EXACT, SAME):
            state = self._decode_section(kind, content, name, form, context)
            if state_types.is_finite(state) and not (name in state_types.SECOND_MOMENTS and _has_new_zero(true, state)):
                context.states[name] = state
                context.finite.add(name)
                return bytes([kind]) + length_prefixed(content)
            context.forget(name)
            kind = EXACT
        context.states[name] = true
        return bytes([kind]) + length_prefixed(bytes(Planes().encode(true, None)) if kind == EXACT else b"")

    def _approximate(self, name: str, change: StatePair, context: ChunkContext) -> tuple[int, bytes]:
        """The kind and the content of the section of a state. Raises `NotApplicable` if it must be exact."""
        true = state_types.to_float32(change.after[name])
        small = state_types.is_small(change.after[name].shape)
        if not true.size:
            raise NotApplicable("there are no values")
        if name in state_types.SECOND_MOMENTS:
            residual, grain = _SMALL_RESIDUAL if small else self._residual_step(), _GRAIN
            if true.shape[0] == 1:  # its columns say all, so their grain is what bounds the error
                residual, grain = 0, min(MAX_VECTOR_GRAIN, max(_GRAIN, self._residual_step() or MAX_VECTOR_GRAIN))
            content = factors.encode(true, context.predicted_factors(name), residual, grain)
            return _kind_of_factors(content), content
        if not state_types.is_finite(true):
            raise NotApplicable("some values are not finite")
        if name == state_types.weights_of(change.after):
            transform = context.weight_transform(name)
            return WEIGHTS, self._encode_weights(true, change.after[name], transform, small)
        if name in state_types.FIRST_MOMENTS and self.first_moments != "exact":
            moment_context = context.moment_context(change.after)
            return FIRST_MOMENTS, first_moment.encode(true, moment_context, self.first_moments, small)
        raise NotApplicable("a state of this name is stored exactly")

    def _residual_step(self) -> int:
        """The step of the residuals of second moments, in levels; 0 only without a bound."""
        return max(1, round(8 * self.second_octaves)) if self.second_octaves else 0

    def _encode_weights(self, true: Array, state: Array, transform: WeightTransform, small: bool) -> bytes:
        """The bytes of weights with the largest step that keeps the promised bounds.

        `true`: (n, m) float32, the values of `state`, which has the shape and the dtype of the chunk.
        """
        bound, rank = self.max_abs_err, 0 if small else self.rank
        if bound is not None:
            transform, rank = replace(transform, factors=None), 0
        values, energy = transform.scale(true)
        rms = sqrt(energy / values.size)
        if small:
            step_size = rms * (SMALL_BASE_STEP_SIZE if transform.before is None else SMALL_STEP_SIZE * self.step_size)
            zero = 0.5
        elif transform.before is not None:
            step_size, zero = stationary_step(self.step_size) * (self.rms or rms), DEAD_ZONE
        else:
            step_size, zero = self.base_step_size * rms, 0.5
        if bound is not None:
            step_size, zero = min(2 * bound, step_size) if small else 2 * bound, 0.5
        rotated = transform.rotate(values, rank)
        for _ in range(MAX_TRIES):
            data = transform.encode(rotated, Quantizer(step_size or 1.0, zero))
            if bound is None and self.rel_error is None:
                return data
            weights = transform.decode(data, np.empty(true.shape, np.float32))
            decoded = state_types.to_state_dtype(weights, state.dtype, state.shape)
            if self._keeps_bound(state, decoded) and self._is_near(true, decoded, transform.before):
                return data
            step_size *= STEP_REDUCTION if self.rel_error is not None else 0.99
        raise NotApplicable("no step size keeps the promised bounds")

    def _keeps_bound(self, true: Array, decoded: Array) -> bool:
        """Is the error of every weight within `max_abs_err`? Both arrays have the shape and dtype of the chunk."""
        if self.max_abs_err is None:
            return True
        error = np.abs(true.astype(np.float64) - decoded.astype(np.float64))
        return bool(error.max(initial=0) <= self.max_abs_err)

    def _is_near(self, true: Array, decoded: Array, before: Array | None) -> bool:
        """Is the error within `rel_error` of the change? `true`, `before`: (n, m) float32; `decoded`: the state."""
        if self.rel_error is None:
            return True
        actual = true.astype(np.float64)
        error = np.square(actual - state_types.to_float32(decoded)).sum()
        return bool(error <= self.rel_error**2 * np.square(actual - (0 if before is None else before)).sum())

    def _decode_section(self, kind: int, content: bytes, name: str, form: StateTypes, context: ChunkContext) -> Array:
        """The state in a section, with its own shape and dtype. Raises `CodecError` if the section is damaged."""
        dtype, shape = form[name], context.shape
        if kind == EXACT:
            return Planes().decode(content, shape, dtype, None)
        if kind == SAME:
            old = context.before.get(name)
            if old is None or content or old.shape != shape or old.dtype != dtype:
                raise CodecError(f"a lossy chunk needs the {name} before it")
            return old
        if not state_types.is_approximated(dtype):
            raise CodecError(f"a lossy chunk cannot approximate {dtype}")
        if kind == _kind_of_factors(content) and name in state_types.SECOND_MOMENTS:
            decoded = factors.decode(content, context.predicted_factors(name), context.new_buffer())
            context.decoded_factors[name] = decoded
            values = decoded.values
        elif kind == WEIGHTS and name == state_types.weights_of(form):
            values = context.weight_transform(name).decode(content, context.new_buffer())
        elif kind == FIRST_MOMENTS and name in state_types.FIRST_MOMENTS:
            values = first_moment.decode(content, context.moment_context(form), context.new_buffer())
        else:
            raise CodecError(f"a lossy chunk has an unknown kind for {name}")
        return state_types.to_state_dtype(values, dtype, shape)

    def _energy(self, change: StatePair) -> tuple[float, int]:
        """The sum of squares of the scaled change of the weights, and the count of its values; zeros if unknown."""
        context, name = ChunkContext(change.before, _shape(change), change.after), state_types.weights_of(change.after)
        if name is None or name not in change.before:
            return 0.0, 0
        for second in state_types.SECOND_MOMENTS:
            if second in change.after:
                self._encode_section(second, change, context)
        true = state_types.to_float32(change.after[name])
        if not state_types.is_finite(true):
            return 0.0, 0
        values, energy = context.weight_transform(name).scale(true)
        return energy, values.size


def stationary_step(step_size: float) -> float:
    """The step size in units of the quantized values, for one in units of the true change.

    The quantized values are the sum of the true change and of the error of the step before. If step sizes were a
    multiple of that sum, errors would grow along a chain when steps are large. So this function removes the share of
    the errors in equilibrium, where they are at most uniform over the bin of zero. Errors then stay constant in chains
    of any length.
    """
    return step_size / sqrt(1 + DEAD_ZONE**2 / 3 * step_size**2)


def _has_new_zero(true: Array, decoded: Array) -> bool:
    """Is a value zero that was not? Denormals of 16 bits may be rounded to zero, those of 32 bits never are."""
    return true.dtype.itemsize < 4 and bool(np.any((decoded == 0) & (true != 0)))


def _kind_of_factors(content: bytes) -> int:
    return RELATIVE_FACTORS if content and content[0] & factors.RELATIVE else FACTORS


def _shape(change: StatePair) -> Shape:
    shape: Shape = next(iter(change.after.values())).shape
    return shape


def _same_bits(a: Array, b: Array) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    uint = f"u{min(a.dtype.itemsize, 8)}"
    first, second = (np.ascontiguousarray(x).reshape(-1).view(uint) for x in (a, b))
    return np.array_equal(first[:_PREFIX], second[:_PREFIX]) and np.array_equal(first, second)


@dataclass(frozen=True)
class SubspaceRows(Subspace):
    """Encodes the rows of a table that changed in any state; all others are exact.

    So a table of which few rows are stepped costs what these rows cost: quantised on demand, as in Check-N-Run
    (Eisenman et al., NSDI 2022), but by the change and not by the values of a row.
    """

    name: ClassVar[str] = "subspace-rows"

    def of_rows(self) -> DeltaCodec | None:
        return None

    def fit(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> "SubspaceRows":
        return SubspaceRows(**asdict(super().fit(lambda: only_changed_rows(changes()), step)))

    def encode(self, change: StatePair) -> bytes:
        changed = change.few_changed_rows()
        if changed is None:
            return _ALL + super().encode(change)
        return _SOME + encode_marks(changed) + super().encode(change.rows(changed))

    def decode(
        self, data: bytes, before: States, shape: Shape, form: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        if data[:1] == _ALL:
            return super().decode(data[1:], before, shape, form, wanted)
        if data[:1] != _SOME:
            raise CodecError("a chunk of rows begins with neither 0 nor 1")
        numbers, rest = decode_marks(data[1:], shape)
        selected = states_of_rows(before, shape, form, numbers)
        decoded = super().decode(rest, selected, (numbers.size, shape[1]), form, wanted)
        return with_rows(before, decoded, numbers)


PRESETS = {
    "resume": Subspace(step_size=1.0, second_octaves=2.0),
    "balanced": Subspace(step_size=2.0),
    "archive": Subspace(step_size=4.0),
    "standalone": Subspace(step_size=1.0, base_step_size=0.25, second_octaves=2.0),
}
"""Measured settings by the purpose of the checkpoints. docs/lossy-codecs.md has the figures."""
