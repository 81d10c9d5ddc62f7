"""Receipts as lines of a journal: a checksum of the line, so that one that a crash cut short is noticed, and JSON."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from ckpt_formats.core.files import Evidence, Seal
from ckpt_formats.core.format import Receipt


def to_line(receipt: Receipt) -> str:
    """A receipt as a line, with its end."""
    text = json.dumps(_json(receipt), separators=(",", ":"))
    return f"{xxh3_64_hexdigest(text.encode())} {text}\n"


def from_lines(lines: Iterable[str]) -> Iterator[Receipt]:
    """The receipts of all lines that are whole."""
    for line in lines:
        digest, _, text = line.rstrip("\n").partition(" ")
        if digest == xxh3_64_hexdigest(text.encode()):
            yield _receipt(json.loads(text))


def _json(receipt: Receipt) -> dict[str, Any]:
    return {
        "file": receipt.file,
        "nbytes": receipt.nbytes,
        "seals": [_seal_json(seal) for seal in receipt.seals],
        "entry": receipt.entry,
        "e_tag": receipt.e_tag,
        "evidence": [[*_seal_json(e.seal), e.start, e.stop, str(e.digest)] for e in receipt.evidence],
    }


def _seal_json(seal: Seal) -> list[Any]:
    return [str(seal.path), seal.offset, seal.nbytes, seal.kind, str(seal.digest), seal.label, seal.chunk_nbytes]


def _receipt(fields: Mapping[str, Any]) -> Receipt:
    evidence = tuple(Evidence(_seal(e[:7]), e[7], e[8], int(e[9])) for e in fields["evidence"])
    return Receipt(
        fields["file"], fields["nbytes"], tuple(map(_seal, fields["seals"])), fields["entry"], evidence, fields["e_tag"]
    )


def _seal(fields: list[Any]) -> Seal:
    path, offset, nbytes, kind, digest, label, chunk_nbytes = fields
    return Seal(Path(path), offset, nbytes, kind, int(digest), label, chunk_nbytes)
