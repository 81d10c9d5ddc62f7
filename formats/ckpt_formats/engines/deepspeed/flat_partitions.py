"""The geometry of flat partitions: which blocks of a parameter each rank's vector holds.

ZeRO-1 and 2 lay the parameters of a group end to end and cut the whole in
equal partitions (arXiv 1910.02054); ZeRO-3 cuts every parameter by itself.
Arithmetic only.
"""

from collections.abc import Iterable, Sequence
from math import prod

from ckpt_formats.core.geometry import Shape


def parameter_offsets(shapes: Iterable[Shape], paddings: Sequence[int] | None = None) -> list[int]:
    """Where each parameter of a ZeRO-1 or 2 group begins, and at last where all end, in elements.

    `paddings` are the zeros after each parameter that `parameter_alignment` asks for.
    """
    at = [0]
    for i, shape in enumerate(shapes):
        at.append(at[-1] + prod(shape) + (paddings[i] if paddings else 0))
    return at


def chunk(size: int, ranks: int) -> int:
    """How many elements of a parameter each rank holds in ZeRO-3; the last are padded with zeros."""
    return -(-size // ranks)


def round_robin(names: Sequence[str], ranks: int) -> list[str]:
    """The order that `round_robin_gradients` gives a group: dealt out to the ranks in turn.

    >>> round_robin("abcde", 2)
    ['a', 'c', 'e', 'b', 'd']
    """
    return [name for rank in range(ranks) for name in names[rank::ranks]]


def undo_round_robin(names: Sequence[str], ranks: int) -> list[str]:
    """The order before `round_robin`.

    >>> undo_round_robin(["a", "c", "e", "b", "d"], 2)
    ['a', 'b', 'c', 'd', 'e']
    """
    places = round_robin([str(i) for i in range(len(names))], ranks)
    return [name for _, name in sorted(zip(map(int, places), names, strict=True))]
