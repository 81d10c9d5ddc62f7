"""Typed look-ups in JSON that may be malformed; errors name the wrong field and the file."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_formats.containers.typed_json import decode
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.values import Value, is_natural


@dataclass(frozen=True)
class FieldReader:
    """Reads fields of the JSON in one file. Every method raises `CorruptError` if the field has another type."""

    path: Path
    table: str = ""
    """What the fields are part of: messages name it."""

    def of(self, table: str) -> "FieldReader":
        """A reader of fields that are part of a table."""
        return FieldReader(self.path, table)

    def true(self, condition: bool, message: str) -> None:
        """Raise `CorruptError` with this message unless the condition is true."""
        if not condition:
            part = f"{self.table}: " if self.table else ""
            raise CorruptError(f"the manifest is not valid: {part}{message}", where=self.path)

    def mapping(self, fields: Any, key: str) -> dict[str, Any]:
        """The object under a key."""
        value = self.get(fields, key)
        self.true(isinstance(value, dict), f"{key} is not an object")
        return value  # type: ignore[no-any-return]

    def sequence(self, fields: Any, key: str) -> list[Any]:
        """The list under a key."""
        value = self.get(fields, key)
        self.true(isinstance(value, list), f"{key} is not a list")
        return value  # type: ignore[no-any-return]

    def text(self, fields: Any, key: str) -> str:
        """The text under a key."""
        value = self.get(fields, key)
        self.true(isinstance(value, str), f"{key} is not a text")
        return value  # type: ignore[no-any-return]

    def texts(self, items: Iterable[Any], key: str) -> tuple[str, ...]:
        """The items as texts; `key` names them in the message."""
        texts = tuple(items)
        self.true(all(isinstance(text, str) for text in texts), f"{key} are not all texts")
        return texts

    def values(self, fields: Any, key: str) -> dict[str, Value]:
        """The mapping under a key, decoded from typed JSON."""
        value = decode(self.mapping(fields, key), self.path)
        self.true(isinstance(value, dict), f"{key} is not a mapping")
        return value  # type: ignore[no-any-return]

    def natural(self, fields: Any, key: str) -> int:
        """The integer from 0 under a key."""
        value = self.get(fields, key)
        self.true(is_natural(value), f"{key} is not a whole number from 0")
        return value  # type: ignore[no-any-return]

    def hash(self, fields: Any, key: str) -> str:
        """The checksum under a key: `xxh3-128:` and 32 hexadecimal digits."""
        value = self.text(fields, key)
        self.true(re.fullmatch(r"xxh3-128:[0-9a-f]{32}", value) is not None, f"{key} is not a checksum")
        return value

    def get(self, fields: Any, key: str) -> Any:
        """The value of a key of an object."""
        self.true(isinstance(fields, dict) and key in fields, f"{key} is missing")
        return fields[key]
