"""Read a database of TensorStore's OCDBT: a B+tree of keys, whose values are in data files or in the tree itself.

    manifest.ocdbt      the newest versions: where the root of each tree is
    d/<name>            nodes of the tree, and values, at the offsets that nodes state
    ocdbt.process_0/d/  the same of one process; the tree of the whole names these files

Manifest and nodes have CRC-32Cs, which are compared; values have none. Nothing that a file states is believed before
it is checked: lengths by the file's size, counts by the bytes that are there, paths by their parts.

Source: tensorstore/kvstore/ocdbt/index.rst, "Storage format".
"""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ckpt_formats.containers.crc32c import crc32c
from ckpt_formats.core.claims import MAX_PATH, MAX_VALUES, check_paid
from ckpt_formats.core.errors import CorruptError, IncompleteError, NotFoundError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import read_range, read_whole
from ckpt_formats.core.text import printable

MANIFEST = "manifest.ocdbt"
MANIFEST_MAGIC, NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_MAX_VERSIONS = 1 << 24
_MAX_NODE = 1 << 28
"""Bytes of a node, stored and decoded. Orbax's nodes have at most 10^8."""
_MAX_NODES = 1 << 29
"""Bytes of all nodes, decoded. A node may be named many times; each time it has other keys, and is decoded again."""
_MAX_KEY = 65535
_MAX_HEIGHT = 16
_NO_FILE = "a node names a file that is not in its table"


class ValueRange(NamedTuple):
    """A range of a file, whose path begins at the folder of the database."""

    file: str
    offset: int
    nbytes: int


class _NodeRange(NamedTuple):
    """Where a node is. `base` is the part of its path that its children's paths begin with, too."""

    base: str
    place: ValueRange


def read_database(folder: Path) -> dict[str, ValueRange | bytes]:
    """All keys of the newest version, in their order, each with its value or with the range of a file that has it.

    Raises `CorruptError` for bytes that contradict each other, `IncompleteError` if a data file is missing,
    `UnsafeError` for sizes and paths that no writer makes, `UnsupportedError` for other versions.
    """
    root, height = _root(folder)
    entries: dict[str, ValueRange | bytes] = {}
    if root is None:
        return entries
    stack = [(root, height, b"")]
    decoded_nbytes = 0
    while stack:
        node, height, prefix = stack.pop()
        fields = _body(_node_bytes(folder, node.place), NODE_MAGIC, folder / node.place.file)
        decoded_nbytes += fields.nbytes
        if decoded_nbytes > _MAX_NODES:
            raise UnsafeError(f"the nodes decode to more than {_MAX_NODES:,} bytes", where=folder)
        if fields.byte() != height:
            raise fields.corrupt("a node of the tree has another height than its parent states")
        files = _file_table(fields, node.base)
        if height:
            stack += reversed([(child, height - 1, prefix + key) for key, child in _children(fields, files)])
            if len(stack) > MAX_VALUES:
                raise UnsafeError("the tree has too many nodes", where=folder)
            continue
        for key, value in _values(fields, files):
            text = _text(prefix + key, fields)
            if text in entries:
                raise fields.corrupt(f"the key `{printable(text)}` is there twice")
            entries[text] = value
        if len(entries) > MAX_VALUES:
            raise UnsafeError(f"the database has more than {MAX_VALUES:,} keys", where=folder)
    return entries


