"""The size of a value when every shared part is written out at each of its places.

A pickle refers to an earlier object in two bytes. Thirty lists of ten references to the next one are 10^30 values
for code that writes, compares or prints them ("billion laughs"). This module counts them in time that is linear in
the stored size, before any other code uses the value.
"""

from collections.abc import Collection, Iterator

import numpy as np

from ckpt_formats.containers.torchfile.record_forms import CompactRecord
from ckpt_formats.containers.torchfile.storages import Storage, StorageSlice, TensorRef
from ckpt_formats.core.errors import UnsafeError
from ckpt_formats.core.values import Global, Record, Size, StdDict, TensorName, Value, opaque

MAX_REPEATED = 400_000
"""Limit of repeated containers; a long text or array counts one for every 32 bytes."""
_PER_BYTE = 4
"""The limit is at least this many for each byte of the pickle: a large file may share more."""

_ATOMS = frozenset(
    (int, float, bool, complex, type(None), Global, Storage, StorageSlice, Size, CompactRecord, TensorName)
)
_TEXT = frozenset((str,))
_CONTAINERS = (list, tuple, dict, set, frozenset, Record)


def repeated_size(value: Value) -> int:
    """The number of containers that are written again if each is written wherever it occurs.

    A text or array counts one for every 32 bytes. A container inside itself is not counted again there, and texts
    that are keys are not counted.
    """
    sizes: dict[int, int] = {}  # by id: the size of a value when it is written out; 0 while it is being counted
    # An explicit stack, because a file may nest more deeply than Python's stack allows.
    outer: list[tuple[int, Iterator[Value], int]] = []
    key, parts, total, stored_size = 0, iter((value,)), 0, 0
    while True:
        for part in parts:
            kind = type(part)
            if kind in _ATOMS or (kind is str and len(part) < 32) or (kind is TensorRef and part.attrs is None):
                continue
            size = sizes.get(id(part))
            if size is None:
                size = _own_size(part)
                stored_size += size
                if inner_parts := _parts(part):
                    sizes[id(part)] = 0
                    outer.append((key, parts, total))
                    key, parts, total = id(part), iter(inner_parts), size
                    break
                sizes[id(part)] = size
            total += size
        else:
            if not outer:
                return total - stored_size
            sizes[key] = inside = total
            key, parts, total = outer.pop()
            total += inside


def written_size(value: Value) -> int:
    """The number of containers that are written for a value, also if it was written before: see `repeated_size`."""
    return repeated_size([value, value]) - repeated_size([value])


def check_repeated(value: Value, where: str, nbytes: int = 0, more: int = 0) -> None:
    """Raise `UnsafeError` for a value that repeats its parts far too often for its `nbytes` in a file.

    `more`: how many containers are repeated besides.
    """
    if repeated_size(value) + more > max(MAX_REPEATED, _PER_BYTE * nbytes):
        raise UnsafeError(
            "repeats its own parts so often that it would exhaust memory when written out",
            where=where,
            hint="No checkpoint needs this; such files are built to exhaust the memory of their reader.",
        )


def _own_size(value: Value) -> int:
    """The size of a value without its parts."""
    kind = type(value)
    if kind in _CONTAINERS or kind is TensorRef:
        return 1
    if kind is str or kind is bytes or kind is bytearray:
        return len(value) // 32
    if kind is np.ndarray:
        return int(value.nbytes) // 32
    return 1 if isinstance(value, _CONTAINERS) else 0


def _parts(value: Value) -> Collection[Value]:
    """The parts of a value that must be counted; none for a list or tuple of atoms."""
    kind = type(value)
    if kind is tuple or kind is list:
        return () if _ATOMS.issuperset(map(type, value)) else value
    if kind is Record:
        return [part for part in (value.args, value.kwargs, value.state, value.items, value.mapping) if part]
    if isinstance(value, dict):
        attrs = (value.attrs,) if isinstance(value, StdDict) and value.attrs else ()
        if not attrs and _TEXT.issuperset(map(type, value)):
            return value.values()
        return [*(key for key in value if type(key) is not str), *value.values(), *attrs]
    if kind is TensorRef:
        return (value.attrs,)
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    inside = opaque(value)
    return () if inside is None else (inside,)
