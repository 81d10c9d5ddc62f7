"""The geometry of flat partitions: which elements of a parameter are in each rank's vector.

ZeRO-1 and 2 concatenate the parameters of a group and split the result into equal
partitions (arXiv 1910.02054); ZeRO-3 splits every parameter separately. Only arithmetic.
"""

from collections.abc import Iterable, Sequence
from math import prod

from ckpt_formats.core.geometry import Shape


def parameter_offsets(shapes: Iterable[Shape], paddings: Sequence[int] | None = None) -> list[int]:
    """The offset of each parameter in the flat buffer of a ZeRO-1 or 2 group, and last its length, in elements.

    `paddings` are the numbers of zeros after each parameter, if the run has `parameter_alignment`.
    """
    at = [0]
    for i, shape in enumerate(shapes):
        at.append(at[-1] + prod(shape) + (paddings[i] if paddings else 0))
    return at


def chunk(size: int, ranks: int) -> int:
    """The number of elements of a parameter on each rank in ZeRO-3; the last slices are padded with zeros."""
    return -(-size // ranks)


def round_robin(names: Sequence[str], ranks: int) -> list[str]:
    """The order of a group's names with `round_robin_gradients`: parameters are assigned to the ranks in turn.

    >>> round_robin("abcde", 2)
    ['a', 'c', 'e', 'b', 'd']
    """
    return [name for rank in range(ranks) for name in names[rank::ranks]]


def undo_round_robin(names: Sequence[str], ranks: int) -> list[str]:
    """The order before `round_robin`.

    >>> undo_round_robin(["a", "c", "e", "b", "d"], 2)
    ['a', 'b', 'c', 'd', 'e']
    """
    order = round_robin([str(i) for i in range(len(names))], ranks)
    return [name for _, name in sorted(zip(map(int, order), names, strict=True))]
