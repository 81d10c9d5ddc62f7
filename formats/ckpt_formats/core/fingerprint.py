"""A short name for plain data: equal data have the same, and other data another."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np


def fingerprint(value: Any) -> str:
    """Of dataclasses (all their fields), mappings, sequences, sets, paths, types of elements and plain values.

    Raises `TypeError` for anything else: what is left out could not tell one text of work from another.

    >>> fingerprint({"dp": 1}) == fingerprint({"dp": 2})
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    for text in _texts(value):
        data = text.encode("utf-8", "surrogateescape")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


def _texts(value: Any) -> Iterator[str]:
    if is_dataclass(value) and not isinstance(value, type):
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        for field in fields(value):
            yield field.name
            yield from _texts(getattr(value, field.name))
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}"
        # Threads may have filled it in any order.
        yield from sorted(fingerprint(item) for item in value.items())
    elif isinstance(value, (list, tuple)):
        yield f"sequence {len(value)}"
        for item in value:
            yield from _texts(item)
    elif isinstance(value, (set, frozenset)):
        yield f"set {len(value)}"
        yield from sorted(map(fingerprint, value))
    elif isinstance(value, Path):
        yield f"path {value.absolute()}"
    elif isinstance(value, (Enum, bytes, np.dtype)) or value is None or isinstance(value, (str, bool, int, float)):
        yield f"{type(value).__name__} {value!r}"
    else:
        raise TypeError(f"no fingerprint of {type(value).__qualname__}")
