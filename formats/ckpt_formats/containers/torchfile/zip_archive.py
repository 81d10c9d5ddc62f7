"""The zip archives of `torch.save`, read by a strict parser.

torch stores members uncompressed, one after another and each followed by a
data descriptor, so a member is a slice of the file. Everything else is refused,
because readers interpret it differently: of two members with one name torch
takes the first and Python the last, and some readers ignore bytes before,
between or after members. What a scanner approves must be what is loaded.

Source of the layout: APPNOTE 6.3.9, sections 4.3 and 4.5.3.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np

from ckpt_formats.containers.torchfile.file_window import ByteSource, Window
from ckpt_formats.core.errors import CkptError, CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.seals import Seal, crc32
from ckpt_formats.core.store_path import is_remote, request

DEFLATED = 8
"""The method of a member that deflate compressed."""
_MAX_RATIO = 1032
"""Deflate decodes a byte to no more than so many."""
LOCAL, CENTRAL, END, END64, LOCATOR64 = b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7"
MAX_MEMBERS = 1 << 22
MAX_DIRECTORY = 512 << 20

_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")


def _record(fields: str) -> np.dtype[Any]:
    """The dtype of a record without gaps, from `name:type` texts."""
    return np.dtype([(name, f"<{kind}") for name, _, kind in (field.partition(":") for field in fields.split())])


_LOCAL_DTYPE = _record(
    "magic:S4 version:u2 flags:u2 method:u2 time:u4 crc:u4 packed:u4 nbytes:u4 name_length:u2 extra_length:u2"
)
_CENTRAL_DTYPE = _record(
    "magic:S4 versions:u4 flags:u2 method:u2 time:u4 crc:u4 packed:u4 nbytes:u4 name_length:u2 extra_length:u2 "
    "note_length:u2 disk:u2 internal:u2 external:u4 header:u4"
)
_lengths = struct.Struct("<HHH").unpack_from
_LENGTHS = 28
"""Position in an entry of the directory of the lengths of its name, extra fields and note."""

_ENCRYPTED, _DESCRIPTOR, _PATCHED, _STRONG, _MASKED = 1 << 0, 1 << 3, 1 << 5, 1 << 6, 1 << 13
_FORBIDDEN = _ENCRYPTED | _STRONG | _MASKED | _PATCHED
_DESCRIPTOR_SIZES = (12, 16, 20, 24)  # with or without a signature, with sizes of 32 or 64 bits
_MAX_SLACK = 0xFFFF + max(_DESCRIPTOR_SIZES)
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_NOWHERE = 1 << 61
"""Stands for 64-bit offsets and sizes beyond those of any file, so that sums stay within 64 bits."""

# A name consists of parts between slashes, none of them empty, "." or "..". A NUL is before and after each name here.
_ENDS = [before + dots for before in "/\0" for dots in (".", "..")]
_MISLEADING = ("\\", "//", "\0/", "\0\0", *(f"{end}/" for end in _ENDS), *(f"{end}\0" for end in _ENDS))

_MIN_AHEAD, _MAX_AHEAD = 64, 4096
"""A look-up of one local header also reads those of the next members, because they are needed next."""
_NEAR = 1 << 12
"""Local headers so near to one another, in bytes, are read at once with what lies between."""
_MAX_RUN = 1 << 20
_COMING = 16
"""Local headers in a store that are requested at once, while as many before them are read."""
_FAR = 1 << 16
"""Bytes from one local header to the next, from which each takes a request of its own in a store."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class ZipMember:
    """One file in the archive."""

    number: int
    """Its position in the file's order."""
    name: str
    header: int
    """Offset of its local header in the window, in bytes."""
    extent: int
    """Bytes from there to the next member or the directory."""
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True, eq=False)
class Directory:
    """All members of an archive, in file order. Each array is (members,) int64; columns, since there may be many."""

    names: list[str]
    headers: _Ints
    """Offsets of the local headers in the window, in bytes."""
    extents: _Ints
    """Bytes from each header to the next member or the directory."""
    nbytes: _Ints
    crcs: _Ints
    """Sizes and CRC-32s of the contents."""
    flags: _Ints
    packed: _Ints
    """Bytes of each member in the archive: as many as of its contents, unless it is compressed."""
    methods: _Ints
    """How each member is compressed: 0 or `DEFLATED`."""

    def __len__(self) -> int:
        return len(self.names)


