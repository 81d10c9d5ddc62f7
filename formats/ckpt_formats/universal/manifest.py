"""The manifest of a universal checkpoint: what `docs/format.md` calls `manifest.json`.

Its first line holds the checksum of all bytes after it; it is written last, so
a folder with a whole manifest is a whole checkpoint. What we read is hostile:
every field is checked before it is believed.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, get_args

import xxhash

from ckpt_formats.base import Group, Origin, Role
from ckpt_formats.coded import ENTRY, MOST_ELEMENTS, chunk_count
from ckpt_formats.dtypes import DTYPES
from ckpt_formats.errors import Corrupt, Unsupported
from ckpt_formats.files import read_whole
from ckpt_formats.geometry import Shape
from ckpt_formats.safetensors_file import natural, parse_json_object
from ckpt_formats.typed_json import decode, encode
from ckpt_formats.values import Value, tensor_names

NAME = "manifest.json"
VERSION = 2
"""The highest that is read. Written is the lowest that says everything: 1, unless a state is coded."""
_MOST_BYTES = 4 << 30
_FILE = re.compile(r"(parameters|extras)/[a-z0-9][a-z0-9._-]{0,110}\.safetensors")
_FIRST_LINE = re.compile(rb'\{"checksum":"xxh3-128:([0-9a-f]{32})",\n')


@dataclass(frozen=True)
class State:
    """One tensor: what it is, and where its bytes are. `offset` is None where a codec needs none."""

    dtype: str
    shape: Shape
    values: str
    codec: Mapping[str, Any] | None = None
    base: str | None = None
    offset: int | None = None
    nbytes: int = 0
    stored: str | None = None
    chunk: Shape | None = None
    """Of a state whose bytes are coded: how many rows and columns, or elements, a chunk has."""


@dataclass(frozen=True)
class Entry:
    """One parameter: its file, and its states by name."""

    name: str
    role: Role
    file: str
    nbytes: int
    header: str
    states: Mapping[str, State]
    values: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """All of a universal checkpoint but its tensors' bytes."""

    origin: Origin
    entries: tuple[Entry, ...]
    groups: tuple[Group, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, Value] = field(default_factory=dict)
    written_by: str = ""

    @property
    def version(self) -> int:
        """Of the format: the lowest whose readers understand all of it."""
        return 2 if any(state.chunk is not None for entry in self.entries for state in entry.states.values()) else 1

    @property
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


def hash_text(digest: int) -> str:
    return f"xxh3-128:{digest:032x}"


def hash_number(text: str) -> int:
    return int(text.removeprefix("xxh3-128:"), 16)


def dump(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
    said = {
        "format": "ckpt-universal",
        "version": manifest.version,
        "written_by": manifest.written_by,
        "content": manifest.content,
        "origin": {
            "engine": manifest.origin.engine,
            "version": manifest.origin.version,
            "step": manifest.origin.step,
            "layout": encode(manifest.origin.layout),
        },
        "groups": [{"options": encode(g.options), "parameters": list(g.names)} for g in manifest.groups],
        "aliases": dict(manifest.aliases),
        "extras": encode(manifest.extras),
        "parameters": [entry_json(entry) for entry in manifest.entries],
    }
    body = json.dumps(said, indent=1, allow_nan=False).encode().removeprefix(b"{\n") + b"\n"
    return b'{"checksum":"%s",\n' % hash_text(xxhash.xxh3_128_intdigest(body)).encode() + body


def load(path: Path) -> Manifest:
    """Read and check a manifest. Raises `Corrupt`, or `Unsupported` for a version from the future."""
    raw = read_whole(path, _MOST_BYTES)
    first = _FIRST_LINE.match(raw)
    if first is None:
        raise Corrupt("not the manifest of a universal checkpoint", where=path)
    if xxhash.xxh3_128_hexdigest(raw[first.end() :]) != first[1].decode():
        raise Corrupt("the manifest's checksum does not fit its text: it was damaged or edited", where=path)
    said = parse_json_object(raw, path)
    check = _Checks(path)
    if said.get("format") != "ckpt-universal":
        raise Corrupt("not the manifest of a universal checkpoint", where=path)
    if not natural(said.get("version")) or not 1 <= said["version"] <= VERSION:
        raise Unsupported(
            f"format version {said.get('version')!r:.30}; this program reads 1 to {VERSION}",
            where=path,
            hint="Upgrade ckpt.",
        )
    origin = check.mapping(said, "origin")
    step = origin.get("step")
    check.true(step is None or natural(step), "origin.step")
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
    )
    if said["version"] < manifest.version:
        raise Unsupported("it has coded states, which version 1 of the format has not", where=path)
    names = {entry.name for entry in manifest.entries}
    extras = {entry.name for entry in manifest.entries if entry.role == "extra"}
    lost = sorted(name for name in tensor_names(manifest.extras) if name not in extras)
    check.true(not lost, f"extras: they name tensor {lost[:1]}, which is not there")
    check.true(len(names) == len(manifest.entries), "parameters: a name twice")
    check.true(not names & aliases.keys(), "aliases: a name of a parameter")
    check.true(len({entry.file for entry in manifest.entries}) == len(manifest.entries), "parameters: a file twice")
    check.true(said.get("content") == manifest.content, "content: the id does not fit what is listed")
    return manifest


