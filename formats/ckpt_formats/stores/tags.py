"""E_tags that are the MD5 of an object, compared with the bytes of objects that one request brings whole.

Most stores have the MD5 as the e_tag of what was put in one request. For objects under some kinds of encryption it is
something else of the same form. So an e_tag that does not fit twice is an error only if that of another object fits.
"""

import hashlib
import re
from threading import Lock

from ckpt_formats.core.errors import CorruptError

_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class TagChecks:
    """The e_tags of one store. Threads may share it."""

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
        fits = hashlib.md5(data, usedforsecurity=False).hexdigest() == tag[1]
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
