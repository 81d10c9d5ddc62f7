"""Compare what is in a store, or on the disk, with the checksums of what was read.

Most stores give to an object an e_tag that is the MD5 of its bytes, or that of the MD5s of its parts. Others name
objects otherwise, for example where they encrypt them. So an equal e_tag shows that the bytes are there; if it is
another one, the object is read.
"""

from collections.abc import Sequence
from pathlib import Path

import xxhash

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.open_file import open_file
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores.e_tags import TAG
from ckpt_formats.stores.location import source_path

_BLOCK = 1 << 20


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