def entry_json(entry: Entry) -> dict[str, Any]:
    """An entry as JSON: its form in the manifest and in receipts."""
    states = {}
    for name, state in entry.states.items():
        said: dict[str, Any] = {"dtype": state.dtype, "shape": list(state.shape), "codec": state.codec}
        if state.base is not None:
            said["base"] = state.base
        if state.offset is not None:
            said |= {"offset": state.offset, "nbytes": state.nbytes, "stored": state.stored}
        if state.chunk is not None:
            said["chunk"] = list(state.chunk)
        states[name] = said | {"values": state.values}
    return {
        "name": entry.name,
        "role": entry.role,
        "file": entry.file,
        "nbytes": entry.nbytes,
        "header": entry.header,
        "states": states,
        "values": encode(entry.values),
    }


def entry_of(said: Any, path: Path) -> Entry:
    """Read an entry back. Raises `Corrupt`."""
    check = _Checks(path)
    name, role, file = (check.text(said, key) for key in ("name", "role", "file"))
    check.true(role in get_args(Role), f"role {role!r}")
    check.true(_FILE.fullmatch(file) is not None, f"file name {file!r:.100}")
    states = {str(key): _state(value, check) for key, value in check.mapping(said, "states").items()}
    check.true(bool(states), f"`{name}` has no state")
    nbytes = check.natural(said, "nbytes")
    for key, state in states.items():
        if state.base is not None:
            base = states.get(state.base)
            fits = base is not None and base.base is None and base.shape == state.shape and state.codec is not None
            check.true(fits, f"`{name}`: the base of {key!r} is {state.base!r}")
    stored = sorted((state.offset, state.nbytes) for state in states.values() if state.offset is not None)
    ends = [stored[0][0], *(offset + length for offset, length in stored)]
    check.true(
        [*(offset for offset, _ in stored), nbytes] == ends, f"`{name}`: its states are not its file, one by one"
    )
    values = check.values(said, "values")
    return Entry(name, _ROLES[role], file, nbytes, check.hash(said, "header"), states, values)


_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}


def _state(said: Any, check: "_Checks") -> State:
    shape = tuple(check.sequence(said, "shape"))
    check.true(len(shape) <= 64 and all(map(natural, shape)), f"shape {shape!r:.80}")
    dtype = check.text(said, "dtype")
    check.true(dtype in DTYPES, f"element type {dtype!r}")
    codec, base = said.get("codec"), said.get("base")
    check.true(codec is None or (isinstance(codec, dict) and isinstance(codec.get("name"), str)), "codec")
    check.true(base is None or isinstance(base, str), "base")
    values = check.hash(said, "values")
    if "offset" not in said:
        check.true(codec is not None and base is not None, "a state without bytes needs a codec and a base")
        return State(dtype, shape, values, codec, base)
    nbytes = check.natural(said, "nbytes")
    offset, stored = check.natural(said, "offset"), check.hash(said, "stored")
    if codec is None:
        check.true(nbytes == prod(shape) * DTYPES[dtype].itemsize, f"{nbytes} bytes for shape {list(shape)} of {dtype}")
        return State(dtype, shape, values, codec, base, offset, nbytes, stored)
    if "chunk" not in said:
        raise Unsupported(f"a state is stored with the codec {codec['name']!r:.40}, without chunks", where=check.path)
    return State(dtype, shape, values, codec, base, offset, nbytes, stored, _chunk(said, shape, nbytes, check))


def _chunk(said: Any, shape: Shape, nbytes: int, check: "_Checks") -> Shape:
    chunk = tuple(check.sequence(said, "chunk"))
    sane = len(chunk) in (1, 2) and all(natural(n) and n for n in chunk) and prod(chunk) <= MOST_ELEMENTS
    check.true(sane, f"chunk {chunk!r:.80}")
    check.true(prod(shape) % chunk[-1] == 0 or len(chunk) == 1, f"chunk {list(chunk)} for shape {list(shape)}")
    count = chunk_count(shape, chunk)
    check.true(count * ENTRY.itemsize <= nbytes, f"{nbytes} bytes for {count} chunks")
    return chunk


@dataclass(frozen=True)
class _Checks:
    """Typed look-ups in JSON; each says what is wrong, and in which file."""

    path: Path

    def true(self, fact: bool, what: str) -> None:
        if not fact:
            raise Corrupt(f"the manifest is not valid: {what}", where=self.path)

    def mapping(self, said: Any, key: str) -> dict[str, Any]:
        value = self._get(said, key)
        self.true(isinstance(value, dict), f"{key} is not an object")
        return value  # type: ignore[no-any-return]

    def sequence(self, said: Any, key: str) -> list[Any]:
        value = self._get(said, key)
        self.true(isinstance(value, list), f"{key} is not a list")
        return value  # type: ignore[no-any-return]

    def text(self, said: Any, key: str) -> str:
        value = self._get(said, key)
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
        value = self._get(said, key)
        self.true(natural(value), f"{key} is not a whole number from 0")
        return value  # type: ignore[no-any-return]

    def hash(self, said: Any, key: str) -> str:
        value = self.text(said, key)
        self.true(re.fullmatch(r"xxh3-128:[0-9a-f]{32}", value) is not None, f"{key} is not a checksum")
        return value

    def _get(self, said: Any, key: str) -> Any:
        self.true(isinstance(said, dict) and key in said, f"{key} is missing")
        return said[key]
