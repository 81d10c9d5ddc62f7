"""How large a value is when what its parts share is written out at every place.

A pickle says "the same again" in two bytes. Thirty lists of ten references to the next one are 10^30 values to
whoever writes them out, compares them or prints them ("billion laughs"). So this is counted once, in time that is
linear in what is stored, before anything else looks at the value.
"""

from collections.abc import Collection, Iterator

import numpy as np

from ckpt_formats.containers.torchfile.record_forms import CompactRecord
from ckpt_formats.containers.torchfile.storages import Storage, StorageSlice, TensorRef
from ckpt_formats.core.errors import Unsafe
from ckpt_formats.core.values import Global, Record, Size, StdDict, TensorName, Value, opaque

MAX_REPEATED = 400_000
"""Containers, and long texts and arrays by 32 bytes, that a value may repeat."""
_PER_BYTE = 4
"""The same for each byte of the pickle: a large file may share more."""

_ATOMS = frozenset(
    (int, float, bool, complex, type(None), Global, Storage, StorageSlice, Size, CompactRecord, TensorName)
)
_TEXT = frozenset((str,))
_CONTAINERS = (list, tuple, dict, set, frozenset, Record)


def repeated(value: Value) -> int:
    """How many containers are written again if each is written out wherever it is mentioned.

    A text or array counts one for every 32 bytes. A container inside itself is not counted again there, nor are texts
    that are keys.
    """
    amounts: dict[int, int] = {}  # by id: what a value is when it is written out; 0 while it is being counted
    outer: list[tuple[int, Iterator[Value], int]] = []  # a stack of our own: a file may nest without end
    key, parts, count, stored = 0, iter((value,)), 0, 0
    while True:
        for part in parts:
            kind = type(part)
            if kind in _ATOMS or (kind is str and len(part) < 32) or (kind is TensorRef and part.attrs is None):
                continue
            amount = amounts.get(id(part))
            if amount is None:
                amount = _own_amount(part)
                stored += amount
                if inner := _parts(part):
                    amounts[id(part)] = 0
                    outer.append((key, parts, count))
                    key, parts, count = id(part), iter(inner), amount
                    break
                amounts[id(part)] = amount
            count += amount
        else:
            if not outer:
                return count - stored
            amounts[key] = inside = count
            key, parts, count = outer.pop()
            count += inside


def check_repeated(value: Value, where: str, nbytes: int = 0) -> None:
    """Raises `Unsafe` for a value that repeats its parts out of all proportion to its `nbytes` in a file."""
    if repeated(value) > max(MAX_REPEATED, _PER_BYTE * nbytes):
        raise Unsafe(
            "refers to its own parts again and again: written out, it would exhaust memory",
            where=where,
            hint="No checkpoint needs that; such files are made to exhaust whoever reads them.",
        )


def _own_amount(value: Value) -> int:
    """What a value is without its parts."""
    kind = type(value)
    if kind in _CONTAINERS or kind is TensorRef:
        return 1
    if kind is str or kind is bytes or kind is bytearray:
        return len(value) // 32
    if kind is np.ndarray:
        return int(value.nbytes) // 32
    return 1 if isinstance(value, _CONTAINERS) else 0


def _parts(value: Value) -> Collection[Value]:
    """What is to be counted in it: nothing in a list or tuple of atoms alone."""
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
