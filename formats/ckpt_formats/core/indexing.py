"""NumPy's basic indexing of lazy tensors: integers, slices with positive steps, and `...`."""

import operator
from typing import Any

from ckpt_formats.core.geometry import Box, Shape

Remainder = tuple[int | slice, ...]
"""The index into the array of a box, for each axis: 0 drops an axis of length 1, a slice takes every n-th element."""


def block_of_key(key: Any, shape: Shape) -> tuple[Box, Remainder]:
    """The box of a tensor of `shape` that holds what `key` selects, and the index into that box.

    Raises `IndexError` for anything that is not basic indexing, or is out of bounds, as NumPy does; negative steps and
    new axes are not supported.

    >>> block_of_key((slice(2, 8, 3), -1), (10, 7))
    (Box(start=(2, 6), stop=(8, 7)), (slice(None, None, 3), 0))
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    ellipses = sum(1 for one in keys if one is Ellipsis)
    if ellipses > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if len(keys) - ellipses > len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} axes, but {len(keys) - ellipses} were indexed")
    at = next((i for i, one in enumerate(keys) if one is Ellipsis), len(keys))
    full = [slice(None)] * (len(shape) - len(keys) + ellipses)
    keys[at : at + ellipses] = full
    start, stop, remainder = [], [], list[int | slice]()
    for one, length in zip(keys, shape, strict=True):
        low, high, rest = _along_axis(one, length)
        start.append(low)
        stop.append(high)
        remainder.append(rest)
    return Box(tuple(start), tuple(stop)), tuple(remainder)


def _along_axis(key: Any, length: int) -> tuple[int, int, int | slice]:
    if isinstance(key, slice):
        low, high, step = key.indices(length)
        if step < 1:
            raise IndexError("the step of a slice must be positive")
        return low, max(low, high), slice(None, None, step if step > 1 else None)
    if isinstance(key, bool):
        raise IndexError("only integers, slices (`:`) and ellipsis (`...`) are valid indices")
    try:
        number = operator.index(key)
    except TypeError:
        message = f"only integers, slices (`:`) and ellipsis (`...`) are valid indices, not {type(key).__name__}"
        raise IndexError(message) from None
    if not -length <= number < length:
        raise IndexError(f"index {number} is out of bounds for an axis of length {length}")
    return number % length, number % length + 1, 0
