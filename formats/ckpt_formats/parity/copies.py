"""The copies of a manifest of parity: which of them are whole, and what damaged ones give together.

Each copy has a checksum of its own. If whole ones differ, most of them count. If none is whole, the bits that most of
them have are tried, and count if they fit their checksum.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import unreadable
from ckpt_formats.core.store_path import StoreError
from ckpt_formats.parity.manifest import HASH_NBYTES, NAME, BlockHashes, check_sum, parse, read_bytes

_MOST_BYTES = 1 << 30
"""Of all damaged copies together, and of all trials, so that memory and time are bounded."""
_MOST_DIFFERENCES = 10
"""Bytes in which two damaged copies differ: each is tried as in the one, and as in the other."""


@dataclass(frozen=True)
class ManifestCopy:
    """A copy of a manifest that is there."""

    path: Path
    digest: bytes | None
    """Its checksum; None if it does not fit."""
    error: CkptError | None = None
    """Why it is not whole."""


def copies_in(folders: Sequence[Path]) -> list[ManifestCopy]:
    """The copies that can be read, in folders with parity and in the folder of each parity there."""
    return [copy for path in manifest_copies(folders) if (copy := copy_at(path)) is not None]


def manifest_copies(folders: Sequence[Path]) -> Iterator[Path]:
    """Where copies of a manifest may be: in folders with parity, and in the folder of each parity there."""
    for folder in folders:
        yield folder / NAME
        try:
            inside = sorted(folder.iterdir())
        except OSError:
            continue
        yield from (path / NAME for path in inside if path.name.isdecimal())


def manifests(copies: Sequence[ManifestCopy]) -> Iterator[tuple[Path, BlockHashes | CkptError]]:
    """The manifests that copies have, each once, that of most copies first; of each, a copy, or why it is refused.

    If no copy is whole, the one that damaged ones give together.
    """
    counts = Counter(copy.digest for copy in copies if copy.digest is not None)
    for digest, _ in counts.most_common():
        path = next(copy.path for copy in copies if copy.digest == digest)
        try:
            yield path, parse(read_bytes(path), path)
        except CkptError as error:
            yield path, error
    if not counts:
        yield from ((copy.path, copy.error) for copy in copies if copy.error is not None)
        data = _combined(copies)
        if data is not None:
            yield copies[0].path, parse(data, copies[0].path)


def copy_at(path: Path) -> ManifestCopy | None:
    """What is known of a copy; None if there is none that can be read."""
    try:
        if not path.is_file():  # a pipe would block
            return None
        data = read_bytes(path)
        check_sum(data, path)
    except StoreError as error:
        raise unreadable(error, path) from error
    except OSError as error:
        if not isinstance(error, CkptError):
            return None
        return ManifestCopy(path, None, error)
    except CkptError as error:
        return ManifestCopy(path, None, error)
    return ManifestCopy(path, data[-HASH_NBYTES:])


def _combined(copies: Sequence[ManifestCopy]) -> bytes | None:
    """The manifest of which all copies are damaged; None if they do not give one that fits its checksum."""
    lengths = Counter(copy.path.stat().st_size for copy in copies)
    if not lengths or sum(length * count for length, count in lengths.items()) > _MOST_BYTES:
        return None
    nbytes = lengths.most_common(1)[0][0]
    same = [data for copy in copies if len(data := read_bytes(copy.path)) == nbytes]
    return next((data for data in _trials(same) if _fits(data)), None)


def _trials(copies: Sequence[bytes]) -> Iterator[bytes]:
    """What damaged copies of one length may have been: the bits of most, or of two the bytes of either."""
    arrays = [np.frombuffer(data, np.uint8) for data in copies]
    if len(arrays) > 2:
        odd = arrays[: len(arrays) - 1 + len(arrays) % 2]
        counts = np.zeros(8 * odd[0].size, np.uint8)
        for one in odd:
            counts += np.unpackbits(one)
        yield np.packbits(counts > len(odd) // 2).tobytes()
    for one, other in itertools.combinations(arrays, 2):
        places = np.flatnonzero(one != other)
        if len(places) <= _MOST_DIFFERENCES and one.size << len(places) <= _MOST_BYTES:
            for choice in itertools.product((False, True), repeat=len(places)):
                mixed = one.copy()
                mixed[places[list(choice)]] = other[places[list(choice)]]
                yield mixed.tobytes()


def _fits(data: bytes) -> bool:
    return xxhash.xxh3_128_digest(data[:-HASH_NBYTES]) == data[-HASH_NBYTES:]
