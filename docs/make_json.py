"""Writes docs/json.md and docs/schemas.json from docs/json_fields.py; with --check, fails if they differ from it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
from json_fields import COMMANDS, ERROR, NOTES, SIMPLE, Map, Part  # noqa: E402

HEAD = """# JSON

Made from `docs/json_fields.py` by `python docs/make_json.py`; do not edit. The JSON Schemas are in
[schemas.json](schemas.json), under `$defs`: one for each command, and `error`. Tests run every command and compare.

With `--json`, every command prints **exactly one object** on stdout, also if it fails: then it is the object under
[error](#error), and the exit code is its `code`. Only `verify` prints its findings instead of an error if a checkpoint
is damaged. Bytes are `nbytes`, and times are seconds. Fields may be added in later versions; a field never changes its
meaning. "or null" means that the value may be missing.

`ckpt shadow` without `--once` and `ckpt serve` run until they are stopped. They print an object on a line of its own
for each event: `event` says which.
"""


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a type."""
    if isinstance(kind, list):
        return {"type": "array", "items": schema_of(kind[0])}
    if isinstance(kind, dict):
        fields = {name.removesuffix("?"): schema_of(of) for name, (of, _) in kind.items()}
        required = [name for name in kind if not name.endswith("?")]
        return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
    if isinstance(kind, Map):
        return {"type": "object", "additionalProperties": schema_of(kind.values)}
    if kind == "any":
        return {}
    name = SIMPLE[kind.removesuffix("?")]
    return {"type": [name, "null"] if kind.endswith("?") else name}


def schemas() -> dict[str, Any]:
    """All schemas in one document."""
    made: dict[str, Any] = {"error": schema_of(ERROR)}
    for command, parts in COMMANDS.items():
        cases = [schema_of({**part.fields, **NOTES}) for part in parts]
        if cases:
            made[command] = cases[0] if len(cases) == 1 else {"anyOf": cases}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": made}


def page() -> str:
    lines = [HEAD, "## error\n", *_table(ERROR), ""]
    for command, parts in COMMANDS.items():
        for part in parts:
            lines += [f"## ckpt {command}{f' {part.when}' if part.when else ''}\n", *_table(_with_notes(part)), ""]
    return "\n".join(lines)


def _with_notes(part: Part) -> dict[str, Any]:
    return {**part.fields, "notes": (["any"], "see [error](#error)")}


def _table(fields: dict[str, Any]) -> Iterator[str]:
    yield from ("| field | type | what |", "|---|---|---|")
    yield from _rows(fields, "")


def _rows(fields: dict[str, Any], path: str) -> Iterator[str]:
    for name, (kind, what) in fields.items():
        optional = ", not always there" if name.endswith("?") else ""
        yield f"| `{path}{name.removesuffix('?')}` | {_named(kind)}{optional} | {what} |"
        inner, place = kind, f"{path}{name.removesuffix('?')}"
        while isinstance(inner, (list, Map)):
            place += "[]" if isinstance(inner, list) else ".*"
            inner = inner[0] if isinstance(inner, list) else inner.values
        if isinstance(inner, dict):
            yield from _rows(inner, f"{place}.")


def _named(kind: Any) -> str:
    if isinstance(kind, list):
        return f"list of {_named(kind[0])}"
    if isinstance(kind, Map):
        return f"object, by name: {_named(kind.values)}"
    if isinstance(kind, dict):
        return "object"
    return f"{kind.removesuffix('?')} or null" if kind.endswith("?") else str(kind)


def main() -> int:
    made = {"json.md": page(), "schemas.json": json.dumps(schemas(), indent=1) + "\n"}
    if "--check" not in sys.argv[1:]:
        for name, text in made.items():
            (DOCS / name).write_text(text, "utf-8")
        return 0
    if all((DOCS / name).exists() and (DOCS / name).read_text("utf-8") == text for name, text in made.items()):
        return 0
    print("docs/json.md is not what docs/json_fields.py says: run `python docs/make_json.py`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