class Fields:
    """Reads fields of decoded bytes, front to back. Raises `CorruptError` where they end too early."""

    def __init__(self, data: bytes, path: Path) -> None:
        self._data, self._at, self.path, self.nbytes = data, 0, path, len(data)

    def raw(self, nbytes: int) -> bytes:
        """The next bytes."""
        if nbytes > len(self._data) - self._at:
            raise self.corrupt("a node ends too early")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def byte(self) -> int:
        return self.raw(1)[0]

    def varint(self) -> int:
        """An unsigned number in groups of 7 bits, the lowest first."""
        return self.varints(1)[0]

    def varints(self, count: int) -> list[int]:
        """So many numbers, each below 2^63."""
        if not count:
            return []
        check_paid("entries of a node", count, 1, len(self._data) - self._at, self.path)
        data = np.frombuffer(self._data, np.uint8, min(10 * count, len(self._data) - self._at), self._at)
        ends = np.flatnonzero(data < 128)[:count]
        if len(ends) < count:
            raise self.corrupt("a node ends too early")
        starts = np.concatenate(([0], ends[:-1] + 1))
        lengths = ends - starts + 1
        if lengths.max() > 9:
            raise self.corrupt("a number has more than 63 bits")
        values = np.zeros(count, np.int64)
        for i in range(int(lengths.max())):
            has = lengths > i
            values[has] |= (data[starts[has] + i].astype(np.int64) & 127) << (7 * i)
        self._at += int(ends[-1]) + 1
        return values.tolist()

    def is_done(self) -> bool:
        return self._at == len(self._data)

    def corrupt(self, message: str) -> CorruptError:
        return CorruptError(message, where=self.path)


def _root(folder: Path) -> tuple[_NodeRange | None, int]:
    """Where the root of the newest version is, and its height; None if the database is empty."""
    path = folder / MANIFEST
    fields = _body(read_whole(path, _MAX_VERSIONS), MANIFEST_MAGIC, path)
    fields.raw(16)
    if fields.varint():
        raise UnsupportedError("the database has numbered manifests, which are not read", where=path)
    fields.varints(2)
    fields.byte()
    if compression := fields.varint():
        if compression != 1:
            raise UnsupportedError(f"nodes are compressed by method {compression}, which is unknown", where=path)
        fields.raw(4)
    files = _file_table(fields, "")
    count = fields.varint()
    if not count:
        raise fields.corrupt("the manifest names no version")
    generations = fields.varints(count)
    heights = list(fields.raw(count))
    numbers, offsets, lengths = (fields.varints(count) for _ in range(3))
    newest = max(range(count), key=generations.__getitem__)
    if not lengths[newest] and not heights[newest]:
        return None, 0
    if heights[newest] > _MAX_HEIGHT:
        raise UnsafeError(f"the tree is {heights[newest]} nodes high", where=path)
    base, relative = _file(files, numbers[newest], fields)
    return _NodeRange(base, ValueRange(base + relative, offsets[newest], lengths[newest])), heights[newest]


def _node_bytes(folder: Path, place: ValueRange) -> bytes:
    if place.nbytes > _MAX_NODE:
        raise UnsafeError(f"a node has {place.nbytes:,} bytes: it would exhaust memory", where=folder / place.file)
    try:
        return read_range(folder / place.file, place.offset, place.nbytes)
    except NotFoundError:
        message = f"{printable(place.file)}, which a node of {MANIFEST} names, is missing"
        raise IncompleteError(message, where=folder, hint="Copy all files of the checkpoint.") from None


def _body(data: bytes, magic: int, path: Path) -> Fields:
    """The decoded fields after the header of a manifest or node."""
    if len(data) < 18 or int.from_bytes(data[:4], "big") != magic:
        raise CorruptError("is not of OCDBT's form: its first bytes are others", where=path)
    if int.from_bytes(data[4:12], "little") != len(data):
        raise CorruptError("has another length than its header states", where=path, hint="It was truncated.")
    if crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise CorruptError("a node does not fit its crc32c checksum", where=path, hint="Copy the file again.")
    fields = Fields(data[12:-4], path)
    version, compression = fields.varints(2)
    if version or compression > 1:
        raise UnsupportedError(f"version {version} with compression {compression} is unknown", where=path)
    body = data[14:-4]
    return Fields(_inflated(body, path) if compression else body, path)


def _inflated(data: bytes, path: Path) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor(max_window_size=_MAX_NODE).stream_reader(BytesIO(data)) as stream:
            body: bytes = stream.read(_MAX_NODE + 1)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a node cannot be decoded: {error}", where=path) from None
    if len(body) > _MAX_NODE:
        raise UnsafeError(f"a node decodes to more than {_MAX_NODE:,} bytes: it would exhaust memory", where=path)
    return body


