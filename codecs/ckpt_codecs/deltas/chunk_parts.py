"""A chunk of a delta: a part for each state. What a part needs of other states is decoded when it is asked for."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.delta import DeltaCodec, StatePair, States, StateTypes
from ckpt_codecs.deltas.format_ids import BEFORE, NOTHING, PARTS
from ckpt_codecs.deltas.residuals.choose import decode_residual
from ckpt_codecs.deltas.residuals.second_moments import SECOND, SecondMoments
from ckpt_codecs.deltas.unpredicted import decode_unpredicted
from ckpt_codecs.errors import CodecError

_SIZE = Struct("<I")


def join(parts: Mapping[str, bytes]) -> bytes:
    """A chunk: the sizes of the parts, in the order of their states' names, then the parts."""
    ordered = [parts[name] for name in sorted(parts)]
    return b"".join([bytes([PARTS]), *(_SIZE.pack(len(part)) for part in ordered), *ordered])


def cut(data: bytes, form: StateTypes) -> dict[str, memoryview]:
    """The part of each state."""
    names = sorted(form)
    at = 1 + _SIZE.size * len(names)
    if len(data) < at or data[0] != PARTS:
        raise CodecError("a chunk of a delta ends in its directory, or is none")
    whole, parts = memoryview(data), {}
    for i, name in enumerate(names):
        end = at + _SIZE.unpack_from(data, 1 + _SIZE.size * i)[0]
        if end > len(data) or end - at < 2:
            raise CodecError(f"a chunk of a delta ends in its part of {name}")
        parts[name], at = whole[at:end], end
    if at != len(data):
        raise CodecError("a chunk of a delta goes on past its parts")
    return parts


class PartDecoder:
    """A chunk as it is decoded: states are made when they are asked for, each once."""

    def __init__(self, codec: "PredictiveCodec", data: bytes, before: States, shape: Shape, form: StateTypes) -> None:
        self.shape, self.form, self.before = shape, form, before
        self._codec, self._parts = codec, cut(data, form)
        self._made: dict[str, Array] = {}
        self._begun: set[str] = set()

    def state(self, name: str) -> Array:
        """The values of a state after the step."""
        if name in self._made:
            return self._made[name]
        if name not in self._parts:
            raise CodecError(f"a chunk needs {name}, which it does not have")
        if name in self._begun:
            raise CodecError(f"{name} is foretold by itself")
        self._begun.add(name)
        self._made[name] = made = self._decode(name, self.part(name))
        return made

    def floats(self, name: str) -> Array:
        """A state after the step, flat, which must be of float32."""
        if self.form.get(name) != np.float32:
            raise CodecError(f"a chunk needs {name} in float32, which it does not have")
        return as_uints(self.state(name)).view(np.float32)

    def floats_before(self, name: str) -> Array:
        """A state before the step, flat, which must be of float32."""
        if self.form.get(name) != np.float32:
            raise CodecError(f"a chunk needs {name} in float32, which it does not have")
        return self.earlier(name).view(np.float32)

    def part(self, name: str) -> memoryview:
        """The bytes of a part: what foretells it, then how far it is from that."""
        return self._parts[name]

    def _decode(self, name: str, part: memoryview) -> Array:
        dtype = self.form[name]
        if part[0] == NOTHING:
            return decode_unpredicted(part[1], part[2:], self.shape, dtype, self.state)
        foretold, rest = self._codec.foretell(name, part, self)
        if not rest:
            raise CodecError(f"the part of {name} ends before its residuals")
        return decode_residual(rest, foretold, dtype, self.told).view(dtype).reshape(self.shape)

    @property
    def told(self) -> SecondMoments:
        """Made anew each time: kept, it would keep all that was decoded until the garbage collector comes by."""
        return SecondMoments(lambda: self._second(self.earlier), lambda: self._second(self._later))

    def _later(self, name: str) -> Array:
        return as_uints(self.state(name))

    def _second(self, words_of: Callable[[str], Array]) -> Array:
        if self.form.get(SECOND) != np.float32:
            raise CodecError(f"a chunk needs {SECOND} in float32, which it does not have")
        return words_of(SECOND)

    def earlier(self, name: str) -> Array:
        """The words of the same state before the step."""
        held = self.before.get(name)
        if held is None or held.dtype != self.form.get(name) or held.shape != self.shape:
            raise CodecError(f"a chunk was coded against another {name} than there is")
        return as_uints(held)


@dataclass(frozen=True)
class PredictiveCodec(DeltaCodec):
    """A delta codec whose chunks are of parts."""

    def decode(
        self, data: bytes, before: States, shape: Shape, form: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        reading = PartDecoder(self, data, before, shape, form)
        return {name: reading.state(name) for name in form if wanted is None or name in wanted}

    @abstractmethod
    def foretell(self, name: str, part: memoryview, reading: PartDecoder) -> tuple[Array, memoryview]:
        """What foretells the words of a state, and the bytes of the residuals. The part says how, in its first byte."""


def earlier_words(before: States, name: str, after: Array) -> Array | None:
    """The words of a state before the step; None if there is none of the same form."""
    held = before.get(name)
    if held is None or held.dtype != after.dtype or held.shape != after.shape:
        return None
    return as_uints(held)


def unchanged(change: StatePair, name: str) -> bytes | None:
    """The part of a state that is what it was, if it is."""
    after = as_uints(change.after[name])
    before = earlier_words(change.before, name, change.after[name])
    if before is None or not np.array_equal(before[:64], after[:64]) or not np.array_equal(before, after):
        return None
    return bytes([BEFORE, 0])


def second_moments_of(change: StatePair) -> SecondMoments:
    """What a change tells of the second moments."""

    def held(states: States) -> Array:
        return as_uints(states[SECOND])

    return SecondMoments(lambda: held(change.before), lambda: held(change.after))
