"""The zip archives of `torch.save`, read by a strict parser.

torch stores members uncompressed, one after another and each followed by a
data descriptor, so a member is a slice of the file. Everything else is refused,
because readers interpret it differently: of two members with one name torch
takes the first and Python the last, and some readers ignore bytes before,
between or after members. What a scanner approves must be what is loaded.

Source of the layout: APPNOTE 6.3.9, sections 4.3 and 4.5.3.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_formats.containers.torchfile.file_window import ByteSource, Window
from ckpt_formats.core.errors import CkptError, Corrupt, Unsafe, Unsupported
from ckpt_formats.core.files import Seal, crc32

LOCAL, CENTRAL, END, END64, LOCATOR64 = b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7"
MAX_MEMBERS = 1 << 22
MAX_DIRECTORY = 512 << 20

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")

_ENCRYPTED, _DESCRIPTOR, _PATCHED, _STRONG, _MASKED = 1 << 0, 1 << 3, 1 << 5, 1 << 6, 1 << 13
_FORBIDDEN = _ENCRYPTED | _STRONG | _MASKED | _PATCHED
_DESCRIPTOR_SIZES = (12, 16, 20, 24)  # with or without a signature, with sizes of 32 or 64 bits
_MAX_SLACK = 0xFFFF + max(_DESCRIPTOR_SIZES)
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF

# Parts between slashes, none of them empty, "." or "..".
_NAME = re.compile(r"(?:(?!\.{0,2}(?:/|\Z))[^/\\]+(?:/|\Z))+\Z")

# A look-up of one local header also reads those of the next members, because they are needed next.
_AHEAD = 64


@dataclass(slots=True, eq=False)  # not frozen, for the same reason as storages
class ZipMember:
    """One file in the archive."""

    name: str
    header: int
    """Offset of its local header in the window, in bytes."""
    extent: int
    """Bytes from there to the next member or the directory."""
    nbytes: int
    crc: int
    flags: int


@dataclass(eq=False)
class Archive:
    """The directory of one archive. A local header is read when the data of its member are first located."""

    path: Path
    base: int
    length: int
    members: tuple[ZipMember, ...]
    """In file order."""
    index: dict[str, int]
    stem: str = ""
    sealed: bool = True
    """False if torch computed no checksums: then all of them are zero."""
    _starts: dict[int, int] = field(default_factory=dict, repr=False)

    def __contains__(self, name: str) -> bool:
        return f"{self.stem}/{name}" in self.index

    def member(self, name: str) -> ZipMember:
        """The member of this name inside the archive's one folder. Raises `Corrupt` if there is none."""
        at = self.index.get(f"{self.stem}/{name}")
        if at is None:
            raise Corrupt(f"the archive has no member {name!r:.80}", where=self.path)
        return self.members[at]

    def find(self, key: str) -> tuple[int, Seal | None]:
        """Byte offset in the file of a storage's data, and its checksum."""
        member = self.member(f"data/{key}")
        start = self.start(member)
        return start, self._seal(member, start)

    def seals(self) -> Iterator[Seal]:
        """The checksums of all members, in file order."""
        for member in self.members:
            if seal := self._seal(member, self.start(member)):
                yield seal

    def read(self, name: str, window: ByteSource, limit: int) -> bytes:
        """All bytes of a member, after a check of its checksum. Raises `Corrupt`, or `Unsafe` above `limit` bytes."""
        member = self.member(name)
        if member.nbytes > limit:
            raise Unsafe(f"has {member.nbytes} bytes: it would exhaust memory", where=f"{self.path} ({member.name})")
        data = window.at(self._locate(member, window), member.nbytes)
        if self.sealed and crc32(data) != member.crc:
            raise Corrupt(
                "the bytes do not match their checksum",
                where=f"{self.path} ({member.name})",
                hint="Restore the file from a copy.",
            )
        return data

    def check(self, window: ByteSource, limit: int) -> None:
        """Check all members except storages, and locate the storages. Raises `Corrupt`."""
        storages = f"{self.stem}/data/"
        for member in self.members:
            self._starts[member.header] = self.base + self._locate(member, window)
            if not member.name.startswith(storages):
                self.read(member.name[len(self.stem) + 1 :], window, limit)

    def _seal(self, member: ZipMember, start: int) -> Seal | None:
        if not self.sealed or not member.nbytes:
            return None
        return Seal(self.path, start, member.nbytes, "crc32", member.crc, member.name)

    def start(self, member: ZipMember) -> int:
        """Offset of the data of a member in the file, in bytes."""
        if member.header not in self._starts:
            first = self.index[member.name]
            with Window(self.path, self.base, self.length) as window:
                for other in self.members[first : first + _AHEAD]:
                    if other.header not in self._starts:
                        self._starts[other.header] = self.base + self._locate(other, window)
        start: int = self._starts[member.header]
        return start

    def _locate(self, member: ZipMember, window: ByteSource) -> int:
        """Offset of the data of a member in the window; the length of its local header is in that header."""
        name = member.name.encode()
        head = window.at(member.header, _LOCAL.size + len(name))
        magic, _, flags, method, _, _, crc, packed, nbytes, name_length, extra_length = _LOCAL.unpack_from(head)
        has_descriptor = bool(flags & _DESCRIPTOR)  # checksum and sizes follow the data
        if (
            magic != LOCAL
            or method != 0
            or flags != member.flags
            or name_length != len(name)
            or head[_LOCAL.size :] != name
            or crc not in ((0, member.crc) if has_descriptor else (member.crc,))
            or not {packed, nbytes} <= ({0, member.nbytes, _FULL32} if has_descriptor else {member.nbytes, _FULL32})
        ):
            raise Corrupt("the archive's directory and the member contradict each other", where=self._where(member))
        start = _LOCAL.size + name_length + extra_length
        slack = member.extent - start - member.nbytes
        if slack not in (_DESCRIPTOR_SIZES if has_descriptor else (0,)):
            raise Corrupt("the member is longer or shorter than its space in the archive", where=self._where(member))
        return member.header + int(start)

    def _where(self, member: ZipMember) -> str:
        return f"{self.path} ({member.name})"


