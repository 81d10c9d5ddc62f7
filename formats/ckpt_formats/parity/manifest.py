"""The manifest of parity: which files are protected, which blocks belong together, and the hash of each block.

docs/protect.md specifies the file. A file is divided into blocks of 1 MiB; the last one may be shorter. What may be
lost together is a domain: files in a row. Of a group of domains, the n-th blocks of all are a stripe, which has m
blocks of parity as long as its longest block; shorter ones count as if zeros followed. The parities with the number j
of all groups are files in one folder, the place j. If a single file is protected, its parts are the domains.
"""

import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ckpt_codecs.base import Array
from ckpt_formats.core.arguments import MAX_INTEGER
from ckpt_formats.core.claims import MAX_PATH
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError, form_of
from ckpt_formats.core.folders import PARITY
from ckpt_formats.core.text import printable
from ckpt_formats.parity.code import MAX_BLOCKS, MAX_LOST

NAME = "manifest"
BLOCK_NBYTES = 1 << 20
HASH_NBYTES = 16
_MAGIC = b"ckptpar1"
_CODE = "reed-solomon-cauchy-0x11d"
MAX_NBYTES = 1 << 32
_URL = re.compile(r"[a-z][a-z0-9]*://", re.ASCII)
_BY = re.compile(r"file|folder|table|part|node:\d{1,5}", re.ASCII)


