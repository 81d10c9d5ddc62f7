"""Where the parameters lie in the distributed optimizer's flat buffers. Arithmetic only.

Megatron keeps the optimizer's states in buffers without names. Parameters lie in
them in the reverse of the module's order, since that is the order in which
gradients come. A buffer is cut into buckets: one ends when it is large enough, or
around a parameter that must have its own. Each parameter begins at a multiple of
64 elements (not before core 0.8). Buckets are padded, too, but files leave
that padding out. Source: Megatron core, `_ParamAndGradBuffer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ckpt_formats.core.geometry import Shape

ALIGNMENTS = (64, 1)
"""Of the beginning of a parameter, the newer first."""


@dataclass(frozen=True)
class BufferItem:
    """A parameter in a buffer."""

    name: str
    shape: Shape
    alone: bool = False
    """It has a bucket of its own: a table shared by the first and last stage."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class BufferSlot:
    """Where a parameter lies: its bucket, and its first element there."""

    bucket: int
    start: int


@dataclass(frozen=True)
class BufferLayout:
    """A buffer: where each parameter lies, and how long each bucket is."""

    places: dict[str, BufferSlot]
    buckets: tuple[int, ...]

    def flat(self) -> dict[str, int]:
        """Each parameter's first element, in buckets laid end to end."""
        starts = [sum(self.buckets[:i]) for i in range(len(self.buckets))]
        return {name: starts[place.bucket] + place.start for name, place in self.places.items()}


def fill(items: Sequence[BufferItem], max_bucket: int | None, alignment: int) -> BufferLayout:
    """Lay parameters, in the module's order, into buckets that end once they have `most` elements."""
    places: dict[str, BufferSlot] = {}
    buckets: list[int] = []
    at, count = 0, 0
    for item in reversed(items):
        at = _up(at, alignment)
        if item.alone and count:
            buckets.append(at)
            at, count = 0, 0
        places[item.name] = BufferSlot(len(buckets), at)
        at, count = at + item.numel, count + 1
        if item.alone or (max_bucket is not None and at >= max_bucket):
            buckets.append(at)
            at, count = 0, 0
    if count:
        buckets.append(at)
    return BufferLayout(places, tuple(buckets))


def fit(items: Sequence[BufferItem], buckets: Sequence[int], alignment: int) -> BufferLayout | None:
    """Lay parameters into buckets of these lengths; None if they do not fit them exactly."""
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
    whole = bucket == len(buckets) - 1 and _ends(at, buckets[bucket], alignment)
    return BufferLayout(places, tuple(buckets)) if whole or (not items and not buckets) else None


def default_bucket_size(dp: int) -> int:
    """The number of elements that ends a bucket, where the user says none."""
    return max(40_000_000, 1_000_000 * dp)


def _ends(at: int, length: int, alignment: int) -> bool:
    """May a bucket that is filled so far have this length? It may end where the next parameter would begin."""
    return 0 < at <= length <= _up(at, alignment)


def _up(at: int, multiple: int) -> int:
    return -(-at // multiple) * multiple
