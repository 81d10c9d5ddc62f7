"""Writes docs/json.md and docs/schemas.json from docs/json_fields.txt; with --check, compares json.md with it."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
SIMPLE = {"text": "string", "int": "integer", "number": "number", "bool": "boolean"}


class Field(NamedTuple):
    """A field of an object: its path in the object, its type as the page states it, and what it is."""

    path: str
    kind: str
    what: str
    is_optional: bool


class Part(NamedTuple):
    """What a command prints in one case."""

    when: str
    fields: list[Field]


def read_commands(text: str) -> dict[str, list[Part]]:
    """What each command prints, and `error`. A command that prints events has no part."""
    shared: dict[str, list[Field]] = {}
    commands: dict[str, list[Part]] = {}
    for section in text.split("\n\n")[2:]:
        title, *lines = section.splitlines()
        fields = [field for line in lines for field in _fields(line, shared)]
        mark, _, name = title.partition(" ")
        if mark == "#":
            shared[name] = fields
            continue
        command, _, when = name.partition(" | ")
        parts = commands.setdefault(command, [])
        if command != "error":
            fields += shared["notes"]
        if lines:
            parts.append(Part(when, fields))
    return commands


def _fields(line: str, shared: Mapping[str, list[Field]]) -> Iterator[Field]:
    place, is_shared, name = line.partition("= ")
    if is_shared and " " not in place:
        yield from (field._replace(path=place + field.path) for field in shared[name])
        return
    path, kind, what = (part.strip() for part in line.split("|", 2))
    yield Field(path.removesuffix("?"), kind, what, path.endswith("?"))


COMMANDS = read_commands((DOCS / "json_fields.txt").read_text("utf-8"))
(ERROR,) = COMMANDS.pop("error")

HEAD = """# JSON

Generated from `docs/json_fields.txt` by `python docs/make_json.py`; do not edit.
The same command writes the JSON Schemas into `docs/schemas.json`, under `$defs`: one for each command, and `error`.
Tests run every command and compare.

With `--json`, every command prints **exactly one object** on stdout, also if it fails: then it is the object under
[error](#error), and the exit code is its `code`. Only `verify` prints its findings instead of an error if a checkpoint
is damaged. Bytes are `nbytes`, and times are seconds. Fields may be added in later versions; a field never changes its
meaning. "or null" means that the value may be missing.

`ckpt shadow` and `ckpt follow` without `--once`, `ckpt serve` and `ckpt hold` run until they are stopped. They print an
object on a line of its own for each event: `event` says which.
"""


def schema_of(fields: Sequence[Field], place: str = "") -> dict[str, Any]:
    """The JSON Schema of the object at a place, from all fields of the part."""
    own = [one for one in fields if one.path.startswith(place) and "." not in one.path[len(place) :]]
    return {
        "type": "object",
        "properties": {one.path[len(place) :]: _schema_of_kind(one.kind, fields, one.path) for one in own},
        "required": [one.path[len(place) :] for one in own if not one.is_optional],
        "additionalProperties": False,
    }


def _schema_of_kind(kind: str, fields: Sequence[Field], path: str) -> dict[str, Any]:
    if kind.endswith(" or null") and (inner := kind.removesuffix(" or null")).startswith(("list", "object")):
        return {"anyOf": [_schema_of_kind(inner, fields, path), {"type": "null"}]}
    if kind.startswith("list of "):
        return {"type": "array", "items": _schema_of_kind(kind.removeprefix("list of "), fields, f"{path}[]")}
    if kind.startswith("object, by name: "):
        values = _schema_of_kind(kind.removeprefix("object, by name: "), fields, f"{path}.*")
        return {"type": "object", "additionalProperties": values}
    if kind == "object":
        return schema_of(fields, f"{path}.")
    if kind == "any":
        return {}
    name = SIMPLE[kind.removesuffix(" or null")]
    return {"type": [name, "null"] if kind.endswith(" or null") else name}


def schemas() -> dict[str, Any]:
    """All schemas in one document."""
    definitions = {"error": schema_of(ERROR.fields)}
    for command, parts in COMMANDS.items():
        cases = [schema_of(part.fields) for part in parts]
        if cases:
            definitions[command] = cases[0] if len(cases) == 1 else {"anyOf": cases}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": definitions}


def page() -> str:
    lines = [HEAD, "## error\n", *_table(ERROR.fields), ""]
    for command, parts in COMMANDS.items():
        for part in parts:
            fields = [one for one in part.fields if not one.path.startswith("notes")]
            notes = Field("notes", "list of any", "see [error](#error)", is_optional=False)
            lines += [f"## ckpt {command}{f' {part.when}' if part.when else ''}\n", *_table([*fields, notes]), ""]
    return "\n".join(lines)


def _table(fields: Sequence[Field]) -> Iterator[str]:
    yield from ("| field | type | what |", "|---|---|---|")
    for one in fields:
        yield f"| `{one.path}` | {one.kind}{', not always there' if one.is_optional else ''} | {one.what} |"


def main() -> int:
    if "--check" in sys.argv[1:]:
        if (DOCS / "json.md").read_text("utf-8") == page():
            return 0
        print("docs/json.md is not what docs/json_fields.txt says: run `python docs/make_json.py`", file=sys.stderr)
        return 1
    (DOCS / "json.md").write_text(page(), "utf-8")
    (DOCS / "schemas.json").write_text(json.dumps(schemas(), indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
