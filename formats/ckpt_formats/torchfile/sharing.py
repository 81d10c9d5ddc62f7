"""How large a value is when what its parts share is written out at every place.

A pickle says "the same again" in two bytes. Thirty lists of ten references to the next one are 10^30 values to
whoever writes them out, compares them or prints them ("billion laughs"). So this is counted once, in time that is
linear in what is stored, before anything else looks at the value.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from ckpt_formats.errors import Unsafe
from ckpt_formats.torchfile.forms import Formed
from ckpt_formats.torchfile.storages import Storage, StorageSlice, TensorRef
from ckpt_formats.values import Global, Record, Size, StdDict, TensorName, Value, opaque

MOST_REPEATED = 400_000
"""Containers, and long texts and arrays by 32 bytes, that a value may repeat."""
_PER_BYTE = 4
"""The same for each byte of the pickle: a large file may share more."""

_ATOMS = frozenset((int, float, bool, complex, type(None), Global, Storage, StorageSlice, Size, Formed, TensorName))
_CONTAINERS = (list, tuple, dict, set, frozenset, Record)


def repeated(value: Value) -> int:
    """How many containers are written again if each is written out wherever it is mentioned.

    A text or array counts one for every 32 bytes. A container inside itself is not counted again there, nor are texts
    that are keys.
    """
    return _Count().of(value)


def check_repeated(value: Value, where: str, nbytes: int = 0) -> None:
    """Raises `Unsafe` for a value that repeats its parts out of all proportion to its `nbytes` in a file."""
    if repeated(value) > max(MOST_REPEATED, _PER_BYTE * nbytes):
        raise Unsafe(
            "refers to its own parts again and again: written out, it would exhaust memory",
            where=where,
            hint="No checkpoint needs that; such files are made to exhaust whoever reads them.",
        )


class _Count:
    """One walk, on a stack of its own: a file may nest without end."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._stored = 0

    def of(self, root: Value) -> int:
        known, total = self._known, [0]
        # Of each container that is being counted: its id, its parts that are left, what was counted of it.
        stack: list[tuple[int, Iterator[Value], list[int]]] = [(0, iter((root,)), total)]
        while stack:
            key, parts, counted = stack[-1]
            inner = self._next_container(parts, counted)
            if inner is not None:
                stack.append((id(inner), iter(_parts(inner)), [1]))
                continue
            stack.pop()
            if stack:
                known[key] = counted[0]
                stack[-1][2][0] += counted[0]
        return total[0] - self._stored

    def _next_container(self, parts: Iterator[Value], counted: list[int]) -> Value:
        """The next part that is to be counted on its own; what comes before it is added to `counted`."""
        known = self._known
        for part in parts:
            kind = type(part)
            if kind in _ATOMS or (kind is str and len(part) < 32) or (kind is TensorRef and part.attrs is None):
                continue
            amount = known.get(id(part))
            if amount is None:
                amount = _amount(part)
                self._stored += amount
                if _has_parts(part):
                    known[id(part)] = 0  # while it is open: a mention from its inside
                    return part
                known[id(part)] = amount
            counted[0] += amount
        return None


def _has_parts(value: Value) -> bool:
    """Is something in it that is to be counted? In tuples and lists of numbers nothing is left to look at."""
    kind = type(value)
    if kind is tuple or kind is list:
        return not _ATOMS.issuperset(map(type, value))
    return isinstance(value, _CONTAINERS) or kind is TensorRef or opaque(value) is not None


def _amount(value: Value) -> int:
    kind = type(value)
    if kind is str or kind is bytes or kind is bytearray:
        return len(value) // 32
    if kind is np.ndarray:
        return int(value.nbytes) // 32
    return 1 if isinstance(value, _CONTAINERS) or kind is TensorRef else 0


def _parts(value: Value) -> Iterable[Value]:
    if isinstance(value, dict):
        keys = (key for key in value if type(key) is not str)
        attrs = (value.attrs,) if type(value) is StdDict and value.attrs else ()
        return chain(keys, value.values(), attrs)
    if isinstance(value, Record):
        return [part for part in (value.args, value.kwargs, value.state, value.items, value.mapping) if part]
    if isinstance(value, TensorRef):
        return (value.attrs,)
    if isinstance(value, np.ndarray):
        return (opaque(value),)
    parts: Iterable[Value] = value
    return parts
