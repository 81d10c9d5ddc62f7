"""Compare what is in a store, or on the disk, with the checksums of what was read.

Most stores give to an object an e_tag that is the MD5 of its bytes, or that of the MD5s of its parts. Others name
objects otherwise, for example where they encrypt them. So an equal e_tag shows that the bytes are there; if it is
another one, the object is read.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import xxhash

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.open_file import open_file
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores.location import source_path

TAG = "e_tag"
"""In the entry of a receipt, the e_tag that most stores will give to the object."""
_BLOCK = 1 << 20


class RunningTag:
    """The e_tag that most stores give to an object that `Bucket.upload` puts, computed while its bytes pass."""

    def __init__(self, nbytes: int) -> None:
        from ckpt_formats.stores.bucket import part_nbytes  # only if there is a store

        self._part = self._left = part_nbytes(nbytes)
        self._parts = list[bytes]()
        self._state = hashlib.md5(usedforsecurity=False)

    def update(self, data: memoryview) -> None:
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


def compare_objects(target: StorePath, receipts: Sequence[Receipt]) -> None:
    """Raise `CorruptError` if an object of a target has other bytes than its receipt says."""
    unknown = [one for one in receipts if one.e_tag.strip('"') != one.entry.get(TAG)]
    if not unknown:
        return
    listed = source_path(str(target))
    for receipt in unknown:
        path = listed if listed.is_file() else listed / receipt.file
        if not path.is_file() or digest_of(path) != receipt.seals[0].digest:
            raise CorruptError(
                "the object in the store has other bytes than were read",
                where=path,
                hint="Remove it, and copy again; check the memory of the machine, and the store.",
            )


def digest_of(path: Path) -> int:
    """The XXH3-128 of a file, which is read."""
    file, digest, at = open_file(path), xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(_BLOCK))
    try:
        while nbytes := file.read_into(at, buffer):
            digest.update(buffer[:nbytes])
            at += nbytes
    finally:
        file.close()
    return int(digest.intdigest())
