"""Bring texts from each rank to the ranks that need them, in few rounds: in each, a rank sends to one other rank.

With `n` ranks there are log2(n) rounds. In a round, what has to go further than half of the rest of the way goes half
of it, so that equal texts of many ranks meet and become one. (Bruck et al., Efficient algorithms for all-to-all
communications, 1997.)
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

Ranges = tuple[tuple[int, int], ...]
"""Ranges of ranks, ascending and apart: the first rank, and the one after the last."""
Parcels = dict[tuple[str, Ranges], list[tuple[int, int]]]
"""By text and destinations, as distances from the rank that has them: the ranks that have sent the text."""


def ranks_in(ranges: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield the ranks in ranges."""
    for low, high in ranges:
        yield from range(low, high)


def route(
    texts: Iterable[tuple[str, Ranges]], rank: int, world: int, swap: Callable[[int, bytes], bytes]
) -> dict[str, Ranges]:
    """Return the texts that ranks have sent to this one, each with these ranks. Every rank must call it.

    Args:
        texts: What this rank sends, each with the ranks that get it.
        rank: This rank.
        world: The number of ranks.
        swap: Sends bytes to the rank at a distance, and returns those of the rank at this distance before this one.
    """
    parcels: Parcels = {}
    for text, to in texts:
        parcels.setdefault((text, _distances(to, rank, world)), []).append((rank, rank + 1))
    for bit in reversed(range((world - 1).bit_length())):
        step = 1 << bit
        near, far = _split(parcels, step)
        arriving = json.loads(zlib.decompress(swap(step, _encoded(far))))
        for text, to, senders in arriving:
            distances = tuple((low, high) for low, high in to)
            near.setdefault((text, distances), []).extend((low, high) for low, high in senders)
        parcels = near
    return {text: joined_ranges(senders) for (text, _), senders in parcels.items()}


def _distances(to: Ranges, rank: int, world: int) -> Ranges:
    """Ranks as distances from a rank, upwards and around."""
    ahead = [(max(low, rank) - rank, high - rank) for low, high in to if high > rank]
    behind = [(low - rank + world, min(high, rank) - rank + world) for low, high in to if low < rank]
    return (*ahead, *behind)


def _split(parcels: Parcels, step: int) -> tuple[Parcels, Parcels]:
    """What stays, and what goes a step on."""
    near: Parcels = {}
    far: Parcels = {}
    for (text, to), senders in parcels.items():
        if staying := tuple((low, min(high, step)) for low, high in to if low < step):
            near.setdefault((text, staying), []).extend(senders)
        if leaving := tuple((max(low, step) - step, high - step) for low, high in to if high > step):
            far.setdefault((text, leaving), []).extend(senders)
    return near, far


def _encoded(parcels: Parcels) -> bytes:
    rows = [(text, to, joined_ranges(senders)) for (text, to), senders in parcels.items()]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)


def joined_ranges(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return ranges in order, with neighbours as one."""
    if len(ranges) == 1:
        return (ranges[0],)
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and joined[-1][1] == low:
            joined[-1] = joined[-1][0], high
        else:
            joined.append((low, high))
    return tuple(joined)
