"""Evidence as text for a line of the journal: about 30 characters a range."""

import base64
import json
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ckpt_formats.core.evidence import RANGE, Evidence
from ckpt_formats.core.seals import Kind, Seal
from ckpt_formats.core.values import is_natural

_MAX_NBYTES = 1 << 28
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, zlib.error)
"""What Python raises for text that is no receipt: anybody who can write to the target may have written it."""


def to_text(evidence: Evidence) -> list[str]:
    """Three texts: the ranges, the seals that match, and the seals that are not listed."""
    table = np.sort(evidence.table, order=("seal", "start"))
    columns = table.view(np.uint8).reshape(-1, RANGE.itemsize).T  # equal bytes side by side: most are zeros
    seals = json.dumps([seal_json(seal) for seal in evidence.seals], separators=(",", ":")) if evidence.seals else ""
    return [_packed(columns.tobytes()), _packed(evidence.matched), _packed(seals.encode())]


def from_text(text: list[str]) -> Evidence:
    """The evidence of these texts; the ranges are in the order of their seals. Raises one of `MALFORMED`."""
    columns, matched, seals = map(_unpacked, text)
    ranges = np.frombuffer(columns, np.uint8).reshape(RANGE.itemsize, -1).T.tobytes()
    return Evidence(ranges, matched, tuple(map(seal_from_json, json.loads(seals))) if seals else ())


def at_paths(evidence: Evidence, paths: Iterable[Path]) -> Evidence:
    """The same with these paths in the place of those that text became: a path in a store is more than its text."""
    if not evidence.seals:
        return evidence
    known = {Path(str(path)): path for path in paths}
    return replace(evidence, seals=tuple(replace(one, path=known.get(one.path, one.path)) for one in evidence.seals))


def seal_json(seal: Seal) -> list[Any]:
    """A seal without the checksums of its chunks."""
    return [str(seal.path), seal.offset, seal.nbytes, seal.kind, str(seal.digest), seal.label, seal.chunk_nbytes]


def seal_from_json(fields: list[Any]) -> Seal:
    """The seal of these fields. Its path is one in the file system: see `at_paths`. Raises one of `MALFORMED`."""
    path, offset, nbytes, kind, digest, label, chunk_nbytes = fields
    if not all(isinstance(one, str) for one in (path, kind, digest, label)) or "\0" in path or len(digest) > 40:
        raise ValueError("no seal")
    if not all(map(is_natural, (offset, nbytes, chunk_nbytes))) or kind not in get_args(Kind):
        raise ValueError("no seal")
    return Seal(Path(path), offset, nbytes, kind, int(digest), label, chunk_nbytes)


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode("ascii") if data else ""


def _unpacked(text: str) -> bytes:
    if not text:
        return b""
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text), _MAX_NBYTES)
    if not unpacker.eof:
        raise ValueError("too long, or cut off")
    return data
