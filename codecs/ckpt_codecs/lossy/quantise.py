"""Numbers as multiples of a step: a uniform quantiser whose zero may be wider than its other bins."""

from dataclasses import dataclass
from struct import Struct

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError, NotApplicable
from ckpt_codecs.lossy import symbols
from ckpt_codecs.lossy.sections import Pieces

_HEAD = Struct("<f3B")
CENTRED = 3
"""Magnitudes up to this are given back as the mean of what they stand for; others as they are."""
_MIDDLE = 128
_LARGEST = 1 << 30
_TABLED = 1 << 12
"""Magnitudes up to this are looked up."""


@dataclass(frozen=True)
class Quantiser:
    """Steps of this length. `zero`: the half width of the bin of 0 is so many steps; 0.5 is plain rounding."""

    step: float
    zero: float = 0.5

    def encode(self, values: Array) -> bytes:
        """Of n x m float32. Raises `NotApplicable` where a step is too short for them, or none."""
        step = np.float32(self.step)
        if not (np.isfinite(step) and step > 0):
            raise NotApplicable("there is no step to quantise with")
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = np.abs(values / step)
        if not scaled.max(initial=0) < _LARGEST:
            raise NotApplicable("the values are too large for the step, or are no numbers")
        magnitude = (scaled + np.float32(1 - self.zero)).astype(np.int32)
        centres = [_MIDDLE] * CENTRED if self.zero == 0.5 else _centres(scaled, magnitude)
        data = symbols.encode(np.where(values < 0, -magnitude, magnitude), values.shape[1])
        return _HEAD.pack(step, *centres) + data


def decode(data: bytes, shape: tuple[int, int]) -> Array:
    """The numbers again, float32. Raises `CodecError` for what is damaged."""
    source = Pieces(data)
    step, *centres = _HEAD.unpack(source.take(_HEAD.size))
    if not (np.isfinite(step) and step > 0):
        raise CodecError("a quantiser's step is no positive number")
    found = symbols.decode(data[_HEAD.size :], shape[0] * shape[1], shape[1]).reshape(shape)
    most = int(np.abs(found).max(initial=0))
    near = np.array([0, *(k - 0.5 + centre / 256 for k, centre in enumerate(centres, 1))], np.float32)
    with np.errstate(over="ignore"):
        if most > _TABLED:
            made = np.where(np.abs(found) > CENTRED, found, 0).astype(np.float32)
            made += np.sign(found) * near[np.where(made != 0, 0, np.abs(found))]
            return made * np.float32(step)
        table = np.arange(max(most, CENTRED) + 1, dtype=np.float32)
        table[: CENTRED + 1] = near
        table *= np.float32(step)
        return np.concatenate([-table[:0:-1], table])[found + np.int32(table.size - 1)]


def _centres(scaled: Array, magnitude: Array) -> list[int]:
    """The means of the first bins above zero, in steps from where they would begin if all had a step's width."""
    some = np.flatnonzero(magnitude)
    sizes, each = scaled.reshape(-1)[some], np.minimum(magnitude.reshape(-1)[some], CENTRED + 1)
    sums, counts = np.bincount(each, sizes, CENTRED + 2), np.bincount(each, minlength=CENTRED + 2)
    k = np.arange(CENTRED + 2)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), k)
    return [int(c) for c in np.clip(np.rint((means - k + 0.5) * 256), 0, 255)[1 : CENTRED + 1]]
