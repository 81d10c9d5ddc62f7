"""A JSON object in a file whose first line holds the checksum of all bytes after it. What we read is hostile."""

import json
import re
from pathlib import Path
from typing import Any

import xxhash

from ckpt_formats.containers.safetensors import parse_json_object
from ckpt_formats.core.errors import Corrupt
from ckpt_formats.core.files import read_whole

_FIRST_LINE = re.compile(rb'\{"checksum":"xxh3-128:([0-9a-f]{32})",\n')


def dump(said: dict[str, Any]) -> bytes:
    """The bytes of such a file: a line for each field, and for each item of a field that is a list."""
    body = (",\n".join(f" {_text(key)}: {_lines(value)}" for key, value in said.items()) + "\n}\n").encode()
    return b'{"checksum":"%s",\n' % hash_text(xxhash.xxh3_128_intdigest(body)).encode() + body


def load(path: Path, most: int, what: str) -> dict[str, Any]:
    """Read one back, of at most so many bytes. Raises `Corrupt`, saying `what` it is not."""
    raw = read_whole(path, most)
    first = _FIRST_LINE.match(raw)
    if first is None:
        raise Corrupt(f"not {what}", where=path)
    if xxhash.xxh3_128_hexdigest(raw[first.end() :]) != first[1].decode():
        raise Corrupt("the manifest's checksum does not fit its text: it was damaged or edited", where=path)
    return parse_json_object(raw, path)


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return _text(value)
    return "[\n  " + ",\n  ".join(map(_text, value)) + "\n ]"


def _text(value: Any) -> str:
    # Without an indent, which only an encoder in Python can do, at ten times the cost.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def hash_text(digest: int) -> str:
    return f"xxh3-128:{digest:032x}"


def hash_number(text: str) -> int:
    return int(text.removeprefix("xxh3-128:"), 16)