@dataclass(eq=False)
class Archive:
    """The directory of one archive. A local header is read when the data of its member are first located."""

    path: Path
    base: int
    length: int
    directory: Directory
    index: dict[str, int]
    """The number of each member."""
    stem: str = ""
    sealed: bool = True
    """False if torch computed no checksums: then all of them are zero."""
    _storages: dict[str, int] = field(default_factory=dict, repr=False)
    """The number of each storage, by its key."""
    _nbytes: list[int] = field(default_factory=list, repr=False)
    _crcs: list[int] = field(default_factory=list, repr=False)
    _starts: list[int] = field(default_factory=list, repr=False)
    """Offset of the data of each member in the file; 0 if it is not known yet."""
    _ahead: int = _MIN_AHEAD

    def __post_init__(self) -> None:
        # Numbers of Python, since single numbers of arrays are slow to get.
        self._nbytes, self._crcs = self.directory.nbytes.tolist(), self.directory.crcs.tolist()
        self._starts = [0] * len(self.directory)

    def find_storages(self) -> None:
        """Note the numbers of all storages, by their keys."""
        begin = f"{self.stem}/data/"
        after = len(begin)
        self._storages = {name[after:]: number for name, number in self.index.items() if name.startswith(begin)}
        self._request_headers(0, _COMING)

    def __contains__(self, name: str) -> bool:
        return f"{self.stem}/{name}" in self.index

    def member(self, name: str) -> ZipMember:
        """The member of this name inside the archive's one folder. Raises `CorruptError` if there is none."""
        return self._member(self._number(f"{self.stem}/{name}"))

    def storage_nbytes(self, key: str) -> int:
        """The size of a storage. Raises `CorruptError` if there is none with this key."""
        number = self._storages.get(key)
        return self._nbytes[self._number(f"{self.stem}/data/{key}") if number is None else number]

    def find(self, key: str) -> tuple[int, Seal | None]:
        """Byte offset in the file of a storage's data, and its checksum."""
        number = self._storages.get(key)
        if number is None:
            number = self._number(f"{self.stem}/data/{key}")
        start, nbytes = self._starts[number] or self._start(number), self._nbytes[number]
        if not nbytes or not self.sealed:
            return start, None
        return start, Seal(self.path, start, nbytes, "crc32", self._crcs[number], self.directory.names[number])

    def seals(self) -> Sequence[Seal]:
        """The checksums of all members that are not compressed, in file order. Reads and checks all local headers."""
        if 0 in self._starts:
            with Window(self.path, self.base, self.length) as window:
                self._locate_rest(window)
        is_stored = (self.directory.nbytes != 0) & (self.directory.methods == 0)
        return _Seals(self, np.flatnonzero(is_stored).tolist()) if self.sealed else ()

    def seal(self, number: int) -> Seal | None:
        """The checksum of the data of a member; None if it has none, or is empty."""
        nbytes = self._nbytes[number]
        if not self.sealed or not nbytes:
            return None
        start = self._starts[number] or self._start(number)
        return Seal(self.path, start, nbytes, "crc32", self._crcs[number], self.directory.names[number])

    def read(self, name: str, window: ByteSource, limit: int) -> bytes:
        """All bytes of a member, after a check of its checksum.

        Raises `CorruptError`, or `UnsafeError` above `limit` bytes.
        """
        member = self.member(name)
        if member.nbytes > limit:
            raise UnsafeError(
                f"has {member.nbytes} bytes: it would exhaust memory", where=f"{self.path} ({member.name})"
            )
        if not self._starts[member.number]:
            self._locate(member.number, member.number + 1, window)
        data = window.at(self._starts[member.number] - self.base, member.nbytes)
        if self.sealed and crc32(data) != member.crc:
            raise CorruptError(
                "the bytes do not match their checksum",
                where=f"{self.path} ({member.name})",
                hint="Restore the file from a copy.",
            )
        return data

    def check(self, window: ByteSource, limit: int) -> None:
        """Check all members except storages, and locate the storages. Raises `CorruptError`."""
        storages = f"{self.stem}/data/"
        self._locate_rest(window)
        for name in self.directory.names:
            if not name.startswith(storages):
                self.read(name[len(self.stem) + 1 :], window, limit)

    def locate_few(self, window: ByteSource) -> None:
        """If there are few members, and not in a store, find where the data of each begin while the file is open.

        A local header that lies is refused when its member is needed, as in a large archive.
        """
        if len(self.directory) <= _MIN_AHEAD and not is_remote(self.path):
            with suppress(CorruptError):
                self._locate(0, len(self.directory), window)

    def start(self, member: ZipMember) -> int:
        """Offset of the data of a member in the file, in bytes."""
        return self._starts[member.number] or self._start(member.number)

    def place(self, name: str) -> tuple[int, int]:
        """Where the data of the member of this name are in the file, and their length, in bytes."""
        number = self.index[name]
        return self._starts[number] or self._start(number), self._nbytes[number]

    def packed(self, name: str) -> int | None:
        """The bytes in the file of a member that deflate compressed; None for a member that is stored as it is."""
        number, known = self.index[name], self.directory
        return int(known.packed[number]) if known.methods[number] else None

    def crc(self, name: str) -> int:
        """The CRC-32 of the contents of a member."""
        return self._crcs[self.index[name]]

    def _start(self, number: int) -> int:
        stop = min(number + self._ahead, len(self.directory))
        self._ahead = min(2 * self._ahead, _MAX_AHEAD)
        with Window(self.path, self.base, self.length) as window:
            self._locate(number, stop, window)
        return self._starts[number]

    def _number(self, name: str) -> int:
        number = self.index.get(name)
        if number is None:
            raise CorruptError(f"the archive has no member {name[len(self.stem) + 1 :]!r:.80}", where=self.path)
        return number

    def _member(self, number: int) -> ZipMember:
        known = self.directory
        header, extent = int(known.headers[number]), int(known.extents[number])
        return ZipMember(number, known.names[number], header, extent, self._nbytes[number], self._crcs[number])

    def _request_headers(self, first: int, stop: int) -> None:
        """In a store, request some local headers: each is far from the others, and they are needed soon."""
        if is_remote(self.path):
            for header in self.directory.headers[first:stop].tolist():
                request(self.path, self.base + header, _LOCAL_DTYPE.itemsize)

    def _locate_rest(self, window: ByteSource) -> None:
        """Find where the data of all members begin for which this is not known yet."""
        if 0 in self._starts:
            for first, stop in _runs_of_zeros(np.array(self._starts, np.int64)):
                self._locate(first, stop, window)

    def _locate(self, first: int, stop: int, window: ByteSource) -> None:
        """Find where the data of the members `first` to `stop` begin: the lengths are in their local headers.

        Raises `CorruptError` if a local header contradicts the directory.
        """
        are_far = is_remote(self.path) and self.directory.extents[first:stop].sum() > _FAR * (stop - first)
        group = _COMING if are_far else max(1, stop - first)
        for begin in range(first, stop, group):
            if are_far:
                self._request_headers(begin, min(begin + 2 * group, stop))
            self._locate_group(begin, min(begin + group, stop), window)

    def _locate_group(self, first: int, stop: int, window: ByteSource) -> None:
        known, members = self.directory, slice(first, stop)
        names = [name.encode() for name in known.names[members]]
        lengths = list(map(len, names))
        heads, actual_names = _local_headers(known.headers[members], lengths, window)
        flags, crcs, nbytes = known.flags[members], known.crcs[members], known.nbytes[members]
        described = (flags & _DESCRIPTOR) != 0  # checksum and sizes follow the data
        wrong = (heads["magic"] != LOCAL) | (heads["method"] != known.methods[members]) | (heads["flags"] != flags)
        wrong |= heads["name_length"] != np.array(lengths)
        wrong |= (heads["crc"] != crcs) & ~(described & (heads["crc"] == 0))
        packed = known.packed[members]
        for name, expected in (("packed", packed), ("nbytes", nbytes)):
            size = heads[name].astype(np.int64)
            wrong |= (size != expected) & (size != _FULL32) & ~(described & (size == 0))
        if actual_names != names:
            wrong |= np.array([actual != name for actual, name in zip(actual_names, names, strict=True)])
        if wrong.any():
            where = self._where(first + int(wrong.argmax()))
            raise CorruptError("the archive's directory and the member contradict each other", where=where)
        starts = _LOCAL_DTYPE.itemsize + heads["name_length"].astype(np.int64) + heads["extra_length"]
        slack = known.extents[members] - starts - packed
        loose = np.where(described, ~np.isin(slack, _DESCRIPTOR_SIZES), slack != 0)
        if loose.any():
            where = self._where(first + int(loose.argmax()))
            raise CorruptError("the member is longer or shorter than its space in the archive", where=where)
        self._starts[members] = (self.base + known.headers[members] + starts).tolist()

    def _where(self, number: int) -> str:
        return f"{self.path} ({self.directory.names[number]})"


