"""Archives that differ only in the values of one tensor: one is parsed, the others are compared with it.

A distributed checkpoint has an archive for each block of a tensor. Archives of
one shape are equal byte for byte, except for the values, their checksum, and the
id that torch computes from all checksums.
"""

from dataclasses import dataclass

from ckpt_formats.containers.torchfile.file_window import ByteSource
from ckpt_formats.containers.torchfile.zip_archive import Archive, ZipMember, central_entries
from ckpt_formats.core.seals import crc32
from ckpt_formats.core.tensor import FileBlob

_MAX_EDGE = 4096
_CRC = slice(16, 20)
"""Position of the checksum in an entry of the directory."""
_ID = ".data/serialization_id"
_SIGNED = (16, 24)
"""Lengths of data descriptors that begin with a signature of four bytes, before the checksum."""


@dataclass(frozen=True, eq=False)
class ParsedTemplate:
    """A parsed archive to compare others with."""

    blob: FileBlob
    """Its tensor, with offsets from the beginning of the archive, and without a seal."""
    start: int
    """First and last byte (exclusive) of the storage in the archive."""
    stop: int
    _head: bytes
    _tail: bytes
    """The bytes after the values, with zeros where archives may differ."""
    _holes: tuple[slice, ...]
    _checksum: slice
    """Position of the checksum of the values, in the tail."""
    _id: tuple[slice, slice] | None
    """Positions of the id and of its checksum, in the tail."""

    def checksum(self, window: ByteSource) -> int | None:
        """The CRC-32 of the values in another archive of the same length; None if it differs elsewhere."""
        tail = window.at(self.stop, len(self._tail))
        if window.at(0, self.start) != self._head or _with_zeros(tail, self._holes) != self._tail:
            return None
        if self._id is not None and crc32(tail[self._id[0]]) != _as_uint(tail[self._id[1]]):
            return None
        return _as_uint(tail[self._checksum])


def parse_template(archive: Archive, key: str, blob: FileBlob, window: ByteSource) -> ParsedTemplate | None:
    """A template; None for an archive without checksums, or with more than 4096 bytes before or after the storage.

    `blob` is the tensor in the file; `key` is its storage.
    """
    storage = archive.member(f"data/{key}")
    start = archive.start(storage) - window.base
    stop = start + storage.nbytes
    if not archive.sealed or max(start, window.length - stop) > _MAX_EDGE:
        return None
    entries = dict(central_entries(window))

    def hole(member: ZipMember, part: slice, base: int) -> slice:
        return slice(base + part.start - stop, base + part.stop - stop)

    def descriptor_checksum(member: ZipMember) -> slice:
        end = archive.start(member) - window.base + member.nbytes
        signature = 4 if member.extent - (end - member.header) in _SIGNED else 0
        return hole(member, slice(signature, signature + 4), end)

    checksum = hole(storage, _CRC, entries[storage.name])
    holes, id_parts = [checksum, descriptor_checksum(storage)], None
    if _ID in archive:
        member = archive.member(_ID)
        start_of_id = archive.start(member) - window.base
        id_parts = (hole(member, slice(0, member.nbytes), start_of_id), hole(member, _CRC, entries[member.name]))
        holes += [*id_parts, descriptor_checksum(member)]
    tail = window.at(stop, window.length - stop)
    if any(part.start < 0 for part in holes):
        return None
    relative = FileBlob(blob.path, blob.offset - window.base, blob.shape, blob.dtype, blob.strides)
    ordered = tuple(sorted(holes, key=lambda part: int(part.start)))
    return ParsedTemplate(
        relative, start, stop, window.at(0, start), _with_zeros(tail, ordered), ordered, checksum, id_parts
    )


def _with_zeros(tail: bytes, holes: tuple[slice, ...]) -> bytes:
    result = bytearray(tail)
    for hole in holes:
        result[hole] = bytes(hole.stop - hole.start)
    return bytes(result)


def _as_uint(data: bytes) -> int:
    return int.from_bytes(data, "little")
