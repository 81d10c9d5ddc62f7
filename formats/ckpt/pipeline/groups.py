"""Which files are written in step, and by which shard.

Those of tensor-parallel ranks are in step, because each has other columns of the same rows.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence

from ckpt.pipeline.shard import Shard
from ckpt_formats.core.format import FilePlan

Group = tuple[FilePlan, ...]

_AXIS = "tp"
_NUMBER = "rank"
"""The rank's number among all, which some formats state besides."""
_MAX_GROUP = 64
_GROUPS = 4
"""Groups of files for each shard. Files are written in step only where there are as many."""


def in_step(files: Iterable[FilePlan], max_size: int) -> list[Group]:
    """The files in groups of at most `max_size`, the largest group first.

    The ranks of a group differ in nothing but the tensor-parallel rank. Of each rank's files of one role, the first
    ones are in one group, then the second ones. But where files have a rank's number, it has shared its tensors out
    among them, each rank as its sizes are: then all of them are in one group.
    """
    groups: dict[object, list[FilePlan]] = {}
    numbers: dict[object, dict[object, int]] = {}
    for file in files:
        key: object = file.file
        if _AXIS in file.rank:
            alike = (file.role, *sorted((axis, n) for axis, n in file.rank.items() if axis not in (_AXIS, _NUMBER)))
            of_rank = numbers.setdefault((alike, file.rank[_AXIS]), {})
            key = (alike, of_rank.setdefault(file.rank.get(_NUMBER, file.file), len(of_rank)))
        groups.setdefault(key, []).append(file)
    parts = (members[at : at + max_size] for members in groups.values() for at in range(0, len(members), max_size))
    return sorted(map(tuple, parts), key=_order)


def _order(group: Sequence[FilePlan]) -> int:
    """Large groups first. Those of about equal size stay in the order of the plan: neighbours share a layout."""
    size = nbytes(group)
    shift = max(size.bit_length() - 4, 0)
    return -(size >> shift << shift)


def ranks(group: Sequence[FilePlan]) -> int:
    """Of how many tensor-parallel ranks the files of a group are."""
    return len({file.rank.get(_AXIS) for file in group})


def nbytes(group: Sequence[FilePlan]) -> int:
    """About how many bytes are read and written for the files."""
    return sum(file.nbytes for file in group)


def deal(files: Sequence[FilePlan], shard: Shard) -> list[Group]:
    """The groups of files that a shard writes: the largest first, each to the shard with the fewest bytes so far.

    It depends on the plan and the number of shards alone, so all processes deal alike.
    """
    if shard.only_commits:
        return []
    return [group for group, number in _dealt(files, shard.count) if number == shard.number]


def share_of(files: Sequence[FilePlan], shard: Shard) -> list[FilePlan]:
    """The files that a shard writes."""
    return [part for group in deal(files, shard) for part in group]


def missing_by_shard(missing: Iterable[FilePlan], files: Sequence[FilePlan], count: int) -> dict[int, tuple[str, ...]]:
    """The names of missing files by the numbers of the shards that write them."""
    names = {part.file for part in missing}
    by_shard: dict[int, list[str]] = {}
    for group, number in _dealt(files, count):
        if own := [part.file for part in group if part.file in names]:
            by_shard.setdefault(number, []).extend(own)
    return {number: tuple(by_shard[number]) for number in sorted(by_shard)}


def _dealt(files: Sequence[FilePlan], count: int) -> Iterator[tuple[Group, int]]:
    """All groups, each with the number of the shard that writes it."""
    groups = in_step(files, max(1, min(_MAX_GROUP, len(files) // (_GROUPS * count))))
    loads = [(0, number) for number in range(count)]
    for group in sorted(groups, key=lambda group: (-nbytes(group), group[0].file)):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + nbytes(group) + 1, number))
        yield group, number