def read_directory(window: ByteSource) -> Archive:
    """Parse the archive's directory, and find the one folder with a `data.pkl`.

    Raises `Corrupt`, `Unsafe`, or `Unsupported` for what zip allows but torch never writes.
    """
    start, stop, count = _find_directory(window)
    members = _members(window, window.at(start, stop - start), start, count)
    archive = Archive(
        window.path, window.base, window.length, members, {member.name: i for i, member in enumerate(members)}
    )
    archive.sealed = any(member.crc for member in members)
    archive.stem = _stem(archive)
    return archive


def central_entries(window: ByteSource) -> Iterator[tuple[str, int]]:
    """The name of each member, and the offset of its entry in the directory, which was checked before."""
    at, _, count = _find_directory(window)
    for _ in range(count):
        lengths = _CENTRAL.unpack_from(window.at(at, _CENTRAL.size))[10:13]
        yield window.at(at + _CENTRAL.size, lengths[0]).decode(), at
        at += _CENTRAL.size + sum(lengths)


def _find_directory(window: ByteSource) -> tuple[int, int, int]:
    """First and last byte (exclusive) of the central directory, and the number of its entries."""
    size = window.length
    if size < _END.size:
        raise window.corrupt("the archive is too short to have a directory")
    tail_size = min(size, _END.size + _LOCATOR64.size + _END64.size)
    tail = window.at(size - tail_size, tail_size)
    magic, disk, disks, here, count, nbytes, start, comment = _END.unpack_from(tail, tail_size - _END.size)
    if magic != END or comment:
        raise Corrupt(
            "the archive does not end in its directory",
            where=window.path,
            hint="The file was truncated or is still being written, or something was appended to it.",
        )
    stop = size - _END.size
    at = tail_size - _END.size - _LOCATOR64.size
    if at >= 0 and tail[at : at + 4] == LOCATOR64:
        _, disk64, where, disks64 = _LOCATOR64.unpack_from(tail, at)
        stop = size - _END.size - _LOCATOR64.size - _END64.size
        if stop < 0 or where != stop or disk64 != 0 or disks64 != 1:
            raise window.corrupt("the archive's 64-bit directory is not where it should be")
        limits = (_FULL16,) * 4 + (_FULL32,) * 2
        short = (disk, disks, here, count, nbytes, start)
        magic, record, _, _, *full = _END64.unpack_from(tail)
        if magic != END64 or record != _END64.size - 12:
            raise window.corrupt("the archive's 64-bit directory is malformed")
        if any(a not in (b, limit) for a, b, limit in zip(short, full, limits, strict=True)):
            raise window.corrupt("the archive has two directories that contradict each other")
        disk, disks, here, count, nbytes, start = full
    elif _FULL16 in (here, count) or _FULL32 in (nbytes, start):
        raise window.corrupt("the archive lacks its 64-bit directory")
    if disk or disks or here != count:
        raise window.corrupt("the archive is one of several parts")
    if start + nbytes != stop:
        raise window.corrupt("the archive's directory does not reach to its end record")
    if count * _CENTRAL.size > nbytes:
        raise window.corrupt(f"the archive's directory cannot hold {count} entries in {nbytes} bytes")
    if count > MAX_MEMBERS or nbytes > MAX_DIRECTORY:
        raise Unsafe("the archive's directory would exhaust memory", where=window.path)
    return start, stop, count


