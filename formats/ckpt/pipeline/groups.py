"""Which files are written in step: those of tensor-parallel ranks, because each has other columns of the same rows."""

from collections.abc import Iterable, Sequence

from ckpt_formats.core.format import FilePlan

Group = tuple[FilePlan, ...]

_AXIS = "tp"
_NUMBER = "rank"
"""The rank's number among all, which some formats state besides."""


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
