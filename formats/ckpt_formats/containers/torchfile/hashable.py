"""Which values may be keys of a dict or elements of a set.

Python hashes keys, and hashing recurses in C: a tuple that is nested deeply
enough overflows the stack and kills the process, and one that repeats its
parts often enough takes forever.
"""

import numpy as np

from ckpt_formats.containers.torchfile.record_forms import CompactRecord
from ckpt_formats.containers.torchfile.storages import Storage, TensorRef
from ckpt_formats.core.errors import UnsafeError
from ckpt_formats.core.values import Global, Record, Size, Value, kind_of

MAX_DEPTH = 6
MAX_PARTS = 256
_MAX_INT = 1 << 64  # an attacker can construct longer integers whose hashes collide

_ATOMS = frozenset({str, bytes, bool, float, complex, type(None), Global})
_BY_IDENTITY = frozenset({Record, TensorRef, Storage})
_FLAT = frozenset({str, CompactRecord})


def hashable(key: Value, where: str) -> Value:
    """The same key. Raises `UnsafeError` if it cannot be hashed, or not quickly."""
    if type(key) not in _FLAT:
        _count(key, 0, 0, where)
    return key


def _count(key: Value, depth: int, parts: int, where: str) -> int:
    """The number of parts visited so far, this one included."""
    kind = type(key)
    if kind in _ATOMS or kind in _BY_IDENTITY:
        return parts + 1
    if kind is int:
        if -_MAX_INT < key < _MAX_INT:
            return parts + 1
    elif kind in (tuple, frozenset, Size):
        if depth < MAX_DEPTH and parts + len(key) <= MAX_PARTS:
            for part in key:
                parts = _count(part, depth + 1, parts, where)
            return parts + 1
    elif isinstance(key, np.generic) and not isinstance(key, np.void):
        return parts + 1
    raise UnsafeError(
        f"{kind_of(key)} is a key or an element of a set; it cannot be one, or is nested too deeply",
        where=where,
    )
