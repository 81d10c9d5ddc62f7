"""The codec `difference`: each state by itself, as differences from its earlier values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ckpt_codecs.base import Array
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_codecs.delta import StatePair
from ckpt_codecs.deltas.chunk_parts import (
    PartDecoder,
    PredictiveCodec,
    bits_before,
    encode_unchanged,
    join_parts,
    second_moments_of,
)
from ckpt_codecs.deltas.format_ids import UNCHANGED
from ckpt_codecs.deltas.residuals.choose import encode_residual
from ckpt_codecs.deltas.unpredicted import encode_unpredicted, estimate_by_rows, estimate_unpredicted
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossless.candidates import candidate_codecs
from ckpt_codecs.lossless.moments import FirstMoment, SecondMoment

MAX_RATIOS = {SecondMoment.name: 0.94, FirstMoment.name: 0.985}
"""A part that is smaller than this share of the estimated size of planes is not compared with the lossless codec of
this name: the share is about what that codec saves relative to planes."""
MAX_RATIO = 0.99
"""The same for codecs that are no better than planes."""


SPEEDS = ("default", "fast")
MAX_FAST_RATIO = 0.25
"""With `speed=fast`, a part smaller than this share of the values is not compared with a lossless codec."""


@dataclass(frozen=True)
class Difference(PredictiveCodec):
    """Encodes the integer differences of the bits, or the values by a lossless codec where that is smaller.

    Attributes:
        level: How much time streams take: a name in `LEVELS`.
        speed: "fast" encodes 16-bit floats of which few change as masked steps: more than twice as fast, about a
            percent larger, and refused by releases that do not know the option.
    """

    level: str = "default"
    speed: str = "default"

    name: ClassVar[str] = "difference"
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.level, str) or self.level not in LEVELS:
            raise CodecError(f"there is no level {self.level!r}; there are: {', '.join(LEVELS)}")
        if self.speed not in SPEEDS:
            raise CodecError(f"there is no speed {self.speed!r}; there are: {', '.join(SPEEDS)}")

    def config(self) -> dict[str, Any]:
        config = super().config()
        if self.speed == "default":  # releases that know no speed read such chunks
            del config["speed"]
        return config

    def encode(self, change: StatePair) -> bytes:
        return join_parts({name: self.part(name, change, change.after.get) for name in change.after})

    def part(self, name: str, change: StatePair, context: Callable[[str], Array | None]) -> bytes:
        """Return the part of one state.

        Args:
            context: Returns another state after the step, of the same shape and any dtype, which may serve as base.
        """
        unchanged = encode_unchanged(change, name)
        if unchanged is not None:
            return unchanged
        values = change.after[name]
        before = bits_before(change.before, name, values)
        residuals = (
            None
            if before is None
            else encode_residual(
                *(before, as_uints(values), values.dtype, self.level, second_moments_of(change)),
                fast=self.speed == "fast",
            )
        )
        part = None if residuals is None else bytes([UNCHANGED]) + residuals
        if part is not None and self.speed == "fast" and len(part) < MAX_FAST_RATIO * values.nbytes:
            return part
        return smaller_part(part, name, values, self.level, context)

    def predict(self, name: str, part: memoryview, decoder: PartDecoder) -> tuple[Array, memoryview]:
        if part[0] == UNCHANGED:
            return decoder.bits_before(name), part[1:]
        raise CodecError(f"{self.name} has no parts of kind {part[0]}")


def smaller_part(
    part: bytes | None, name: str, values: Array, level: str, context: Callable[[str], Array | None]
) -> bytes:
    """Return `part`, or the unpredicted part of `values` if that may be smaller and is.

    Args:
        values: The state after the step: any shape and dtype.
        context: As in `Difference.part`.
    """
    codec = candidate_codecs("parameter", name, values.dtype, level)[0].name
    if part is not None and level != "max":
        if len(part) < MAX_RATIOS.get(codec, MAX_RATIO) * estimate_unpredicted(values):
            return part
        if len(part) < estimate_by_rows(name, values, level, context):
            return part
    unpredicted = encode_unpredicted(name, values, level, context)
    return unpredicted if part is None or len(unpredicted) < len(part) else part