class _Seals(Sequence[Seal]):
    """The checksums of members, made when they are looked up."""

    def __init__(self, archive: Archive, numbers: Sequence[int]) -> None:
        self._archive, self._numbers = archive, numbers

    @overload
    def __getitem__(self, index: int) -> Seal: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Seal]: ...
    def __getitem__(self, index: int | slice) -> Seal | Sequence[Seal]:
        if isinstance(index, slice):
            return _Seals(self._archive, self._numbers[index])
        seal = self._archive.seal(self._numbers[index])
        assert seal is not None
        return seal

    def __len__(self) -> int:
        return len(self._numbers)


def _runs_of_zeros(values: _Ints) -> list[tuple[int, int]]:
    """First index and end of each run of zeros in a vector."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], values == 0, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _local_headers(headers: _Ints, name_lengths: list[int], window: ByteSource) -> tuple[Any, list[bytes]]:
    """The local headers at these offsets, as an array of `_LOCAL_DTYPE`, and the names that follow them.

    Headers near one another are read together.
    """
    fixed = _LOCAL_DTYPE.itemsize
    heads, names = [np.empty(0, _LOCAL_DTYPE)], []
    offsets, at = headers.tolist(), 0
    while at < len(offsets):
        first, begin = at, offsets[at]
        end = begin + fixed + name_lengths[at]
        at += 1
        while at < len(offsets) and offsets[at] - end <= _NEAR and offsets[at] - begin < _MAX_RUN:
            end = offsets[at] + fixed + name_lengths[at]
            at += 1
        data = window.at(begin, end - begin)
        places = [offset - begin for offset in offsets[first:at]]
        heads.append(_records(data, places, _LOCAL_DTYPE))
        lengths = name_lengths[first:at]
        names += [data[place + fixed : place + fixed + length] for place, length in zip(places, lengths, strict=True)]
    return np.concatenate(heads), names


def read_members(window: ByteSource, *, deflated: bool = False) -> Archive:
    """Parse the directory of an archive whose members are stored as they are, whatever they are.

    `deflated`: members may also be compressed.

    Raises `CorruptError`, `UnsafeError`, or `UnsupportedError` for what zip allows but torch and NumPy never write.
    """
    start, stop, count = _find_directory(window)
    directory = _members(window, window.at(start, stop - start), start, count, deflated)
    index = {name: number for number, name in enumerate(directory.names)}
    archive = Archive(window.path, window.base, window.length, directory, index)
    archive.sealed = bool(directory.crcs.any())
    return archive


def read_directory(window: ByteSource) -> Archive:
    """Parse the archive's directory, and find the one folder with a `data.pkl`. Raises as `read_members`."""
    archive = read_members(window)
    archive.stem = _stem(archive)
    archive.find_storages()
    archive.locate_few(window)
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
        raise CorruptError(
            f"the file is cut short: {size:,} bytes, and the end of the zip archive is missing",
            where=window.path,
            hint="It was truncated or is still being written, or something was appended to it.",
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
        raise UnsafeError("the archive's directory would exhaust memory", where=window.path)
    return start, stop, count


def _members(window: ByteSource, directory: bytes, end: int, count: int, deflated: bool) -> Directory:
    """The members in file order, after all checks of the directory. `end`: where the last member ends at most."""
    entries, names, extras = _entries(window, directory, count)
    packed, nbytes, headers = (entries[key].astype(np.int64) for key in ("packed", "nbytes", "header"))
    for number in np.flatnonzero((packed == _FULL32) | (nbytes == _FULL32) | (headers == _FULL32)).tolist():
        short = (int(nbytes[number]), int(packed[number]), int(headers[number]))
        extra = directory[extras[number] : extras[number] + int(entries["extra_length"][number])]
        full = _resolve_zip64(extra, short, window, names[number])
        nbytes[number], packed[number], headers[number] = (min(value, _NOWHERE) for value in full)
    flags = entries["flags"].astype(np.int64)
    methods = entries["method"].astype(np.int64)
    is_deflated = (methods == DEFLATED) & deflated
    longest = _MAX_RATIO * np.minimum(packed, window.length)
    fits = np.where(is_deflated, nbytes <= longest, packed == nbytes)
    wrong = (flags & _FORBIDDEN != 0) | ((methods != 0) & ~is_deflated) | ~fits | (entries["disk"] != 0)
    if len(set(names)) < count or wrong.any():
        raise _first_error(window, names, wrong, entries, deflated)
    order = np.argsort(headers, kind="stable")
    headers, nbytes, packed = headers[order], nbytes[order], packed[order]
    name_lengths = entries["name_length"].astype(np.int64)[order]
    names = [names[number] for number in order.tolist()]
    if count and headers[0] != 0:
        raise UnsafeError(
            "there are bytes before the archive: it could also be a file of another kind", where=window.path
        )
    extents = np.diff(headers, append=end)
    slack = extents - _LOCAL_DTYPE.itemsize - name_lengths - packed
    if ((slack < 0) | (slack > _MAX_SLACK)).any():
        number = int(((slack < 0) | (slack > _MAX_SLACK)).argmax())
        where = f"{window.path} ({names[number]})"
        if slack[number] < 0:
            raise CorruptError("overlaps with what follows it in the archive", where=where)
        raise CorruptError("is followed by bytes that belong to no member", where=where)
    crcs = entries["crc"].astype(np.int64)
    return Directory(names, headers, extents, nbytes, crcs[order], flags[order], packed, methods[order])


def _entries(window: ByteSource, directory: bytes, count: int) -> tuple[Any, list[str], list[int]]:
    """The entries of the directory, (count,) of `_CENTRAL_DTYPE`; their names; the offsets of their extra fields."""
    fixed, size = _CENTRAL_DTYPE.itemsize, len(directory)
    names, offsets, extras, at = [], [], [], 0
    for _ in range(count):
        if at + fixed > size:
            raise window.corrupt("the archive's directory ends too early")
        name_length, extra_length, note_length = _lengths(directory, at + _LENGTHS)
        offsets.append(at)
        at += fixed
        names.append(directory[at : at + name_length])
        extras.append(at + name_length)
        at += name_length + extra_length + note_length
    entries = _records(directory, offsets, _CENTRAL_DTYPE)
    if at > size or (entries["magic"] != CENTRAL).any():
        raise window.corrupt("the archive's directory is malformed")
    decoded = _checked_names(names, window)
    if at != size:
        raise window.corrupt("the archive's directory has more bytes than entries")
    return entries, decoded, extras


def _records(data: bytes, offsets: Sequence[int], dtype: np.dtype[Any]) -> Any:
    """The records at these offsets, which may overlap: an array (offsets,) of `dtype`."""
    if not offsets:
        return np.empty(0, dtype)
    rows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), dtype.itemsize)
    return rows[np.array(offsets, np.int64)].view(dtype)[:, 0]


