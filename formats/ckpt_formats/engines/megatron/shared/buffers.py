"""The offsets of parameters in the flat buffers of the distributed optimizer. Arithmetic only, all in elements.

Megatron stores the optimizer's states in buffers without names. The parameters are in the reverse order of the
module, because gradients become ready in that order. A buffer is divided into buckets: a bucket ends when it is large
enough, and before and after a parameter that must have a bucket of its own. Each parameter begins at a multiple of
64 elements (before core 0.8: directly after the previous one). Megatron pads buckets in memory, but not in files.
Source: Megatron core, `_ParamAndGradBuffer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ckpt_formats.core.geometry import Shape

ALIGNMENTS = (64, 1)
"""The alignments of a parameter's first element that versions of Megatron use, the newest first."""


@dataclass(frozen=True)
class BufferItem:
    """A parameter in a buffer."""

    name: str
    shape: Shape
    own_bucket: bool = False
    """True if the parameter has a bucket of its own: a table that the first and the last stage share."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class BufferSlot:
    """The position of a parameter: its bucket, and its first element in the bucket."""

    bucket: int
    start: int


@dataclass(frozen=True)
class BufferLayout:
    """The slot of each parameter in a buffer, and the length of each bucket in elements."""

    places: dict[str, BufferSlot]
    buckets: tuple[int, ...]

    def flat(self) -> dict[str, int]:
        """The first element of each parameter in the concatenated buckets."""
        starts = [sum(self.buckets[:i]) for i in range(len(self.buckets))]
        return {name: starts[place.bucket] + place.start for name, place in self.places.items()}


def fill(items: Sequence[BufferItem], max_bucket: int | None, alignment: int) -> BufferLayout:
    """The layout of parameters in buckets that end when they have at least `max_bucket` elements.

    `items` are in the module's order. If `max_bucket` is None, only an item that is `alone` ends a bucket.
    """
    places: dict[str, BufferSlot] = {}
    buckets: list[int] = []
    at, count = 0, 0
    for item in reversed(items):
        at = _up(at, alignment)
        if item.own_bucket and count:
            buckets.append(at)
            at, count = 0, 0
        places[item.name] = BufferSlot(len(buckets), at)
        at, count = at + item.numel, count + 1
        if item.own_bucket or (max_bucket is not None and at >= max_bucket):
            buckets.append(at)
            at, count = 0, 0
    if count:
        buckets.append(at)
    return BufferLayout(places, tuple(buckets))


def fit(items: Sequence[BufferItem], buckets: Sequence[int], alignment: int) -> BufferLayout | None:
    """The layout of parameters in buckets of these lengths; None if the parameters do not fill them exactly."""
    places: dict[str, BufferSlot] = {}
    bucket, at = 0, 0
    for item in reversed(items):
        start = _up(at, alignment)
        while bucket < len(buckets) and start + item.numel > buckets[bucket]:
            if not _ends(at, buckets[bucket], alignment):
                return None
            bucket, at, start = bucket + 1, 0, 0
        if bucket == len(buckets):
            return None
        places[item.name] = BufferSlot(bucket, start)
        at = start + item.numel
    complete = bucket == len(buckets) - 1 and _ends(at, buckets[bucket], alignment)
    return BufferLayout(places, tuple(buckets)) if complete or (not items and not buckets) else None


def default_bucket_size(dp: int) -> int:
    """The size in elements at which a bucket ends if the user sets none; `dp` is the number of data-parallel ranks."""
    return max(40_000_000, 1_000_000 * dp)


def _ends(at: int, length: int, alignment: int) -> bool:
    """True if a bucket filled up to `at` may have this length: it may be padded up to the next parameter's start."""
    return 0 < at <= length <= _up(at, alignment)


def _up(at: int, multiple: int) -> int:
    return -(-at // multiple) * multiple
