"""The chunk of a delta: a part for each state. If a part depends on other states, these are decoded on demand."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.delta import DeltaCodec, StatePair, States, StateTypes
from ckpt_codecs.deltas.format_ids import PARTS, UNCHANGED, UNPREDICTED
from ckpt_codecs.deltas.residuals.choose import decode_residual
from ckpt_codecs.deltas.residuals.second_moments import SecondMoments
from ckpt_codecs.deltas.unpredicted import decode_unpredicted
from ckpt_codecs.errors import CodecError
from ckpt_codecs.optimizers.state_names import SECOND

_SIZE = Struct("<I")


def join_parts(parts: Mapping[str, bytes]) -> bytes:
    """Return a chunk: the sizes of the parts, sorted by the names of their states, then the parts."""
    ordered = [parts[name] for name in sorted(parts)]
    return b"".join([bytes([PARTS]), *(_SIZE.pack(len(part)) for part in ordered), *ordered])


def split_parts(data: bytes, dtypes: StateTypes) -> dict[str, memoryview]:
    """Return the part of each state of a chunk.

    Raises:
        CodecError: The chunk has not one part of at least two bytes for each of these states.
    """
    names = sorted(dtypes)
    start = 1 + _SIZE.size * len(names)
    if len(data) < start or data[0] != PARTS:
        raise CodecError("the chunk of a delta ends in its directory, or is not a chunk of parts")
    chunk, parts = memoryview(data), {}
    for i, name in enumerate(names):
        end = start + _SIZE.unpack_from(data, 1 + _SIZE.size * i)[0]
        if end > len(data) or end - start < 2:
            raise CodecError(f"the chunk of a delta ends in its part of {name}")
        parts[name], start = chunk[start:end], end
    if start != len(data):
        raise CodecError("the chunk of a delta has bytes after its last part")
    return parts


class PartDecoder:
    """Decodes the states of a chunk on demand, each at most once.

    Attributes:
        shape: The shape of the chunk.
        dtypes: The dtype of each state.
        before: The states of the earlier step: the same shape.
    """

    def __init__(self, codec: "PredictiveCodec", data: bytes, before: States, shape: Shape, dtypes: StateTypes) -> None:
        self.shape, self.dtypes, self.before = shape, dtypes, before
        self._codec, self._parts = codec, split_parts(data, dtypes)
        self._decoded: dict[str, Array] = {}
        self._in_progress: set[str] = set()

    def state(self, name: str) -> Array:
        """Return a state after the step: of the chunk's shape and the state's dtype."""
        if name in self._decoded:
            return self._decoded[name]
        if name not in self._parts:
            raise CodecError(f"a chunk needs the state {name}, which it does not have")
        if name in self._in_progress:
            raise CodecError(f"the prediction of {name} depends on {name} itself")
        self._in_progress.add(name)
        self._decoded[name] = values = self._decode(name, self.part(name))
        return values

    def floats(self, name: str) -> Array:
        """Return a state after the step, flat: (n,) float32. Raises CodecError if it has another dtype."""
        if self.dtypes.get(name) != np.float32:
            raise CodecError(f"a chunk needs {name} in float32, which it does not have")
        return as_uints(self.state(name)).view(np.float32)

    def floats_before(self, name: str) -> Array:
        """Return a state before the step, flat: (n,) float32. Raises CodecError if it has another dtype."""
        if self.dtypes.get(name) != np.float32:
            raise CodecError(f"a chunk needs {name} in float32, which it does not have")
        return self.bits_before(name).view(np.float32)

    def bits_before(self, name: str) -> Array:
        """Return the bits of a state before the step: (n,) uint8, uint16, uint32 or uint64.

        Raises:
            CodecError: The earlier step has no such state, or of another shape or dtype.
        """
        values = self.before.get(name)
        if values is None or values.dtype != self.dtypes.get(name) or values.shape != self.shape:
            raise CodecError(f"a chunk was encoded relative to another state {name}")
        return as_uints(values)

    def part(self, name: str) -> memoryview:
        """Return the bytes of a part: its kind of prediction, then the residuals."""
        return self._parts[name]

    @property
    def second_moments(self) -> SecondMoments:
        """The second moments before and after the step.

        The object is new each time: if this one stored it, both would be a cycle, and everything that was decoded
        would stay in memory until the next garbage collection.
        """
        return SecondMoments(lambda: self._second_moment(self.bits_before), lambda: self._second_moment(self._bits))

    def _decode(self, name: str, part: memoryview) -> Array:
        dtype = self.dtypes[name]
        if part[0] == UNPREDICTED:
            return decode_unpredicted(part[1], part[2:], self.shape, dtype, self.state)
        predicted, residuals = self._codec.predict(name, part, self)
        if not residuals:
            raise CodecError(f"the part of {name} ends before its residuals")
        return decode_residual(residuals, predicted, dtype, self.second_moments).view(dtype).reshape(self.shape)

    def _bits(self, name: str) -> Array:
        return as_uints(self.state(name))

    def _second_moment(self, bits_of: Callable[[str], Array]) -> Array:
        if self.dtypes.get(SECOND) != np.float32:
            raise CodecError(f"a chunk needs {SECOND} in float32, which it does not have")
        return bits_of(SECOND)


@dataclass(frozen=True)
class PredictiveCodec(DeltaCodec):
    """A delta codec that predicts each state from others and encodes the residuals. Its chunks have parts."""

    def decode(
        self, data: bytes, before: States, shape: Shape, dtypes: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        decoder = PartDecoder(self, data, before, shape, dtypes)
        return {name: decoder.state(name) for name in dtypes if wanted is None or name in wanted}

    @abstractmethod
    def predict(self, name: str, part: memoryview, decoder: PartDecoder) -> tuple[Array, memoryview]:
        """Return the predicted bits of a state, (n,) uint8, uint16, uint32 or uint64, and the bytes of the residuals.

        Args:
            part: Untrusted bytes. The first one is the kind of the prediction.

        Raises:
            CodecError: There is no such prediction for this state, or a state that it needs is missing.
        """


def bits_before(before: States, name: str, after: Array) -> Array | None:
    """Return the bits of a state before the step: (n,) uint8, uint16, uint32 or uint64.

    None if there is none of the same shape and dtype as `after`.
    """
    values = before.get(name)
    if values is None or values.dtype != after.dtype or values.shape != after.shape:
        return None
    return as_uints(values)


def encode_unchanged(change: StatePair, name: str) -> bytes | None:
    """Return the part of a state whose bits did not change; None if they did."""
    after = as_uints(change.after[name])
    before = bits_before(change.before, name, change.after[name])
    if before is None or not np.array_equal(before[:64], after[:64]) or not np.array_equal(before, after):
        return None
    return bytes([UNCHANGED, 0])


def second_moments_of(change: StatePair) -> SecondMoments:
    """Return the second moments before and after a step."""

    def bits_of(states: States) -> Array:
        return as_uints(states[SECOND])

    return SecondMoments(lambda: bits_of(change.before), lambda: bits_of(change.after))
