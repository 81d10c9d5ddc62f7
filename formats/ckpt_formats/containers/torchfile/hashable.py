"""Which values of a pickle may be keys of a dict or elements of a set: see `containers.keys`."""

from ckpt_formats.containers.keys import MAX_DEPTH, MAX_PARTS, KeyHashes, check_key
from ckpt_formats.containers.torchfile.record_forms import CompactRecord
from ckpt_formats.containers.torchfile.storages import Storage, TensorRef
from ckpt_formats.core.errors import UnsafeError
from ckpt_formats.core.values import Record, Value

__all__ = ["MAX_DEPTH", "MAX_PARTS", "hashable"]

_BY_IDENTITY = frozenset({Record, TensorRef, Storage})
_MAX_BITS = 64
_FLAT = frozenset({str, CompactRecord})


def hashable(key: Value, where: str, hashes: KeyHashes | None = None) -> Value:
    """The same key. Raises `UnsafeError` if it cannot be hashed, or not quickly.

    `hashes`: those of the other keys of the same dict or set.
    """
    if type(key) not in _FLAT:
        if type(key) is int and key.bit_length() > _MAX_BITS:
            raise UnsafeError(f"an integer of {key.bit_length():,} bits is a key or an element of a set", where=where)
        check_key(key, where, _BY_IDENTITY)
        if hashes is not None and type(key) not in _BY_IDENTITY:
            hashes.add(key, where)
    return key
