"""Which rank writes what: the elements that several ranks have are split equally among them, and none is left out.

Ranks hold a piece together if they have the same elements of a parameter under the same name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box, overlaps
from ckpt_training.local_shards import LocalPart
from ckpt_training.routing import Ranges

Piece = tuple[str, Box, int, int]
"""The name of a parameter, a block of it, and a range of elements of the block."""


def piece_of(part: LocalPart) -> Piece:
    """Return the elements that a part has."""
    return part.name, part.box, part.start, part.stop


def check_coverage(holders: Mapping[Piece, Sequence[int]], shapes: Mapping[str, tuple[int, ...]], hint: str) -> None:
    """Raise `UnsupportedError` unless the pieces of each tensor have each element once.

    Args:
        holders: The ranks that hold each piece.
        shapes: The full shape of each tensor, by name.
        hint: What the user can do.
    """
    blocks: dict[str, dict[Box, list[tuple[int, int]]]] = {}
    for name, box, start, stop in holders:
        blocks.setdefault(name, {}).setdefault(box, []).append((start, stop))
    for name, by_box in blocks.items():
        tiled = not any(overlaps(list(by_box))) and sum(box.size for box in by_box) == prod(shapes[name])
        for box, ranges in by_box.items():
            ends = [0, *(stop for _, stop in sorted(ranges))]
            tiled &= [start for start, _ in sorted(ranges)] == ends[:-1] and ends[-1] == box.size
        if not tiled:
            having = sorted({rank for piece, of in holders.items() if piece[0] == name for rank in of})
            raise UnsupportedError(
                f"the parts of `{name}` on ranks {', '.join(map(str, having))} do not make up the full tensor once",
                hint=hint,
            )


def equal_shares(
    pieces: Sequence[tuple[Piece, tuple[int, ...]]], grain: Callable[[Piece], int]
) -> Iterator[dict[int, tuple[int, int]]]:
    """Yield for each piece the range of elements that each of its holders gets, counted as those of the piece.

    Each rank gets an equal share of all pieces that the same ranks hold.

    Args:
        pieces: The pieces, each with the ranks that hold it.
        grain: Returns the number of elements that stay together: a boundary lies only at a multiple of it.
    """
    total: dict[tuple[int, ...], int] = {}
    for (_, _, start, stop), of in pieces:
        total[of] = total.get(of, 0) + stop - start
    at = dict.fromkeys(total, 0)
    for piece, of in pieces:
        _, _, start, stop = piece
        size, count = max(grain(piece), 1), len(of)
        cuts = [_cut(total[of] * turn // count - at[of], start, stop, size) for turn in range(count + 1)]
        at[of] += stop - start
        yield dict(zip(of, pairwise(cuts), strict=True))


def own_shares(
    pieces: Sequence[tuple[Piece, Ranges]], rank: int, grain: Callable[[Piece], int]
) -> Iterator[tuple[int, int]]:
    """Yield of each piece what `equal_shares` yields for this rank, which holds all of them.

    Ranks that hold pieces together must give these in the same order.
    """
    total: dict[Ranges, int] = {}
    for (_, _, start, stop), of in pieces:
        total[of] = total.get(of, 0) + stop - start
    turns = {of: sum(min(high, rank) - low for low, high in of if low < rank) for of in total}
    counts = {of: sum(high - low for low, high in of) for of in total}
    at = dict.fromkeys(total, 0)
    for piece, of in pieces:
        _, _, start, stop = piece
        size, turn = max(grain(piece), 1), turns[of]
        low, high = (_cut(total[of] * one // counts[of] - at[of], start, stop, size) for one in (turn, turn + 1))
        at[of] += stop - start
        yield low, high


def _cut(element: int, start: int, stop: int, size: int) -> int:
    """The boundary in a piece that is nearest to an element of it, which may lie outside."""
    cut = min(max(element, 0), stop - start)
    return start + size * (cut // size + (2 * (cut % size) > size))
