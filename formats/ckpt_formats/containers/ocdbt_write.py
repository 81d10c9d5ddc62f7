"""Write a database of OCDBT: the nodes of its tree as one data file, and the manifest that names the root.

Values are in data files of the caller; small ones are in the nodes. Equal databases become equal bytes: identifiers and
times are made from the content.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ckpt_formats.containers.crc32c import crc32c
from ckpt_formats.containers.ocdbt import MANIFEST_MAGIC, NODE_MAGIC, ValueRange

_MAX_INLINE, _MAX_NODE, _ARITY = 1024, 100_000_000, 4
"""As Orbax chooses them."""
_LEAF_NBYTES = 1 << 20
_CHILDREN = 1024


class Database(NamedTuple):
    """The bytes of the two files."""

    nodes: bytes
    manifest: bytes


class _Child(NamedTuple):
    """A node that is written, for the node above."""

    first: bytes
    offset: int
    nbytes: int
    keys: int
    tree_nbytes: int
    value_nbytes: int


def database(values: Mapping[str, ValueRange | bytes], file: str) -> Database:
    """The files of a database of these values, at least one; `file` is the name that the nodes will have."""
    entries = sorted((key.encode(), value) for key, value in values.items())
    out = bytearray()
    level = [_add(out, leaf, _leaf(leaf)) for leaf in _leaves(entries)]
    height = 0
    while len(level) > 1:
        height += 1
        level = [_inner(out, level[i : i + _CHILDREN], height, file) for i in range(0, len(level), _CHILDREN)]
    (root,) = level
    return Database(bytes(out), _manifest(root, height, file, hashlib.blake2b(out, digest_size=16).digest()))


def varint(*numbers: int) -> bytes:
    """Unsigned numbers in groups of 7 bits, the lowest first."""
    out = bytearray()
    for number in numbers:
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)


def framed(magic: int, body: bytes) -> bytes:
    """A manifest or node: its header, the body as it is, and the checksum."""
    head = magic.to_bytes(4, "big") + (len(body) + 18).to_bytes(8, "little") + varint(0, 0)
    return head + body + crc32c(head + body).to_bytes(4, "little")


def file_table(files: Sequence[str]) -> bytes:
    """The files that a node names, in order."""
    paths = [file.encode() for file in files]
    shared = [_common(a, b) for a, b in pairwise(paths)]
    suffixes = [path[n:] for path, n in zip(paths, [0, *shared], strict=False)]
    counts = (len(paths), *shared, *map(len, suffixes), *(0 for _ in paths))
    return varint(*counts) + b"".join(suffixes)


def keys_of(keys: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The columns of the lengths of keys, and that of their bytes."""
    shared = [_common(a, b) for a, b in pairwise(keys)]
    suffixes = [key[n:] for key, n in zip(keys, [0, *shared], strict=True)]
    return varint(*shared, *map(len, suffixes)), b"".join(suffixes)


def _common(a: bytes, b: bytes) -> int:
    """The length of what both begin with, found by halves."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _leaves(entries: Sequence[tuple[bytes, ValueRange | bytes]]) -> Iterable[list[tuple[bytes, ValueRange | bytes]]]:
    leaf: list[tuple[bytes, ValueRange | bytes]] = []
    nbytes = 0
    for key, value in entries:
        leaf.append((key, value))
        nbytes += len(key) + (len(value) if isinstance(value, bytes) else 24)
        if nbytes >= _LEAF_NBYTES:
            yield leaf
            leaf, nbytes = [], 0
    if leaf:
        yield leaf


def _leaf(entries: Sequence[tuple[bytes, ValueRange | bytes]]) -> bytes:
    places = [value for _, value in entries if isinstance(value, ValueRange)]
    files = sorted({place.file for place in places})
    numbers = {file: i for i, file in enumerate(files)}
    lengths, suffixes = keys_of([key for key, _ in entries])
    sizes = (value.nbytes if isinstance(value, ValueRange) else len(value) for _, value in entries)
    return framed(
        NODE_MAGIC,
        b"\0"
        + file_table(files)
        + varint(len(entries))
        + lengths
        + suffixes
        + varint(*sizes)
        + bytes(isinstance(value, ValueRange) for _, value in entries)
        + varint(*(numbers[place.file] for place in places), *(place.offset for place in places))
        + b"".join(value for _, value in entries if not isinstance(value, ValueRange)),
    )


def _add(out: bytearray, entries: Sequence[tuple[bytes, ValueRange | bytes]], node: bytes) -> _Child:
    value_nbytes = sum(value.nbytes for _, value in entries if isinstance(value, ValueRange))
    out += node
    return _Child(entries[0][0], len(out) - len(node), len(node), len(entries), len(node), value_nbytes)


def _inner(out: bytearray, children: Sequence[_Child], height: int, file: str) -> _Child:
    """Add the node above these. Its children's keys are stored whole: they share no implicit prefix."""
    lengths, suffixes = keys_of([child.first for child in children])
    columns = zip(*children, strict=True)
    next(columns)
    offsets, sizes, keys, tree, values = columns
    node = framed(
        NODE_MAGIC,
        bytes([height])
        + file_table([file])
        + varint(len(children))
        + lengths
        + bytes(len(children))
        + suffixes
        + varint(*(0 for _ in children), *offsets, *sizes, *keys, *tree, *values),
    )
    out += node
    totals = sum(keys), sum(tree) + len(node), sum(values)
    return _Child(children[0].first, len(out) - len(node), len(node), *totals)


def _manifest(root: _Child, height: int, file: str, uuid: bytes) -> bytes:
    configuration = uuid + varint(0, _MAX_INLINE, _MAX_NODE) + bytes([_ARITY]) + varint(0)
    version = varint(1, 1) + bytes([height]) + varint(0, *root[1:]) + bytes(8)
    return framed(MANIFEST_MAGIC, configuration + file_table([file]) + version + varint(0))
