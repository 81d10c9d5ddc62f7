"""A JSON object in a file whose first line has the checksum of all bytes after it. The file may be hostile."""

import json
import re
from pathlib import Path
from typing import Any

import xxhash

from ckpt_formats.containers.safetensors import parse_json_object
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import read_whole

_FIRST_LINE = re.compile(rb'\{"checksum":"xxh3-128:([0-9a-f]{32})",\n')


def dump(fields: dict[str, Any]) -> bytes:
    """The bytes of such a file: one line for each field, and one for each item of a field that is a list."""
    body = (",\n".join(f" {_text(key)}: {_lines(value)}" for key, value in fields.items()) + "\n}\n").encode()
    return b'{"checksum":"%s",\n' % hash_text(xxhash.xxh3_128_intdigest(body)).encode() + body


def load(path: Path, max_nbytes: int, kind: str) -> dict[str, Any]:
    """The object in a file of at most `max_nbytes` bytes.

    Raises `CorruptError`; `kind` names the file in the message.
    """
    return parse(read_whole(path, max_nbytes), path, kind)


def parse(content: bytes, path: Path, kind: str) -> dict[str, Any]:
    """The object in the bytes of such a file. Raises `CorruptError`; `kind` names the bytes in the message."""
    checksum_line = _FIRST_LINE.match(content)
    if checksum_line is None:
        raise CorruptError(f"not {kind}", where=path)
    if xxhash.xxh3_128_hexdigest(content[checksum_line.end() :]) != checksum_line[1].decode():
        raise CorruptError("the manifest's checksum does not match its text: it was damaged or edited", where=path)
    return parse_json_object(content, path, finite=True)


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return _text(value)
    return "[\n  " + ",\n  ".join(map(_text, value)) + "\n ]"


def _text(value: Any) -> str:
    # Without indent: only the encoder in Python supports it, at ten times the cost.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def hash_text(digest: int) -> str:
    """A digest as text: `xxh3-128:` and 32 hexadecimal digits."""
    return f"xxh3-128:{digest:032x}"


def hash_number(text: str) -> int:
    """The digest of such a text."""
    return int(text.removeprefix("xxh3-128:"), 16)
