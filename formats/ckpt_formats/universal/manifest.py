"""The manifest of a universal checkpoint: what `docs/format.md` calls `manifest.json`.

It is written last, so a folder with a whole manifest is a whole checkpoint.
What we read is hostile: every field is checked before it is believed.
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
from ckpt_formats.universal.entry import ParameterEntry, entry_json, entry_of

NAME = "manifest.json"
VERSION = 3
"""The highest that is read. Written is the lowest that says everything."""
_MOST_BYTES = 4 << 30
_CONTENT = re.compile(r"blake2b-256:[0-9a-f]{64}")
_MOST_PATH = 4096


@dataclass(frozen=True)
class Parent:
    """The checkpoint that deltas are against: its content id, and where it was, seen from the folder of the delta."""

    content: str
    path: str


@dataclass(frozen=True)
class Manifest:
    """All of a universal checkpoint but its tensors' bytes."""

    origin: Origin
    entries: tuple[ParameterEntry, ...]
    groups: tuple[Group, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, Value] = field(default_factory=dict)
    written_by: str = ""
    parent: Parent | None = None
    original: OriginalForm | None = None

    @property
    def version(self) -> int:
        """Of the format: the lowest whose readers understand all of it."""
        return max((entry.version for entry in self.entries), default=1)

    @cached_property
    def content(self) -> str:
        """The content id: equal for equal names, types, shapes, values and extras, however they are stored."""
        said = {
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
        return "blake2b-256:" + hashlib.blake2b(canonical(said), digest_size=32).hexdigest()


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: the same text for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def dump(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
    said = {
        "format": "ckpt-universal",
        "version": manifest.version,
        "written_by": manifest.written_by,
        "content": manifest.content,
        **(
            {}
            if manifest.parent is None
            else {"parent": {"content": manifest.parent.content, "path": manifest.parent.path}}
        ),
        "origin": {
            "engine": manifest.origin.engine,
            "version": manifest.origin.version,
            "step": manifest.origin.step,
            "layout": encode(manifest.origin.layout),
        },
        **({} if manifest.original is None else {"saved_as": _saved_as_json(manifest.original)}),
        "groups": [{"options": encode(g.options), "parameters": list(g.names)} for g in manifest.groups],
        "aliases": dict(manifest.aliases),
        "extras": encode(manifest.extras),
        "parameters": [entry_json(entry) for entry in manifest.entries],
    }
    return sealed_json.dump(said)


def load(path: Path) -> Manifest:
    """Read and check a manifest. Raises `Corrupt`, or `Unsupported` for a version from the future."""
    said = sealed_json.load(path, _MOST_BYTES, "the manifest of a universal checkpoint")
    check = FieldReader(path)
    if said.get("format") != "ckpt-universal":
        raise Corrupt("not the manifest of a universal checkpoint", where=path)
    if not is_natural(said.get("version")) or not 1 <= said["version"] <= VERSION:
        raise Unsupported(
            f"format version {said.get('version')!r:.30}; this program reads 1 to {VERSION}",
            where=path,
            hint="Upgrade ckpt.",
        )
    origin = check.mapping(said, "origin")
    step = origin.get("step")
    check.true(step is None or is_natural(step), "origin.step")
    check.true(origin.get("version") is None or isinstance(origin["version"], str), "origin.version")
    aliases = check.mapping(said, "aliases")
    manifest = Manifest(
        Origin(check.text(origin, "engine"), origin.get("version"), step, check.values(origin, "layout")),
        tuple(entry_of(entry, path) for entry in check.sequence(said, "parameters")),
        tuple(
            Group(check.values(group, "options"), check.texts(check.sequence(group, "parameters"), "parameters"))
            for group in check.sequence(said, "groups")
        ),
        dict(zip(aliases, check.texts(aliases.values(), "aliases"), strict=True)),
        check.values(said, "extras"),
        check.text(said, "written_by"),
        _parent(said, check),
        _saved_as(said, check),
    )
    if said["version"] < manifest.version:
        what = "deltas" if manifest.version == 3 else "coded states"
        raise Unsupported(f"it has {what}, which version {said['version']} of the format has not", where=path)
    against = any(entry.delta is not None and entry.delta.before for entry in manifest.entries)
    check.true(not against or manifest.parent is not None, "parent: deltas are against one, and none is named")
    names = {entry.name for entry in manifest.entries}
    extras = {entry.name for entry in manifest.entries if entry.role == "extra"}
    lost = sorted(name for name in tensor_names(manifest.extras) if name not in extras)
    check.true(not lost, f"extras: they name tensor {lost[:1]}, which is not there")
    check.true(len(names) == len(manifest.entries), "parameters: a name twice")
    check.true(not names & aliases.keys(), "aliases: a name of a parameter")
    check.true(len({entry.file for entry in manifest.entries}) == len(manifest.entries), "parameters: a file twice")
    check.true(said.get("content") == manifest.content, "content: the id does not fit what is listed")
    return manifest


def _saved_as_json(original: OriginalForm) -> dict[str, Any]:
    said: dict[str, Any] = {"format": original.format}
    if original.file is not None:
        said["file"] = original.file
    if original.form is not None:
        said["form"] = None
        with suppress(CkptError):  # one that is too large or too odd is left out, and so is the way back
            said["form"] = encode(original.form())
    return said


def _saved_as(said: Any, check: FieldReader) -> OriginalForm | None:
    if said.get("saved_as") is None:
        return None
    original = check.mapping(said, "saved_as")
    file = original.get("file")
    check.true(
        file is None or (isinstance(file, str) and _is_file_name(file)), "saved_as.file is not the name of a file"
    )
    form = partial(decode, original["form"], check.path) if "form" in original else None
    return OriginalForm(check.text(original, "format"), file, form)


def _is_file_name(text: str) -> bool:
    return (
        0 < len(text.encode("utf-8", "surrogatepass")) <= 255
        and not {"/", "\0"} & set(text)
        and text not in (".", "..")
    )


def _parent(said: Any, check: FieldReader) -> Parent | None:
    if said.get("parent") is None:
        return None
    parent = check.mapping(said, "parent")
    content, path = check.text(parent, "content"), check.text(parent, "path")
    check.true(_CONTENT.fullmatch(content) is not None, "parent.content is not a content id")
    sane = 0 < len(path) <= _MOST_PATH and not path.startswith("/") and "\0" not in path
    check.true(sane, f"parent.path {path!r:.100} is not relative to the folder")
    return Parent(content, path)
