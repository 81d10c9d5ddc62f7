"""All states of a parameter together, by the arithmetic of the optimizer's own step."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_codecs.delta import DeltaCodec, StatePair, StepInfo
from ckpt_codecs.deltas.chunk_parts import PartDecoder, PredictiveCodec, join
from ckpt_codecs.deltas.difference import Difference
from ckpt_codecs.deltas.format_ids import BEFORE, CARRIED, DRIFTED, FADED, GRADIENT, REPLAYED, ROUNDED
from ckpt_codecs.deltas.moment_drift import decode_drift
from ckpt_codecs.deltas.replay_encoder import BFLOAT16, SIZE, ReplayEncoder
from ckpt_codecs.deltas.residuals.second_moments import SECOND
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossless.moments import FirstMoment
from ckpt_codecs.optimizers.fit import fit_adam, fit_descent
from ckpt_codecs.optimizers.sample import sample
from ckpt_codecs.optimizers.state_names import FIRST, LARGEST, MOMENTUM, WEIGHTS, has_all, weights_of
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
    gradients_from_bits,
    rounded,
    running_max,
    second_moment,
)

SAMPLED_CHUNKS = 2


@dataclass(frozen=True)
class Replay(OptimizerStep, PredictiveCodec):
    """Predictions by the step's own arithmetic, and what they are wrong by. The rule is fitted to a parameter."""

    level: str = "default"

    name: ClassVar[str] = "replay"
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level not in LEVELS:
            raise CodecError(f"no level is called {self.level!r}; there are: {', '.join(LEVELS)}")

    def fit(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> DeltaCodec:
        some = sample(islice(changes(), SAMPLED_CHUNKS))
        if some is None:
            return self
        with np.errstate(all="ignore"):  # values may be anything
            rule = fit_descent(some, step) if MOMENTUM in some.after else fit_adam(some, step)
        return Replay(**asdict(rule), level=self.level)

    def encode(self, change: StatePair) -> bytes:
        weights = weights_of(change.after)
        if not self.rule or weights is None or not has_all(change, self.rule, weights):
            return Difference(self.level).encode(change)
        return join(ReplayEncoder(self, self.level, change, weights).parts())

    def foretell(self, name: str, part: memoryview, reading: PartDecoder) -> tuple[Array, memoryview]:
        what, rest = part[0], part[1:]
        if what == BEFORE:
            return reading.earlier(name), rest
        if what == DRIFTED:
            return decode_drift(part, reading.earlier(name), reading.shape)
        if what == ROUNDED and reading.form[name].name == "bfloat16" and reading.form.get("fp32") == np.float32:
            return rounded(as_uints(reading.state("fp32"))), rest
        if what == FADED:
            return bits(decayed_moment(self, reading.floats_before(name))), rest
        if what == GRADIENT and name == FIRST:
            g, rest = self._gradient(part, reading)
            return bits(first_moment(self, reading.floats_before(FIRST), g)), rest
        if what in (REPLAYED, CARRIED):
            return bits(self._replayed(what, name, reading)), rest
        raise CodecError(f"{self.name} has no parts of {name} of kind {what}")

    def _replayed(self, what: int, name: str, reading: PartDecoder) -> Array:
        before, after = reading.floats_before, reading.floats
        if what == REPLAYED and name == SECOND and self.rule in ADAM:
            part = reading.part(FIRST) if FIRST in reading.form else memoryview(b"")
            if part[:1] == bytes([GRADIENT]):
                g = self._gradient(part, reading)[0]
            else:
                g = gradient(self, before(FIRST), after(FIRST))
            return second_moment(self, before(SECOND), g)
        if what == REPLAYED and name == LARGEST:
            return running_max(before(LARGEST), after(SECOND))
        if name in WEIGHTS and what == REPLAYED and self.rule in ADAM:
            under = after(LARGEST if reading.form.get(LARGEST) == np.float32 else SECOND)
            return adam_weights(self, before(name), after(FIRST), under)
        if name in WEIGHTS and what == REPLAYED and self.rule in DESCENT:
            return descent_weights(self, before(name), before(MOMENTUM), after(MOMENTUM))
        if name in WEIGHTS and what == CARRIED:
            return extrapolated_weights(self, before(name), before(FIRST), before(SECOND), after(FIRST), after(SECOND))
        raise CodecError(f"{self.name} cannot replay {name} by the rule {self.rule!r}")

    def _gradient(self, part: memoryview, reading: PartDecoder) -> tuple[Array, memoryview]:
        """The gradients that a part of first moments begins with, and the bytes after them."""
        if len(part) < 1 + SIZE.size:
            raise CodecError("a part of gradients ends in its head")
        end = 1 + SIZE.size + SIZE.unpack_from(part, 1)[0]
        if end > len(part):
            raise CodecError("a part of gradients ends in them")
        second = reading.floats_before(SECOND).reshape(reading.shape)
        half = FirstMoment().decode(part[1 + SIZE.size : end], reading.shape, BFLOAT16, second)
        return gradients_from_bits(self, as_uints(half)), part[end:]
