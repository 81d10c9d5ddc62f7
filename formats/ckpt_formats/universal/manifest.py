"""The manifest of a universal checkpoint: what `docs/format.md` calls `manifest.json`.

It is written last, so a folder with a complete manifest is a complete checkpoint.
A manifest may be hostile: every field is checked before it is used.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ckpt_formats.containers import sealed_json
from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.typed_json import decode, encode
from ckpt_formats.core.checkpoint import Group, Origin, OriginalForm
from ckpt_formats.core.errors import CkptError, Corrupt, Unsupported
from ckpt_formats.core.values import Value, tensor_names
from ckpt_formats.universal.earlier_forms import earlier_form
from ckpt_formats.universal.entry import ParameterEntry, entry_json, entry_of

NAME = "manifest.json"
VERSION = 1
_UNRELEASED_VERSIONS = (2, 3)
"""Numbers that unreleased versions of ckpt wrote. No later version of the format has them."""
_MAX_BYTES = 4 << 30
_CONTENT = re.compile(r"blake2b-256:[0-9a-f]{64}")
_MAX_PATH = 4096


@dataclass(frozen=True)
class Parent:
    """The checkpoint that deltas are against: its content id, and its path relative to the folder of the delta."""

    content: str
    path: str


@dataclass(frozen=True)
class Manifest:
    """Everything of a universal checkpoint except the bytes of its tensors."""

    origin: Origin
    entries: tuple[ParameterEntry, ...]
    groups: tuple[Group, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, Value] = field(default_factory=dict)
    written_by: str = ""
    parent: Parent | None = None
    original: OriginalForm | None = None

    @cached_property
    def content(self) -> str:
        """The content id: equal for equal names, types, shapes, values and extras, however they are stored."""
        fields = {
            "parameters": sorted(
                [
                    e.name,
                    e.role,
                    sorted([s, t.dtype, list(t.shape), t.values] for s, t in e.states.items()),
                    encode(e.values),
                ]
                for e in self.entries
            ),
            "groups": [{"options": encode(g.options), "parameters": list(g.names)} for g in self.groups],
            "aliases": dict(self.aliases),
            "extras": encode(self.extras),
        }
        return "blake2b-256:" + hashlib.blake2b(canonical(fields), digest_size=32).hexdigest()


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values have equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def dump(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
    parent, original = manifest.parent, manifest.original
    fields = {
        "format": "ckpt-universal",
        "version": VERSION,
        "written_by": manifest.written_by,
        "content": manifest.content,
        **({} if parent is None else {"parent": {"content": parent.content, "path": parent.path}}),
        "origin": {
            "engine": manifest.origin.engine,
            "version": manifest.origin.version,
            "step": manifest.origin.step,
            "layout": encode(manifest.origin.layout),
        },
        **({} if original is None else {"original": _original_json(original)}),
        "groups": [{"options": encode(g.options), "parameters": list(g.names)} for g in manifest.groups],
        "aliases": dict(manifest.aliases),
        "extras": encode(manifest.extras),
        "parameters": [entry_json(entry) for entry in manifest.entries],
    }
    return sealed_json.dump(fields)


def load(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises `Corrupt`, or `Unsupported` for an earlier form or a version that this program does not know.
    """
    fields = sealed_json.load(path, _MAX_BYTES, "the manifest of a universal checkpoint")
    check = FieldReader(path)
    if fields.get("format") != "ckpt-universal":
        raise Corrupt("not the manifest of a universal checkpoint", where=path)
    version = fields.get("version")
    if version in _UNRELEASED_VERSIONS or "saved_as" in fields:
        raise earlier_form(path)
    if not is_natural(version) or version != VERSION:
        raise Unsupported(
            f"format version {version!r:.30}; this program reads version {VERSION}", where=path, hint="Upgrade ckpt."
        )
    origin = check.mapping(fields, "origin")
    step = origin.get("step")
    check.true(step is None or is_natural(step), "origin.step")
    check.true(origin.get("version") is None or isinstance(origin["version"], str), "origin.version")
    aliases = check.mapping(fields, "aliases")
    manifest = Manifest(
        Origin(check.text(origin, "engine"), origin.get("version"), step, check.values(origin, "layout")),
        tuple(entry_of(entry, path) for entry in check.sequence(fields, "parameters")),
        tuple(
            Group(check.values(group, "options"), check.texts(check.sequence(group, "parameters"), "parameters"))
            for group in check.sequence(fields, "groups")
        ),
        dict(zip(aliases, check.texts(aliases.values(), "aliases"), strict=True)),
        check.values(fields, "extras"),
        check.text(fields, "written_by"),
        _parent(fields, check),
        _original(fields, check),
    )
    needs_parent = any(entry.delta is not None and entry.delta.parent_states for entry in manifest.entries)
    check.true(not needs_parent or manifest.parent is not None, "parent: there are deltas, but no parent is named")
    names = {entry.name for entry in manifest.entries}
    extras = {entry.name for entry in manifest.entries if entry.role == "extra"}
    missing = sorted(name for name in tensor_names(manifest.extras) if name not in extras)
    check.true(not missing, f"extras: they name tensor {missing[:1]}, which does not exist")
    check.true(len(names) == len(manifest.entries), "parameters: a name twice")
    check.true(not names & aliases.keys(), "aliases: a name of a parameter")
    check.true(len({entry.file for entry in manifest.entries}) == len(manifest.entries), "parameters: a file twice")
    check.true(fields.get("content") == manifest.content, "content: the id does not fit what is listed")
    return manifest


def _original_json(original: OriginalForm) -> dict[str, Any]:
    fields: dict[str, Any] = {"format": original.format}
    if original.file is not None:
        fields["file"] = original.file
    if original.form is not None:
        fields["form"] = None
        with suppress(CkptError):  # without a form that is too large or too deep, the file cannot be restored as it was
            fields["form"] = encode(original.form())
    return fields


def _original(fields: Any, check: FieldReader) -> OriginalForm | None:
    if fields.get("original") is None:
        return None
    original = check.mapping(fields, "original")
    file = original.get("file")
    is_valid = file is None or (isinstance(file, str) and _is_file_name(file))
    check.true(is_valid, "original.file is not the name of a file")
    form = partial(decode, original["form"], check.path) if "form" in original else None
    return OriginalForm(check.text(original, "format"), file, form)


def _is_file_name(text: str) -> bool:
    return (
        0 < len(text.encode("utf-8", "surrogatepass")) <= 255
        and not {"/", "\0"} & set(text)
        and text not in (".", "..")
    )


def _parent(fields: Any, check: FieldReader) -> Parent | None:
    if fields.get("parent") is None:
        return None
    parent = check.mapping(fields, "parent")
    content, path = check.text(parent, "content"), check.text(parent, "path")
    check.true(_CONTENT.fullmatch(content) is not None, "parent.content is not a content id")
    is_relative = 0 < len(path) <= _MAX_PATH and not path.startswith("/") and "\0" not in path
    check.true(is_relative, f"parent.path {path!r:.100} is not relative to the folder")
    return Parent(content, path)