def _first_error(window: ByteSource, names: list[str], wrong: Any, entries: Any, deflated: bool) -> CkptError:
    """The error for the first entry of the directory that breaks a rule, or has the name of an earlier one."""
    seen: set[str] = set()
    for number, name in enumerate(names):
        if wrong[number] or name in seen:
            break
        seen.add(name)
    flags, method = int(entries["flags"][number]), int(entries["method"][number])
    if deflated and method == DEFLATED and not flags & _FORBIDDEN and wrong[number] and not entries["disk"][number]:
        return CorruptError("has a size that its compressed bytes cannot have", where=f"{window.path} ({name})")
    if _is_torchscript(name.partition("/")[2]):  # newer versions of PyTorch compress its code
        return _torchscript_error(f"{window.path} ({name})")
    from ckpt_formats.containers.contents import archive_kind  # only what is not read needs it

    if (kind := archive_kind(names, compressed=bool(entries["method"].any()))) is not None:
        return kind.error(kind.what, where=window.path, hint=kind.hint)
    return _error_for_entry(f"{window.path} ({name})", flags, method, name in seen)


def _error_for_entry(where: str, flags: int, method: int, twice: bool) -> CkptError:
    """The error that names the rule which an entry of the directory breaks."""
    if flags & (_ENCRYPTED | _STRONG | _MASKED):
        return UnsupportedError("is encrypted; torch never does that", where=where)
    if method != 0 or flags & _PATCHED:
        return UnsupportedError(
            "is compressed; torch never does that",
            where=where,
            hint="Unpack the archive and store its files again: zip -0 -r.",
        )
    if twice:
        return UnsafeError(
            "two members of the archive have this name, and programs differ in which one they load", where=where
        )
    return CorruptError("the archive gives two sizes for one member", where=where)


