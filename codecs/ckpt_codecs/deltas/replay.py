"""The codecs `replay` and `rows`: the states of a parameter are predicted by the arithmetic of the optimizer step."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.chunk.row_marks import decode_marks, encode_marks, states_of_rows, with_rows
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_codecs.delta import DeltaCodec, StatePair, States, StateTypes, StepInfo, only_changed_rows
from ckpt_codecs.deltas.chunk_parts import PartDecoder, PredictiveCodec, join_parts
from ckpt_codecs.deltas.difference import Difference
from ckpt_codecs.deltas.format_ids import (
    CHANGED_ROWS,
    DECAYED,
    DRIFTED,
    EXTRAPOLATED,
    GRADIENT,
    OPTIMIZER_STEP,
    ROUNDED,
    UNCHANGED,
)
from ckpt_codecs.deltas.moment_drift import decode_drift
from ckpt_codecs.deltas.replay_encoder import BFLOAT16, SIZE, ReplayEncoder
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossless.moments import FirstMoment
from ckpt_codecs.optimizers.fit import fit_adam, fit_descent
from ckpt_codecs.optimizers.sample import sample_chunks
from ckpt_codecs.optimizers.state_names import FIRST, LARGEST, MOMENTUM, SECOND, WEIGHTS, has_step_states, weights_of
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
    gradients_from_bits,
    round_to_bfloat16,
    running_max,
    second_moment,
)

SAMPLED_CHUNKS = 2


@dataclass(frozen=True)
class Replay(FittedStep, PredictiveCodec):
    """Encodes what differs from the predictions of a step. The numbers of the step are fitted to each parameter."""

    level: str = "default"

    name: ClassVar[str] = "replay"
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level not in LEVELS:
            raise CodecError(f"there is no level {self.level!r}; there are: {', '.join(LEVELS)}")

    def fit(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> DeltaCodec:
        sample = sample_chunks(islice(changes(), SAMPLED_CHUNKS))
        if sample is None:
            return self
        with np.errstate(all="ignore"):  # values may be NaN or infinite
            fitted = fit_descent(sample, step) if MOMENTUM in sample.after else fit_adam(sample, step)
        return Replay(**asdict(fitted), level=self.level)

    def of_rows(self) -> DeltaCodec | None:
        return ReplayRows(**asdict(self))

    def encode(self, change: StatePair) -> bytes:
        weights = weights_of(change.after)
        if not self.optimizer or weights is None or not has_step_states(change, self.optimizer, weights):
            return Difference(self.level).encode(change)
        return join_parts(ReplayEncoder(self, self.level, change, weights).parts())

    def predict(self, name: str, part: memoryview, decoder: PartDecoder) -> tuple[Array, memoryview]:
        kind, rest = part[0], part[1:]
        if kind == UNCHANGED:
            return decoder.bits_before(name), rest
        if kind == DRIFTED:
            return decode_drift(part, decoder.bits_before(name), decoder.shape)
        if kind == ROUNDED and decoder.dtypes[name].name == "bfloat16" and decoder.dtypes.get("fp32") == np.float32:
            return round_to_bfloat16(as_uints(decoder.state("fp32"))), rest
        if kind == DECAYED:
            return float_bits(decayed_moment(self, decoder.floats_before(name))), rest
        if kind == GRADIENT and name == FIRST:
            g, rest = self._gradient(part, decoder)
            return float_bits(first_moment(self, decoder.floats_before(FIRST), g)), rest
        if kind in (OPTIMIZER_STEP, EXTRAPOLATED):
            return float_bits(self._replay(kind, name, decoder)), rest
        raise CodecError(f"{self.name} has no parts of {name} of kind {kind}")

    def _replay(self, kind: int, name: str, decoder: PartDecoder) -> Array:
        """Return the predicted values of a state: (n,) float32."""
        before, after = decoder.floats_before, decoder.floats
        if kind == OPTIMIZER_STEP and name == SECOND and self.optimizer in ADAM:
            part = decoder.part(FIRST) if FIRST in decoder.dtypes else memoryview(b"")
            if part[:1] == bytes([GRADIENT]):
                g = self._gradient(part, decoder)[0]
            else:
                g = gradient(self, before(FIRST), after(FIRST))
            return second_moment(self, before(SECOND), g)
        if kind == OPTIMIZER_STEP and name == LARGEST:
            return running_max(before(LARGEST), after(SECOND))
        if name in WEIGHTS and kind == OPTIMIZER_STEP and self.optimizer in ADAM:
            divisors = after(LARGEST if decoder.dtypes.get(LARGEST) == np.float32 else SECOND)
            return adam_weights(self, before(name), after(FIRST), divisors)
        if name in WEIGHTS and kind == OPTIMIZER_STEP and self.optimizer in DESCENT:
            return descent_weights(self, before(name), before(MOMENTUM), after(MOMENTUM))
        if name in WEIGHTS and kind == EXTRAPOLATED:
            return extrapolated_weights(self, before(name), before(FIRST), before(SECOND), after(FIRST), after(SECOND))
        raise CodecError(f"{self.name} cannot predict {name} by the optimizer {self.optimizer!r}")

    def _gradient(self, part: memoryview, decoder: PartDecoder) -> tuple[Array, memoryview]:
        """Return the gradients at the start of a part of first moments, (n,) float32, and the bytes after them."""
        if len(part) < 1 + SIZE.size:
            raise CodecError("a part with gradients ends in its head")
        end = 1 + SIZE.size + SIZE.unpack_from(part, 1)[0]
        if end > len(part):
            raise CodecError("a part with gradients ends in its gradients")
        second = decoder.floats_before(SECOND).reshape(decoder.shape)
        gradients = FirstMoment().decode(part[1 + SIZE.size : end], decoder.shape, BFLOAT16, second)
        return gradients_from_bits(self, as_uints(gradients)), part[end:]


@dataclass(frozen=True)
class ReplayRows(Replay):
    """Encodes only the rows of a table that changed in any state. The numbers of the step are fitted to these rows.

    Check-N-Run (Eisenman et al., NSDI 2022) and IncrCP (Lin et al., PVLDB 18(4)) store such rows of embedding tables,
    which sparse gradients step. Here they are also predicted: rows that changed follow the optimizer's step, all others
    do not, so that a step which is fitted to both predicts neither.
    """

    name: ClassVar[str] = "rows"

    def of_rows(self) -> DeltaCodec | None:
        return None

    def fit(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> DeltaCodec:
        """The codec fitted to the steps of the run, or to a single step, whichever makes a chunk of rows smaller.

        Of many steps of the run, sparse gradients give most rows only one. A single step is accepted if it explains
        nearly all rows; those that were not stepped follow it, too, so all rows are in that sample.
        """
        sample = next(only_changed_rows(changes()), None)
        fitted = self._fitted(lambda: only_changed_rows(changes()), step)
        if sample is None or step.before is None or step.after is None or step.after - step.before == 1:
            return fitted
        single = self._fitted(changes, replace(step, before=None, after=None))
        return min(fitted, single, key=lambda codec: len(codec.encode(sample)))

    def _fitted(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> "ReplayRows":
        fitted = super().fit(changes, step)
        assert isinstance(fitted, Replay)
        return ReplayRows(**asdict(fitted))

    def encode(self, change: StatePair) -> bytes:
        changed = change.few_changed_rows()
        if changed is None:
            return super().encode(change)
        return bytes([CHANGED_ROWS]) + encode_marks(changed) + super().encode(change.rows(changed))

    def decode(
        self, data: bytes, before: States, shape: Shape, dtypes: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        if data[:1] != bytes([CHANGED_ROWS]):
            return super().decode(data, before, shape, dtypes, wanted)
        numbers, rest = decode_marks(data[1:], shape)
        selected = states_of_rows(before, shape, dtypes, numbers)
        decoded = super().decode(rest, selected, (numbers.size, shape[1]), dtypes, wanted)
        return with_rows(before, decoded, numbers)
