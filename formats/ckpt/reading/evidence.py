"""What one process has read, as bytes for another process: checksums of ranges, and which files they are of.

first line             `ckpt-read 1`: what it is, and the version
zlib                   four columns, each with its length in bytes, little-endian, in 8 bytes before it
    ranges             32 bytes: number of a seal, start, stop, checksum
    matched            8 bytes: number of a seal whose whole range matches its checksum
    covered            24 bytes: number of a seal, start, stop of what was read of it
    files              16 bytes: hash of a path, hash of what identifies the file
"""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.evidence import NUMBER, RANGE, Evidence
from ckpt_formats.core.identity import Identity

_MAGIC = b"ckpt-read 1\n"
_MAX_NBYTES = 1 << 28
COVERED = np.dtype([("seal", "<u8"), ("start", "<u8"), ("stop", "<u8")])
"""A range that was read: the number of its seal, and its ends within the sealed range."""
FILE = np.dtype([("path", "<u8"), ("identity", "<u8")])
"""A file: hashes of its path, and of what identifies its content."""
_COLUMNS = (RANGE, NUMBER, COVERED, FILE)

Rows = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class ReadEvidence:
    """What one process has read."""

    checksums: Evidence
    covered: Rows
    """(ranges,) of `COVERED`, for the seals in `checksums.ranges`."""
    files: Rows
    """(files,) of `FILE`."""

    def to_bytes(self) -> bytes:
        """Return it as bytes for `from_bytes`."""
        columns = (self.checksums.table, self.checksums.numbers, self.covered, self.files)
        body = b"".join(len(data).to_bytes(8, "little") + data for data in map(_transposed, columns))
        return _MAGIC + zlib.compress(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> "ReadEvidence":
        """Parse what `to_bytes` returned, in any process. Raises `InvalidArgumentError` for all other bytes."""
        columns = list[Rows]()
        if not isinstance(data, bytes) or not data.startswith(_MAGIC) or len(data) > _MAX_NBYTES:
            raise _malformed("its first bytes are others")
        unpacker = zlib.decompressobj()
        try:
            body = unpacker.decompress(data[len(_MAGIC) :], _MAX_NBYTES)
        except zlib.error as error:
            raise _malformed(str(error)) from None
        if not unpacker.eof or unpacker.unused_data:
            raise _malformed("it is too long, or was cut off")
        for dtype in _COLUMNS:
            if len(body) < 8:
                raise _malformed("a column is missing")
            nbytes, body = int.from_bytes(body[:8], "little"), body[8:]
            if nbytes > len(body) or nbytes % dtype.itemsize:
                raise _malformed("a column has a wrong length")
            rows = np.frombuffer(body[:nbytes], np.uint8).reshape(dtype.itemsize, -1).T
            columns.append(np.frombuffer(np.ascontiguousarray(rows), dtype))
            body = body[nbytes:]
        if body:
            raise _malformed("bytes follow its end")
        ranges, matched, covered, files = columns
        if (ranges["start"] > ranges["stop"]).any() or (covered["start"] > covered["stop"]).any():
            raise _malformed("a range ends before it begins")
        return cls(Evidence(ranges.tobytes(), matched.tobytes()), covered, files)


def file_rows(identities: Iterable[tuple[Path, Identity]]) -> Rows:
    """The rows of these files: (files,) of `FILE`. Devices and inodes are left out: machines may number them apart."""
    rows = [(_hash(str(path)), _hash(one.content)) for path, one in identities]
    return np.array(rows, FILE)


def replaced(files: Rows, identities: Mapping[Path, Identity]) -> Path | None:
    """The first of the known files that has another identity in `files`, rows of another process; None if none has."""
    known = {_hash(str(path)): path for path in identities}
    for path, identity in files.tolist():
        own = known.get(path)
        if own is not None and _hash(identities[own].content) != identity:
            return own
    return None


def _hash(text: str) -> int:
    return int(xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")))


def _transposed(rows: Rows) -> bytes:
    """The rows with equal bytes side by side: most are zeros."""
    contiguous = np.ascontiguousarray(rows)
    return contiguous.view(np.uint8).reshape(-1, rows.dtype.itemsize).T.tobytes() if rows.size else b""


def _malformed(why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"this is not the evidence of a reading: {why}", hint="Pass the bytes that `Reading.evidence` returned."
    )