def _checked_names(raw: list[bytes], window: ByteSource) -> list[str]:
    """The names as text. Raises `CorruptError` or `UnsafeError` for those that could mislead."""
    try:
        names = b"\0".join(raw).decode("utf-8").split("\0")
        if len(names) == len(raw) and _are_safe(names):
            return names
    except UnicodeDecodeError:
        pass
    return [_checked_name(name, window) for name in raw]


def _are_safe(names: list[str]) -> bool:
    """Whether none of the names leads elsewhere."""
    around = "\0".join(["", *names, ""])
    return "".join(names).isprintable() and not any(text in around for text in _MISLEADING)


def _checked_name(raw: bytes, window: ByteSource) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise window.corrupt(f"the archive has a member whose name is not UTF-8: {raw!r:.80}") from None
    if not _are_safe([name]):
        raise UnsafeError(
            f"the archive has a member with the name {name!r:.80}, which leads elsewhere", where=window.path
        )
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
    raise CorruptError("the archive gives a 64-bit size without its value", where=f"{window.path} ({name})")


def _check_kind(names: Sequence[str], path: Path) -> None:
    """Raise `UnsupportedError` if the names are those of an archive that another program wrote."""
    from ckpt_formats.containers.contents import archive_kind  # only what is not read needs it

    if (kind := archive_kind(names)) is not None:
        raise kind.error(kind.what, where=path, hint=kind.hint)


