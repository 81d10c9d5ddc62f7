"""Receipts as lines of a journal: a checksum of the line, so that one that a crash cut short is noticed, and JSON."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from xxhash import xxh3_64_hexdigest

from ckpt.pipeline.evidence_text import MALFORMED, from_text, seal_from_json, seal_json, to_text
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.value_changes import ValueChange
from ckpt_formats.core.values import is_natural
from ckpt_formats.core.zero_runs import ZeroRun


def to_line(receipt: Receipt) -> str:
    """A receipt as a line, with its end."""
    text = json.dumps(_json(receipt), separators=(",", ":"))
    return f"{xxh3_64_hexdigest(text.encode())} {text}\n"


def from_lines(lines: Iterable[str]) -> Iterator[Receipt]:
    """The receipts of all lines that are whole and state one: a file without a receipt is written again."""
    for line in lines:
        digest, _, text = line.rstrip("\n").partition(" ")
        with suppress(*MALFORMED):
            if digest == xxh3_64_hexdigest(text.encode()):
                yield _receipt(json.loads(text))


def _json(receipt: Receipt) -> dict[str, Any]:
    return {
        "file": receipt.file,
        "nbytes": receipt.nbytes,
        "seals": [seal_json(seal) for seal in receipt.seals],
        "entry": receipt.entry,
        "e_tag": receipt.e_tag,
        "read": to_text(receipt.evidence),
        **({"changes": [_change_json(change) for change in receipt.changes]} if receipt.changes else {}),
        **({"zeros": receipt.zeros} if receipt.zeros else {}),
        **({"placed": receipt.placed} if receipt.placed else {}),
        **({"chunks": receipt.chunks} if receipt.chunks else {}),
    }


def _receipt(fields: Mapping[str, Any]) -> Receipt:
    """The receipt of these fields. Raises one of `MALFORMED`."""
    parts = fields["file"].split("/")
    if not all(parts) or "\0" in fields["file"] or {".", ".."} & set(parts):
        raise ValueError("no file of a target")
    placed, chunks = fields.get("placed", 0), fields.get("chunks", 0)
    if not all(map(is_natural, (fields["nbytes"], placed, chunks))):
        raise ValueError("no lengths")
    if not (isinstance(fields["entry"], dict) and isinstance(fields["e_tag"], str)):
        raise ValueError("no receipt")
    return Receipt(
        fields["file"],
        fields["nbytes"],
        tuple(map(seal_from_json, fields["seals"])),
        fields["entry"],
        from_text(fields["read"]),
        fields["e_tag"],
        tuple(map(_change, fields.get("changes", ()))),
        tuple(map(_zeros, fields.get("zeros", ()))),
        placed,
        chunks,
    )


def _zeros(fields: Any) -> ZeroRun:
    file, start, stop = fields
    if not (isinstance(file, str) and is_natural(start) and is_natural(stop)):
        raise ValueError("no range of a file")
    return ZeroRun(file, start, stop)


def _change_json(change: ValueChange) -> dict[str, Any]:
    fields = {key: value for key, value in vars(change).items() if key != "box"}
    return {**fields, "start": change.box.start, "stop": change.box.stop}


def _change(fields: Mapping[str, Any]) -> ValueChange:
    rest = {key: value for key, value in fields.items() if key not in ("start", "stop")}
    return ValueChange(box=Box(tuple(fields["start"]), tuple(fields["stop"])), **rest)
