"""Typed look-ups in JSON of strangers; each says what is wrong, and in which file."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.typed_json import decode
from ckpt_formats.core.errors import Corrupt
from ckpt_formats.core.values import Value


@dataclass(frozen=True)
class FieldReader:
    """Of the JSON in one file."""

    path: Path

    def true(self, fact: bool, what: str) -> None:
        if not fact:
            raise Corrupt(f"the manifest is not valid: {what}", where=self.path)

    def mapping(self, said: Any, key: str) -> dict[str, Any]:
        value = self.get(said, key)
        self.true(isinstance(value, dict), f"{key} is not an object")
        return value  # type: ignore[no-any-return]

    def sequence(self, said: Any, key: str) -> list[Any]:
        value = self.get(said, key)
        self.true(isinstance(value, list), f"{key} is not a list")
        return value  # type: ignore[no-any-return]

    def text(self, said: Any, key: str) -> str:
        value = self.get(said, key)
        self.true(isinstance(value, str), f"{key} is not a text")
        return value  # type: ignore[no-any-return]

    def texts(self, said: Iterable[Any], key: str) -> tuple[str, ...]:
        texts = tuple(said)
        self.true(all(isinstance(text, str) for text in texts), f"{key} are not all texts")
        return texts

    def values(self, said: Any, key: str) -> dict[str, Value]:
        value = decode(self.mapping(said, key), self.path)
        self.true(isinstance(value, dict), f"{key} is not a mapping")
        return value  # type: ignore[no-any-return]

    def natural(self, said: Any, key: str) -> int:
        value = self.get(said, key)
        self.true(is_natural(value), f"{key} is not a whole number from 0")
        return value  # type: ignore[no-any-return]

    def hash(self, said: Any, key: str) -> str:
        value = self.text(said, key)
        self.true(re.fullmatch(r"xxh3-128:[0-9a-f]{32}", value) is not None, f"{key} is not a checksum")
        return value

    def get(self, said: Any, key: str) -> Any:
        self.true(isinstance(said, dict) and key in said, f"{key} is missing")
        return said[key]
