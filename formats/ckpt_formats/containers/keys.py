"""Which values may be keys of a dict or elements of a set, if a file states them.

Python hashes keys, and hashing recurses in C: a tuple that is nested deeply enough overflows the stack and kills the
process, and one that repeats its parts often enough takes forever. Hashes of numbers and of tuples of numbers are no
secret, so a file can state thousands of keys with one hash, and each of them is compared with all before it.
"""

from collections.abc import Iterable

import numpy as np

from ckpt_formats.core.errors import UnsafeError
from ckpt_formats.core.values import Global, Record, Size, TensorName, Value, kind_of

MAX_DEPTH = 6
MAX_PARTS = 256
MAX_EQUAL = 64
"""How many keys of one dict or set may have one hash."""
_MAX_BITS = 1 << 10
"""Bits of an integer."""
_OWN_HASH = (1 << 61) - 1
"""Integers whose magnitude is less are their own hashes."""
_ATOMS = frozenset({str, bytes, bool, float, complex, type(None), Global, TensorName})


def check_key(key: Value, where: str, others: frozenset[type] = frozenset({Record})) -> None:
    """Raise `UnsafeError` if the key cannot be hashed, or not quickly. `others`: types that are hashed by identity."""
    _count_parts(key, 0, 0, where, others)


def _count_parts(key: Value, depth: int, parts: int, where: str, others: frozenset[type]) -> int:
    """The number of parts visited so far, this one included."""
    kind = type(key)
    if kind in _ATOMS or kind in others:
        return parts + 1
    if kind is int:
        if key.bit_length() <= _MAX_BITS:
            return parts + 1
    elif kind in (tuple, frozenset, Size):
        if depth < MAX_DEPTH and parts + len(key) <= MAX_PARTS:
            for part in key:
                parts = _count_parts(part, depth + 1, parts, where, others)
            return parts + 1
    elif isinstance(key, np.generic) and not isinstance(key, np.void):
        return parts + 1
    raise UnsafeError(
        f"{kind_of(key)} is a key or an element of a set; it cannot be one, or is nested too deeply",
        where=where,
    )


class KeyHashes:
    """The hashes of the keys of one dict or set, which may be filled in several steps."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, key: Value, where: str) -> None:
        """Count the hash of a key that was checked. Raises `UnsafeError` if too many are equal.

        Equal keys count as often as they are stated: what states one key so often is no checkpoint either.
        """
        if type(key) not in _SPREAD and not (type(key) is int and -_OWN_HASH < key < _OWN_HASH):
            number = hash(key)
            count = self._counts[number] = self._counts.get(number, 0) + 1
            if count > MAX_EQUAL:
                raise UnsafeError("too many keys of a dict, or elements of a set, have the same hash", where=where)


_SPREAD = frozenset({str, bytes, bool, type(None), Global, TensorName, Record})
"""No file can state many of these with one hash: it is secret, or the object's own."""


def checked_keys(keys: Iterable[Value], where: str) -> list[Value]:
    """The same keys, all of one dict or set, if they can be hashed and looked up quickly.

    Raises `UnsafeError`, or `TypeError` for what has no hash.
    """
    checked, hashes = list(keys), KeyHashes()
    for key in checked:
        if type(key) is not str:
            if type(key).__hash__ is None:
                raise TypeError(f"{kind_of(key)} is a key")
            check_key(key, where)
            hashes.add(key, where)
    return checked
