"""The e_tags that most stores give to objects: the MD5 of the bytes, or that of the MD5s of the parts.

An equal e_tag shows that a store has the bytes. Another one shows nothing: a store may name objects otherwise, for
example where it encrypts them. So an e_tag that does not fit what is read, twice, is an error only if that of another
object fits.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from threading import Lock

from ckpt_formats.core.errors import CorruptError

TAG = "e_tag"
"""In the entry of a receipt, the e_tag that most stores will give to the object."""
_SAMPLE = 64 << 10
"""Bytes of each range that is read back of an object whose e_tag says nothing."""
_SAMPLES = 4
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class RunningTag:
    """The e_tag that most stores give to an object, computed while its bytes pass."""

    def __init__(self, part: int) -> None:
        """`part`: the bytes of each part in which the object is uploaded; 0 if it takes one request."""
        self._part = self._left = part
        self._parts = list[bytes]()
        self._state = hashlib.md5(usedforsecurity=False)

    def update(self, data: "memoryview | bytes") -> None:
        """Add bytes that follow those before."""
        while self._part and len(data) >= self._left:
            self._state.update(data[: self._left])
            data, self._left = data[self._left :], self._part
            self._parts.append(self._state.digest())
            self._state = hashlib.md5(usedforsecurity=False)
        self._state.update(data)
        self._left -= len(data)

    def text(self) -> str:
        """The e_tag, without quotation marks."""
        if not self._part:
            return self._state.hexdigest()
        parts = self._parts + ([self._state.digest()] if self._left < self._part else [])
        return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def tag_of(data: "bytes | memoryview") -> str:
    """The e_tag that most stores give to an object of these bytes that is put by one request."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def sampled(nbytes: int) -> Iterator[tuple[int, int]]:
    """The ranges of an object that are read back as a sample: its ends, and others at random; all of a small one."""
    if nbytes <= _SAMPLE * _SAMPLES:
        yield 0, nbytes
        return
    begins = {0, nbytes - _SAMPLE, *(random.randrange(nbytes - _SAMPLE) for _ in range(_SAMPLES - 2))}
    yield from ((begin, begin + _SAMPLE) for begin in sorted(begins))


class TagChecks:
    """Compares objects of one store, each read whole by one request, with their e_tags. Threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._has_fitted = False
        self._unlike: str | None = None
        """The first object whose e_tag does not fit."""

    def fits(self, key: str, e_tag: str, data: memoryview) -> bool:
        """Whether the bytes of an object fit its e_tag, or cannot be compared with it."""
        tag = _MD5.fullmatch(e_tag)
        if tag is None or (self._unlike is not None and not self._has_fitted):
            return True
        fits = tag_of(data) == tag[1]
        with self._lock:
            self._has_fitted = self._has_fitted or fits
        return fits

    def check(self, key: str, e_tag: str, data: memoryview, where: str) -> None:
        """Compare an object that was read again. Raises `CorruptError` if the store keeps MD5s, and this is another."""
        if self.fits(key, e_tag, data):
            return
        with self._lock:
            self._unlike = self._unlike or where
            if self._has_fitted:
                raise CorruptError(
                    "the bytes of the object do not have the MD5 that its e_tag states",
                    where=where,
                    hint="Write the object again from its source.",
                )