def _members(window: ByteSource, directory: bytes, end: int, count: int) -> tuple[ZipMember, ...]:
    entries: list[tuple[int, str, int, int, int, int]] = []
    names: set[str] = set()
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(directory):
            raise window.corrupt("the archive's directory ends too early")
        (
            magic,
            _,
            _,
            flags,
            method,
            _,
            _,
            crc,
            packed,
            nbytes,
            name_length,
            extra_length,
            note_length,
            disk,
            _,
            _,
            header,
        ) = _CENTRAL.unpack_from(directory, at)
        at += _CENTRAL.size
        if magic != CENTRAL or at + name_length + extra_length + note_length > len(directory):
            raise window.corrupt("the archive's directory is malformed")
        name = _checked_name(directory[at : at + name_length], window)
        at += name_length
        if _FULL32 in (nbytes, packed, header):
            extra = directory[at : at + extra_length]
            nbytes, packed, header = _resolve_zip64(extra, (nbytes, packed, header), window, name)
        at += extra_length + note_length
        if flags & _FORBIDDEN or method != 0 or packed != nbytes or disk or name in names:
            if _is_torchscript(name.partition("/")[2]):  # newer versions of PyTorch compress its code
                raise _torchscript_error(f"{window.path} ({name})")
            raise _error_for_entry(f"{window.path} ({name})", flags, method, name in names)
        names.add(name)
        entries.append((header, name, name_length, nbytes, crc, flags))
    if at != len(directory):
        raise window.corrupt("the archive's directory has more bytes than entries")
    entries.sort()
    members = []
    if entries and entries[0][0] != 0:
        raise Unsafe("there are bytes before the archive: it could also be a file of another kind", where=window.path)
    for i, (header, name, name_length, nbytes, crc, flags) in enumerate(entries):
        extent = (entries[i + 1][0] if i + 1 < len(entries) else end) - header
        slack = extent - _LOCAL.size - name_length - nbytes
        if slack < 0:
            raise Corrupt("overlaps with what follows it in the archive", where=f"{window.path} ({name})")
        if slack > _MAX_SLACK:
            raise Corrupt("is followed by bytes that belong to no member", where=f"{window.path} ({name})")
        members.append(ZipMember(name, header, extent, nbytes, crc, flags))
    return tuple(members)


def _error_for_entry(where: str, flags: int, method: int, twice: bool) -> CkptError:
    """The error that names the rule which an entry of the directory breaks."""
    if flags & (_ENCRYPTED | _STRONG | _MASKED):
        return Unsupported("is encrypted; torch never does that", where=where)
    if method != 0 or flags & _PATCHED:
        return Unsupported(
            "is compressed; torch never does that",
            where=where,
            hint="Unpack the archive and store its files again: zip -0 -r.",
        )
    if twice:
        return Unsafe(
            "two members of the archive have this name, and programs differ in which one they load", where=where
        )
    return Corrupt("the archive gives two sizes for one member", where=where)


def _checked_name(raw: bytes, window: ByteSource) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise window.corrupt(f"the archive has a member whose name is not UTF-8: {raw!r:.80}") from None
    if not _NAME.match(name) or not name.isprintable():
        raise Unsafe(f"the archive has a member with the name {name!r:.80}, which leads elsewhere", where=window.path)
    return name


def _resolve_zip64(extra: bytes, fields: tuple[int, int, int], window: ByteSource, name: str) -> list[int]:
    """The fields, with those that overflow replaced by values of the zip64 extra field, in the same order."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == 1:
            if at + length > len(extra) or length % 8:
                break
            wide = list(struct.unpack_from(f"<{length // 8}Q", extra, at))
            if len(wide) < sum(value == _FULL32 for value in fields):
                break
            return [wide.pop(0) if value == _FULL32 else value for value in fields]
        at += length
    raise Corrupt("the archive gives a 64-bit size without its value", where=f"{window.path} ({name})")


def _stem(archive: Archive) -> str:
    """The archive's one folder."""
    folders = [member.name.partition("/")[0] for member in archive.members if member.name.count("/") == 1]
    stems = [folder for folder in dict.fromkeys(folders) if f"{folder}/data.pkl" in archive.index]
    if len(stems) != 1:
        raise Corrupt(
            f"the archive has {len(stems) or 'no'} data.pkl",
            where=archive.path,
            hint=None if stems else "It is a zip archive, but not one that torch.save wrote.",
        )
    stem = stems[0]
    for member in archive.members:
        folder, _, rest = member.name.partition("/")
        if folder != stem:
            raise Unsafe("lies outside the archive's one folder", where=f"{archive.path} ({member.name})")
        if _is_torchscript(rest):
            raise _torchscript_error(f"{archive.path} ({member.name})")
    return stem


def _is_torchscript(name: str) -> bool:
    """Whether only archives of TorchScript have this member."""
    return name == "constants.pkl" or name.partition("/")[0] == "code"


def _torchscript_error(where: str) -> Unsupported:
    return Unsupported(
        "is a TorchScript program: its code names the tensors, and ckpt runs no code",
        where=where,
        hint="Load it with torch.jit.load, and save its state_dict() with torch.save.",
    )
