"""The entries of a YAML file, of which the configurations of models consist: `num_layers: 32`.

Only what PyYAML and OmegaConf write for plain values is read: scalars, and lists of scalars. Tables in tables, texts of
several lines, tags, anchors, and interpolations (`${...}`) are left out and named, so that nobody takes a default for
one of them. Nothing can be constructed, called or loaded by a file.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.claims import MAX_YAML
from ckpt_formats.core.errors import CorruptError, UnsafeError

_LONGEST = 40
"""Digits of a number."""

Scalar = None | bool | int | float | str

_ENTRY = re.compile(r"""(?P<key>[A-Za-z_][\w.-]*):(?:\s+(?P<value>.*?))?\s*""")
_ITEM = re.compile(r"\s*-\s+(?P<value>.*?)\s*")
_LIST = re.compile(r"\[\s*(?P<items>[^\[\]{}'\"]*)\s*\]")
_INTEGER = re.compile(rf"[-+]?(?:0|[1-9][0-9]{{0,{_LONGEST}}})")
_EXPONENT = "[eE][-+]?[0-9]{1,4}"
_FLOAT = re.compile(rf"[-+]?(?:0|[1-9][0-9]{{0,{_LONGEST}}})(?:\.[0-9]{{0,{_LONGEST}}}(?:{_EXPONENT})?|{_EXPONENT})")
_WORDS: dict[str, Scalar] = {"null": None, "~": None, "": None, "true": True, "false": False}
_PLAIN = re.compile(r"[A-Za-z_/](?:[\w./ +-]*[\w./+-])?")
"""A text without quotes that has no second meaning."""
_AMBIGUOUS = re.compile(r"(?i)y|n|yes|no|on|off|true|false|null|[.]?(?:inf|nan)")
"""Words that are booleans or numbers for some readers, and texts for others."""
_QUOTED = re.compile(r"""'(?P<single>(?:[^']|'')*)'|"(?P<double>[^"\\]*)\"""")


@dataclass(frozen=True)
class YamlEntries:
    """The entries of a file."""

    values: dict[str, Scalar | list[Scalar]]
    unread: frozenset[str]
    """The entries whose values have another form."""


class _UnreadError(Exception):
    """A value of a form that is not read."""


def parse_entries(text: str, where: Path) -> YamlEntries:
    """The entries of a file.

    Raises `CorruptError` for an entry that is there twice, or a line that is not of an entry; `UnsafeError` for a large
    file.

    >>> parse_entries("layers: 2\\nwindow:\\n- 3\\n- 0\\noptim:\\n  lr: 0.1\\n", Path("x")).values
    {'layers': 2, 'window': [3, 0]}
    """
    if len(text) > MAX_YAML:
        raise UnsafeError(f"has {len(text):,} characters of YAML", where=where)
    values: dict[str, Scalar | list[Scalar]] = {}
    unread: set[str] = set()
    for key, value, rest in _blocks(text, where):
        if key in values or key in unread:
            raise CorruptError(f"states `{key}` twice", where=where)
        try:
            values[key] = _value(value, rest)
        except _UnreadError:
            unread.add(key)
    return YamlEntries(values, frozenset(unread))


def _blocks(text: str, where: Path) -> list[tuple[str, str, list[str]]]:
    """Each entry of the table: its key, what follows in its line, and the lines below that belong to it."""
    blocks: list[tuple[str, str, list[str]]] = []
    for number, line in enumerate(text.removeprefix("---\n").split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if match := _ENTRY.fullmatch(line):
            blocks.append((match["key"], match["value"] or "", []))
        elif blocks and line.startswith((" ", "- ")):
            blocks[-1][2].append(line)
        else:
            raise CorruptError(f"line {number} is not of an entry of a table", where=where)
    return blocks


def _value(value: str, rest: list[str]) -> Scalar | list[Scalar]:
    if rest and value:
        raise _UnreadError  # a text that goes on
    if rest:
        items = [_ITEM.fullmatch(line) for line in rest]
        return [_scalar(item["value"]) if item else _unread() for item in items]
    if match := _LIST.fullmatch(value):
        return [_scalar(item.strip()) for item in match["items"].split(",")] if match["items"] else []
    return _scalar(value)


def _scalar(text: str) -> Scalar:
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if match := _QUOTED.fullmatch(text):
        return match["double"] if match["single"] is None else match["single"].replace("''", "'")
    if _PLAIN.fullmatch(text) and not _AMBIGUOUS.fullmatch(text):
        return text
    return _unread()


def _unread() -> Scalar:
    raise _UnreadError