@dataclass(frozen=True)
class ProtectedFile:
    """A file that is protected, or a part of one: its name below the folder, with slashes, and its length."""

    name: str
    nbytes: int
    start: int = 0
    """Where the part begins in the file: the first byte of a block."""

    @property
    def block_count(self) -> int:
        """Of a file without bytes there is none."""
        return -(-self.nbytes // BLOCK_NBYTES)

    def block_nbytes(self, index: int) -> int:
        """The length of a block."""
        return min(BLOCK_NBYTES, self.nbytes - index * BLOCK_NBYTES)


@dataclass(frozen=True)
class Domain:
    """What is lost together: its name, for people, and its files in the order of their blocks."""

    name: str
    files: tuple[ProtectedFile, ...]

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """How many blocks there are up to the end of each file."""
        return tuple(accumulate(file.block_count for file in self.files))

    @property
    def block_count(self) -> int:
        """Its blocks, which are those of its files in their order."""
        return self._ends[-1] if self._ends else 0

    def block(self, stripe: int) -> tuple[ProtectedFile, int]:
        """Its block in a stripe: the file, and which block of it."""
        number = bisect_right(self._ends, stripe)
        return self.files[number], stripe - (self._ends[number - 1] if number else 0)

    def block_nbytes(self, stripe: int) -> int:
        """The length of its block in a stripe; 0 if it has none there."""
        if stripe >= self.block_count:
            return 0
        file, index = self.block(stripe)
        return file.block_nbytes(index)


@dataclass(frozen=True)
class DomainGroup:
    """Domains whose blocks have parities together."""

    domains: tuple[Domain, ...]
    parities: int

    @cached_property
    def stripe_nbytes(self) -> tuple[int, ...]:
        """The length of the longest block of each stripe."""
        stripes = max((domain.block_count for domain in self.domains), default=0)
        return tuple(max(domain.block_nbytes(stripe) for domain in self.domains) for stripe in range(stripes))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where the block of each stripe begins in a file of parity; then its end."""
        return (0, *np.cumsum(self.stripe_nbytes, dtype=np.int64).tolist()) if self.stripe_nbytes else (0,)

    @property
    def parity_nbytes(self) -> int:
        """The length of one file of parity."""
        return self.starts[-1]

    @property
    def block_count(self) -> int:
        """All its blocks, of data and of parity."""
        return sum(domain.block_count for domain in self.domains) + self.parities * len(self.stripe_nbytes)

    def block_nbytes(self, column: int, stripe: int) -> int:
        """The length of a block: columns are those of the domains, then those of the parities; 0 if there is none."""
        if column < len(self.domains):
            return self.domains[column].block_nbytes(stripe)
        return self.stripe_nbytes[stripe]


@dataclass(frozen=True)
class ParityManifest:
    """What is protected, without hashes."""

    groups: tuple[DomainGroup, ...]
    parities: int
    """How many domains of a group may be lost."""
    by: str
    """What a domain is, for people: `file`, `folder`, `node:N` or `table`; `part` of a single file."""
    elsewhere: tuple[str, ...] = ()
    """The folders and URLs with the places in turn, if they are not in the folder `PARITY`: for people."""

    @property
    def files(self) -> Iterator[ProtectedFile]:
        """All files that are protected."""
        return (file for group in self.groups for domain in group.domains for file in domain.files)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The length of each file by its name."""
        lengths: dict[str, int] = {}
        for file in self.files:
            lengths[file.name] = max(lengths.get(file.name, 0), file.start + file.nbytes)
        return lengths

    @property
    def nbytes(self) -> int:
        """The bytes of all files that are protected."""
        return sum(file.nbytes for file in self.files)

    @property
    def parity_nbytes(self) -> int:
        """The bytes of all files of parity."""
        return self.parities * sum(group.parity_nbytes for group in self.groups)

    @property
    def block_count(self) -> int:
        """All blocks, of data and of parity."""
        return sum(group.block_count for group in self.groups)

    def header(self) -> bytes:
        """What the file has of it."""
        fields = {
            "version": _version(self.elsewhere),
            "code": _CODE,
            "hash": "xxh3-128",
            "block": BLOCK_NBYTES,
            "parities": self.parities,
            "by": self.by,
            "elsewhere": list(self.elsewhere),
            "groups": [
                [[domain.name, list(map(_row, domain.files))] for domain in group.domains] for group in self.groups
            ],
        }
        return json.dumps(fields, ensure_ascii=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class BlockHashes:
    """The hash of each block: of each group, those of all domains, then of all parities, each stripe by stripe."""

    manifest: ParityManifest
    table: Array
    """(blocks, 16) uint8, in the order of the manifest: XXH3-128, the highest byte first."""

    @classmethod
    def empty(cls, manifest: ParityManifest) -> "BlockHashes":
        return cls(manifest, np.zeros((manifest.block_count, HASH_NBYTES), np.uint8))

    @cached_property
    def _starts(self) -> list[list[int]]:
        """The row of the first block of each column of each group."""
        starts, row = [], 0
        for group in self.manifest.groups:
            own = []
            counts = [domain.block_count for domain in group.domains]
            for count in (*counts, *[len(group.stripe_nbytes)] * group.parities):
                own.append(row)
                row += count
            starts.append(own)
        return starts

    def row(self, group: int, column: int, stripe: int) -> int:
        """The row of a block in the table."""
        return self._starts[group][column] + stripe

    def of(self, group: int, column: int, stripe: int) -> bytes:
        """The hash of a block."""
        return bytes(self.table[self.row(group, column, stripe)])

    def note(self, group: int, column: int, stripe: int, digest: bytes) -> None:
        """Set the hash of a block."""
        self.table[self.row(group, column, stripe)] = np.frombuffer(digest, np.uint8)

    def to_bytes(self) -> bytes:
        """The file."""
        header = self.manifest.header()
        body = b"".join((_MAGIC, len(header).to_bytes(8, "little"), header, self.table.tobytes()))
        return body + xxhash.xxh3_128_digest(body)


def parse(data: bytes, where: Path) -> BlockHashes:
    """The manifest in the bytes of a file.

    Raises `CorruptError` if they are not those that were written, `UnsafeError` for names of files that are not below a
    folder, `UnsupportedError` for another version.
    """
    check_sum(data, where)
    body = data[:-HASH_NBYTES]
    end = len(_MAGIC) + 8 + int.from_bytes(body[len(_MAGIC) : len(_MAGIC) + 8], "little")
    if end > len(body):
        raise CorruptError("the manifest of parity ends too early", where=where)
    with form_of("a manifest of parity", where):
        fields = json.loads(body[len(_MAGIC) + 8 : end])
        is_known = fields["version"] in (1, 2) and fields["version"] == _version(fields["elsewhere"])
        if not is_known or fields["code"] != _CODE or fields["block"] != BLOCK_NBYTES:
            raise UnsupportedError("parity of a later version", where=where, hint="Use a newer ckpt.")
        manifest = _manifest(fields, where)
        hashes = body[end:]
        # Before a list of blocks is made: the bytes of the hashes pay for it.
        blocks = sum(file.block_count for file in manifest.files)
        if blocks * HASH_NBYTES > len(hashes) or manifest.block_count * HASH_NBYTES != len(hashes):
            raise CorruptError("the manifest of parity has another number of hashes than blocks", where=where)
    return BlockHashes(manifest, np.frombuffer(hashes, np.uint8).reshape(-1, HASH_NBYTES))


def check_sum(data: bytes, where: Path) -> None:
    """Raise `CorruptError` if the bytes of a file are no manifest, or do not fit their checksum."""
    if len(data) < len(_MAGIC) + 8 + HASH_NBYTES or not data.startswith(_MAGIC):
        raise CorruptError("is not a manifest of parity", where=where)
    if xxhash.xxh3_128_digest(memoryview(data)[:-HASH_NBYTES]) != data[-HASH_NBYTES:]:
        raise CorruptError("the manifest of parity does not fit its checksum", where=where)


def read(path: Path) -> BlockHashes:
    """The manifest in a file. Raises as `parse`, and `OSError`."""
    return parse(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    """The bytes of a file that should be a manifest. Raises `CorruptError` if there are too many, and `OSError`."""
    with path.open("rb") as file:
        data = file.read(MAX_NBYTES + 1)
    if len(data) > MAX_NBYTES:
        raise CorruptError("is too large for a manifest of parity", where=path)
    return data


def _manifest(fields: dict[str, Any], where: Path) -> ParityManifest:
    # A thread needs memory for so many blocks, so that a larger number is refused.
    parities = _number(fields["parities"], 1, MAX_LOST)
    groups = tuple(
        DomainGroup(
            tuple(Domain(str(name), tuple(_file(where, *file) for file in files)) for name, files in domains),
            parities,
        )
        for domains in fields["groups"]
    )
    for group in groups:
        _number(len(group.domains), 1, MAX_BLOCKS - parities)
    if _BY.fullmatch(fields["by"]) is None:
        raise ValueError("`by` is nothing that is lost together")
    manifest = ParityManifest(groups, parities, fields["by"], tuple(map(_absolute, fields["elsewhere"])))
    ends: dict[str, int] = {}
    for file in manifest.files:
        # The parts of a file follow each other, also in the manifest, and only its last block is shorter than others.
        is_part = file.name in ends
        if file.start != ends.get(file.name, 0) or (is_part and (not file.start or file.start % BLOCK_NBYTES)):
            raise CorruptError("the manifest of parity names bytes of a file twice, or not at all", where=where)
        ends[file.name] = file.start + file.nbytes
    return manifest


def _version(elsewhere: Sequence[str]) -> int:
    """The version of a manifest: 2 if a URL has parity, since programs that know only 1 would take it for a path."""
    return 2 if any(map(_URL.match, elsewhere)) else 1


def _row(file: ProtectedFile) -> list[Any]:
    return [file.name, file.nbytes, file.start] if file.start else [file.name, file.nbytes]


def _file(where: Path, name: str, nbytes: int, start: int = 0) -> ProtectedFile:
    if not isinstance(name, str):
        raise TypeError("a file has a text for its name")
    check_names([name], where)
    return ProtectedFile(name, _number(nbytes, 0, MAX_INTEGER), _number(start, 0, MAX_INTEGER))


def _absolute(folder: str) -> str:
    """A folder or URL with parity, as it is stated. Raises `TypeError`, `ValueError`."""
    if "\0" in folder or not (_URL.match(folder) or Path(folder).is_absolute()):
        raise ValueError(f"{folder!r:.40} is not the path of a folder")
    os.fsencode(folder)  # raises if no system can have such a name
    return folder


def check_names(names: Sequence[str], where: Path) -> None:
    """Raise `UnsafeError` for names that are not those of files below a folder, and outside its parity.

    Raises `UnicodeEncodeError`, which is a `ValueError`, for those that no system can have.
    """
    for name in names:
        os.fsencode(name)
        parts = name.split("/")
        is_parity = any(part.endswith(PARITY) for part in parts)
        if len(name) > MAX_PATH or "\0" in name or is_parity or not all(part.strip(".") for part in parts):
            raise UnsafeError(f"no file that is protected can have the name `{printable(name[:80])}`", where=where)


def _number(value: int, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is not an integer from {least} to {most}")
    return value
