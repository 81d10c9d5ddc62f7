"""Each state for itself, as what it differs by from the earlier one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ckpt_codecs.base import Array
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_codecs.delta import StatePair
from ckpt_codecs.deltas.chunk_parts import (
    PartDecoder,
    PredictiveCodec,
    earlier_words,
    join,
    second_moments_of,
    unchanged,
)
from ckpt_codecs.deltas.format_ids import BEFORE
from ckpt_codecs.deltas.residuals.choose import encode_residual
from ckpt_codecs.deltas.unpredicted import encode_unpredicted, estimate_by_rows, estimate_unpredicted
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossless.candidates import candidate_codecs
from ckpt_codecs.lossless.moments import FirstMoment, SecondMoment

MARGINS = {SecondMoment.name: 0.94, FirstMoment.name: 0.985}
"""A part that takes less than this share of what planes would take, as a sample says, is not held against
the plain codec: about what the codec saves beside planes."""
MARGIN = 0.99
"""The same of codecs that are no better than planes."""


@dataclass(frozen=True)
class Difference(PredictiveCodec):
    """Integer differences of the bits, or the plain lossless codec where that is smaller."""

    level: str = "default"

    name: ClassVar[str] = "difference"
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.level, str) or self.level not in LEVELS:
            raise CodecError(f"no level is called {self.level!r}; there are: {', '.join(LEVELS)}")

    def encode(self, change: StatePair) -> bytes:
        return join({name: self.part(name, change, change.after.get) for name in change.after})

    def part(self, name: str, change: StatePair, context: Callable[[str], Array | None]) -> bytes:
        """The part of one state. `context` gives the other states that may tell of it."""
        same = unchanged(change, name)
        if same is not None:
            return same
        values = change.after[name]
        before = earlier_words(change.before, name, values)
        made = (
            None
            if before is None
            else encode_residual(before, as_uints(values), values.dtype, self.level, second_moments_of(change))
        )
        part = None if made is None else bytes([BEFORE]) + made
        return smaller(part, name, values, self.level, context)

    def foretell(self, name: str, part: memoryview, reading: PartDecoder) -> tuple[Array, memoryview]:
        if part[0] == BEFORE:
            return reading.earlier(name), part[1:]
        raise CodecError(f"{self.name} has no parts of kind {part[0]}")


def smaller(part: bytes | None, name: str, values: Array, level: str, context: Callable[[str], Array | None]) -> bytes:
    """The part, or what the plain codec makes of the values, if that may be smaller and is."""
    codec = candidate_codecs("parameter", name, values.dtype, level)[0].name
    if part is not None and level != "max" and len(part) < MARGINS.get(codec, MARGIN) * estimate_unpredicted(values):
        return part
    if part is not None and level != "max" and len(part) < estimate_by_rows(name, values, level, context):
        return part
    plain = encode_unpredicted(name, values, level, context)
    return plain if part is None or len(plain) < len(part) else part
