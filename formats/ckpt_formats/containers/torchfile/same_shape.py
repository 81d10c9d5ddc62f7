"""Archives that differ in nothing but the values of one tensor: they need not be understood twice.

A distributed checkpoint has an archive for each block of a tensor, and those of
one shape are the same byte for byte, up to the values, their checksum, and the
id that torch computes from all checksums. So one is parsed, and the others are
compared with it.
"""

from dataclasses import dataclass

from ckpt_formats.containers.torchfile.file_window import ByteSource
from ckpt_formats.containers.torchfile.zip_archive import Archive, ZipMember, central_entries
from ckpt_formats.core.files import crc32
from ckpt_formats.core.tensor import FileBlob

_MAX_EDGE = 4096
_CRC = slice(16, 20)
"""In an entry of the directory."""
_ID = ".data/serialization_id"
_SIGNED = (16, 24)
"""Lengths of data descriptors that begin with a signature; the checksum follows it."""


@dataclass(frozen=True, eq=False)
class ParsedTemplate:
    """One archive that was read, to compare others with."""

    raw: FileBlob
    """Its tensor, in coordinates of the archive, and without a seal."""
    start: int
    """Where the values' storage lies in the archive."""
    stop: int
    _head: bytes
    _tail: bytes
    """What follows the values, with zeros where archives may differ."""
    _holes: tuple[slice, ...]
    _checksum: slice
    """Of the values, in the tail."""
    _id: tuple[slice, slice] | None
    """The id and its checksum, in the tail."""

    def checksum(self, window: ByteSource) -> int | None:
        """The CRC-32 of the values in another archive of the same length; None if it is not alike."""
        tail = window.at(self.stop, len(self._tail))
        if window.at(0, self.start) != self._head or _filled(tail, self._holes) != self._tail:
            return None
        if self._id is not None and crc32(tail[self._id[0]]) != _number(tail[self._id[1]]):
            return None
        return _number(tail[self._checksum])


def parse_template(archive: Archive, key: str, raw: FileBlob, window: ByteSource) -> ParsedTemplate | None:
    """What to compare others with; None for an archive without checksums, or with much in it beside the tensor.

    `raw` is the tensor as it lies in the file, in storage `key`.
    """
    storage = archive.member(f"data/{key}")
    start = archive.start(storage) - window.base
    stop = start + storage.nbytes
    if not archive.sealed or max(start, window.length - stop) > _MAX_EDGE:
        return None
    entries = dict(central_entries(window))

    def hole(member: ZipMember, part: slice, base: int) -> slice:
        return slice(base + part.start - stop, base + part.stop - stop)

    def described(member: ZipMember) -> slice:
        behind = archive.start(member) - window.base + member.nbytes
        signature = 4 if member.room - (behind - member.header) in _SIGNED else 0
        return hole(member, slice(signature, signature + 4), behind)

    checksum = hole(storage, _CRC, entries[storage.name])
    holes, identity = [checksum, described(storage)], None
    if _ID in archive:
        member = archive.member(_ID)
        at = archive.start(member) - window.base
        identity = (hole(member, slice(0, member.nbytes), at), hole(member, _CRC, entries[member.name]))
        holes += [*identity, described(member)]
    tail = window.at(stop, window.length - stop)
    if any(one.start < 0 for one in holes):
        return None
    local = FileBlob(raw.path, raw.offset - window.base, raw.shape, raw.dtype, raw.strides)
    ordered = tuple(sorted(holes, key=lambda one: int(one.start)))
    return ParsedTemplate(local, start, stop, window.at(0, start), _filled(tail, ordered), ordered, checksum, identity)


def _filled(tail: bytes, holes: tuple[slice, ...]) -> bytes:
    made = bytearray(tail)
    for hole in holes:
        made[hole] = bytes(hole.stop - hole.start)
    return bytes(made)


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")