def _stem(archive: Archive) -> str:
    """The archive's one folder."""
    names = archive.directory.names
    folders = [name.partition("/")[0] for name in names if name.count("/") == 1]
    stems = [folder for folder in dict.fromkeys(folders) if f"{folder}/data.pkl" in archive.index]
    if len(stems) != 1:
        _check_kind(names, archive.path)
        raise CorruptError(
            f"the archive has {len(stems) or 'no'} data.pkl",
            where=archive.path,
            hint=None if stems else "It is a zip archive, but not one that torch.save wrote.",
        )
    stem = stems[0]
    begin, storages = f"{stem}/", f"{stem}/data/"
    for name in names:
        if name.startswith(storages):
            continue
        if not name.startswith(begin) and name != stem:
            raise UnsafeError("lies outside the archive's one folder", where=f"{archive.path} ({name})")
        if _is_torchscript(name[len(begin) :]):
            raise _torchscript_error(f"{archive.path} ({name})")
    return stem


def _is_torchscript(name: str) -> bool:
    """Whether only archives of TorchScript have this member."""
    return name == "constants.pkl" or name.partition("/")[0] == "code"


def _torchscript_error(where: str) -> UnsupportedError:
    return UnsupportedError(
        "is a TorchScript program: its code names the tensors, and ckpt runs no code",
        where=where,
        hint="Load it with torch.jit.load, and save its state_dict() with torch.save.",
    )