def _file_table(fields: Fields, transitive: str) -> list[tuple[str, str]]:
    """The files that a node names, each as the base of its path and the rest."""
    count = fields.varint()
    prefixes = [0, *fields.varints(max(0, count - 1))]
    suffixes, bases = fields.varints(count), fields.varints(count)
    files: list[tuple[str, str]] = []
    path = b""
    for prefix, suffix, base in zip(prefixes, suffixes, bases, strict=False):
        if prefix > len(path) or prefix + suffix > MAX_PATH or base > prefix + suffix:
            raise fields.corrupt("a node names a file by a path of an impossible length")
        path = path[:prefix] + fields.raw(suffix)
        files.append((transitive + _text(path[:base], fields), _text(path[base:], fields)))
        _check_path("".join(files[-1]), fields.path)
    return files


def _check_path(file: str, where: Path) -> None:
    if "\0" in file or any(part in ("", ".", "..") for part in file.split("/")):
        raise UnsafeError(f"a node names the file {printable(file)!r}, which is not in the checkpoint", where=where)


def _file(files: list[tuple[str, str]], number: int, fields: Fields) -> tuple[str, str]:
    if number >= len(files):
        raise fields.corrupt(_NO_FILE)
    return files[number]


def _keys(fields: Fields, is_leaf: bool) -> tuple[list[bytes], list[int]]:
    """The keys of a node in order, and for an inner node how much of each all keys below it begin with."""
    count = fields.varint()
    if not count:
        raise fields.corrupt("a node of the tree is empty")
    prefixes = [0, *fields.varints(count - 1)]
    suffixes = fields.varints(count)
    common = [] if is_leaf else fields.varints(count)
    keys: list[bytes] = []
    key, total = b"", 0
    for prefix, suffix in zip(prefixes, suffixes, strict=True):
        if prefix > len(key) or prefix + suffix > _MAX_KEY:
            raise fields.corrupt("a key has an impossible length")
        previous, key = key, key[:prefix] + fields.raw(suffix)
        if keys and key <= previous:
            raise fields.corrupt("the keys of a node are not in order")
        total += len(key)
        if total > _MAX_NODE:
            raise UnsafeError("the keys of a node would exhaust memory", where=fields.path)
        keys.append(key)
    return keys, common


def _children(fields: Fields, files: list[tuple[str, str]]) -> Iterator[tuple[bytes, _NodeRange]]:
    keys, common = _keys(fields, False)
    numbers, offsets, lengths = (fields.varints(len(keys)) for _ in range(3))
    for key, shared, number, offset, nbytes in zip(keys, common, numbers, offsets, lengths, strict=True):
        if shared > len(key):
            raise fields.corrupt("a key has an impossible length")
        base, relative = _file(files, number, fields)
        yield key[:shared], _NodeRange(base, ValueRange(base + relative, offset, nbytes))


def _values(fields: Fields, files: list[tuple[str, str]]) -> Iterator[tuple[bytes, ValueRange | bytes]]:
    keys, _ = _keys(fields, True)
    lengths = fields.varints(len(keys))
    kinds = fields.raw(len(keys))
    if kinds.strip(b"\0\1"):
        raise fields.corrupt("a value is stored in an unknown way")
    count = kinds.count(1)
    names = list(map("".join, files))  # one text for each file, not for each value
    numbers = fields.varints(count)
    if max(numbers, default=-1) >= len(names):
        raise fields.corrupt(_NO_FILE)
    paths = [names[number] for number in numbers]
    places = iter(zip(paths, fields.varints(count), strict=True))
    for key, nbytes, kind in zip(keys, lengths, kinds, strict=True):
        yield key, ValueRange(*next(places), nbytes) if kind else fields.raw(nbytes)
    if not fields.is_done():
        raise fields.corrupt("a node goes on after its last value")


def _text(data: bytes, fields: Fields) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise fields.corrupt("a key or path is not text") from None
