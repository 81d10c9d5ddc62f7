"""The manifest of a universal checkpoint: what `docs/format.md` calls `manifest.json`, with the index beside it.

It is written last, so a folder with a complete manifest is a complete checkpoint.
A manifest may be hostile: every field is checked before it is used.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any

import xxhash

from ckpt_formats.containers import sealed_json
from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.containers.sealed_json import hash_number, hash_text
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.arguments import Admits
from ckpt_formats.core.checkpoint import Group, Origin, OriginalForm
from ckpt_formats.core.claims import MAX_MANIFEST, MAX_PACKS, MAX_PATH
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.values import Value, is_natural, tensor_names
from ckpt_formats.universal import columns
from ckpt_formats.universal.boxes import table as boxes
from ckpt_formats.universal.boxes.check_table import check_boxes
from ckpt_formats.universal.boxes.table import BoxTable
from ckpt_formats.universal.check_index import Owner, Pack
from ckpt_formats.universal.check_index import check as check_index
from ckpt_formats.universal.content import content_id
from ckpt_formats.universal.index import ROLES, TYPES, Index
from ckpt_formats.universal.original import NAME as ORIGINAL
from ckpt_formats.universal.original import load as load_original
from ckpt_formats.universal.single_file import FileRange, is_single, last_entries
from ckpt_formats.universal.tables import Tables

NAME = "manifest.json"
INDEX = "index.safetensors"
VERSION = 1
OF_BOXES = 2
"""The version of a checkpoint of boxes."""
_KIND = "the manifest of a universal checkpoint"
_CONTENT = re.compile(r"blake2b-256:[0-9a-f]{64}")
ContentId = Annotated[str, Admits("a content id, blake2b-256: and 64 hexadecimal digits", _CONTENT.fullmatch)]
"""What says which values a checkpoint has, however they are stored (`content`)."""


@dataclass(frozen=True)
class Parent:
    """The checkpoint that deltas are against: its content id, and its path relative to the folder of the delta."""

    content: str
    path: str


@dataclass(frozen=True)
class Manifest:
    """Everything of a universal checkpoint except the bytes of its tensors."""

    origin: Origin
    entries: Index
    packs: tuple[Pack, ...] = ()
    groups: tuple[Group, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, Value] = field(default_factory=dict)
    written_by: str = ""
    parent: Parent | None = None
    original: OriginalForm | None = None
    boxes: BoxTable | None = None
    """Of a checkpoint of boxes, whose `entries` are boxes: which elements of which parameter each has."""

    @cached_property
    def content(self) -> str:
        """The content id: equal for equal names, types, shapes, values and extras, however they are stored. Of boxes,
        only for equal boxes."""
        return content_id(self.entries, self.groups, self.aliases, self.extras, self.boxes)

    @property
    def numbers(self) -> Mapping[str, int]:
        """The number of each parameter by its name."""
        return self.entries.numbers if self.boxes is None else self.boxes.numbers

    def with_deltas(self) -> list[str]:
        """The names of the parameters with a delta that needs a parent."""
        needed = self.entries.with_deltas()
        if self.boxes is None:
            return needed
        owners = (self.boxes.owners[self.entries.numbers[name]] for name in needed)
        return [self.boxes.names[number] for number in dict.fromkeys(owners)]

    def first_row(self, name: str) -> int:
        """The row of `entries` that has a parameter, or its first box."""
        return self.numbers[name] if self.boxes is None else self.boxes.rows(self.numbers[name])[0]

    @property
    def own_packs(self) -> tuple[Pack, ...]:
        """The packs in the folder of the checkpoint. They come before those of other members."""
        return tuple(pack for pack in self.packs if pack.owner is None)

    @property
    def nbytes(self) -> int:
        """Bytes of the packs in the folder of the checkpoint."""
        return sum(pack.nbytes for pack in self.own_packs)

    def files(self, checkpoint: Path) -> "PackFiles":
        """The files of the packs of the checkpoint at a path."""
        return PackFiles(checkpoint, self.packs)


@dataclass(frozen=True)
class PackFiles:
    """Where the packs of a checkpoint are: in its folder, or in those of earlier members next to it."""

    checkpoint: Path
    """A folder, or a single file with one pack."""
    packs: tuple[Pack, ...]

    def path(self, number: int) -> Path:
        """The file of a pack."""
        owner = self.packs[number].owner
        if owner is None:
            return pack_path(self.checkpoint, number)
        return self._siblings / owner.folder / pack_file(owner.number)

    @cached_property
    def _siblings(self) -> Path:
        """The folder in which the checkpoint's own is. If that is reached by a link, the other members may not be
        next to the link."""
        folder = self.checkpoint
        if folder.is_symlink() or folder.name in ("", ".."):
            folder = folder.resolve()
        return folder.parent


def pack_file(number: int) -> str:
    """The file of a pack, relative to the folder of the checkpoint."""
    return f"packs/{number:05d}.safetensors"


def pack_path(checkpoint: Path, number: int) -> Path:
    """The file of a pack of the checkpoint at a path, which is a folder, or a single file with one pack."""
    return _pack_path(checkpoint, number, getattr(checkpoint, "store", None))


@lru_cache(maxsize=64)  # called once for each state
def _pack_path(checkpoint: Path, number: int, store: object) -> Path:
    """`store`: with its listing. Of an equal path that was opened earlier, the listing may not be true any more."""
    return checkpoint if is_single(checkpoint) else checkpoint / pack_file(number)


def manifest_path(checkpoint: Path) -> Path:
    """The file that has the manifest of the checkpoint at a path."""
    return checkpoint if is_single(checkpoint) else checkpoint / NAME


def dump(manifest: Manifest, index: bytes, original: Mapping[str, Any] | None) -> bytes:
    """The bytes of `manifest.json`. `index`: those of the file of the index. `original`: this field."""
    parent = manifest.parent
    fields = {
        "format": "ckpt-universal",
        "version": VERSION if manifest.boxes is None else OF_BOXES,
        "written_by": manifest.written_by,
        "content": manifest.content,
        **({} if parent is None else {"parent": {"content": parent.content, "path": parent.path}}),
        "origin": {
            "engine": manifest.origin.engine,
            "version": manifest.origin.version,
            "step": manifest.origin.step,
            "layout": encode(manifest.origin.layout),
        },
        **({} if original is None else {"original": original}),
        "index": {"nbytes": len(index), "checksum": hash_text(xxhash.xxh3_128_intdigest(index))},
        "packs": [_pack_fields(pack) for pack in manifest.packs],
        **manifest.entries.tables.to_json(),
        "groups": [
            {"options": encode(g.options), "parameters": runs([manifest.numbers[name] for name in g.names])}
            for g in manifest.groups
        ],
        "aliases": dict(manifest.aliases),
        "extras": encode(manifest.extras),
    }
    return sealed_json.dump(fields)


def stated_content(path: Path) -> str | None:
    """The content id that a manifest in a folder states; None if it does not fit its checksum, or states none."""
    try:
        content = sealed_json.load(path, MAX_MANIFEST, _KIND).get("content")
    except CkptError:
        return None
    return content if isinstance(content, str) else None


def load(path: Path) -> Manifest:
    """Read and check a manifest, and the index beside it: in its folder, or in the same file.

    Raises `CorruptError`, `IncompleteError` if the index is missing, or `UnsupportedError` for a version that this
    program does not know.
    """
    if is_single(path):
        last = last_entries(path)
        index, content = last.read_index_and_manifest()
        return _manifest(sealed_json.parse(content, path, _KIND), index, last.begin, last.original, path)
    original = FileRange(path.parent / ORIGINAL, 0, -1)
    return _manifest(sealed_json.load(path, MAX_MANIFEST, _KIND), None, None, original, path)


def _manifest(
    fields: dict[str, Any], index: bytes | None, begin: int | None, original_at: FileRange | None, path: Path
) -> Manifest:
    """The manifest of these fields.

    `index`: its bytes; None if it is in a file of its own. `begin`: where the states end in a single file. The length
    -1 of the original form is that of a file of its own, which the fields state.
    """
    check = FieldReader(path)
    if fields.get("format") != "ckpt-universal":
        raise CorruptError("not the manifest of a universal checkpoint", where=path)
    version = fields.get("version")
    if not is_natural(version) or version not in (VERSION, OF_BOXES):
        known = f"this program reads versions {VERSION} and {OF_BOXES}"
        raise UnsupportedError(f"format version {version!r:.30}; {known}", where=path, hint="Upgrade ckpt.")
    origin = check.mapping(fields, "origin")
    step = origin.get("step")
    check.true(step is None or is_natural(step), "origin.step")
    check.true(origin.get("version") is None or isinstance(origin["version"], str), "origin.version")
    aliases = check.mapping(fields, "aliases")
    packs = _packs(fields, path, check)
    if begin is not None:
        is_own = len(packs) == 1 and packs[0].owner is None and packs[0].nbytes == begin
        check.true(is_own, "packs: they are not the states of this file")
        check.true(fields.get("parent") is None, "parent: a single file has none")
        check.true(version == VERSION, "version: a single file has no boxes")
    types = TYPES if version == VERSION else {**TYPES, **boxes.TYPES}
    stored = _columns(index, check.mapping(fields, "index"), types, check)
    entries = Index({name: stored[name] for name in TYPES}, Tables.of_json(fields, check))
    check_index(entries, packs, check.path if index is not None else check.path.parent / INDEX)
    table = _boxes(stored, entries, check) if version == OF_BOXES else None
    names = entries.names if table is None else table.names
    manifest = Manifest(
        Origin(check.text(origin, "engine"), origin.get("version"), step, check.values(origin, "layout")),
        entries,
        packs,
        tuple(
            Group(check.values(group, "options"), _names(check.sequence(group, "parameters"), names, check))
            for group in check.sequence(fields, "groups")
        ),
        dict(zip(aliases, check.texts(aliases.values(), "aliases"), strict=True)),
        check.values(fields, "extras"),
        check.text(fields, "written_by"),
        _parent(fields, check),
        load_original(fields, check, original_at),
        table,
    )
    needs_parent = bool(manifest.with_deltas())
    check.true(not needs_parent or manifest.parent is not None, "parent: there are deltas, but no parent is named")
    role = ROLES.index("extra")
    missing = sorted(
        name
        for name in tensor_names(
            [manifest.extras, *(group.options for group in manifest.groups), *entries.tables.values]
        )
        if name not in manifest.numbers or entries.columns["parameter.role"][manifest.first_row(name)] != role
    )
    check.true(not missing, f"extras, options or values: they name tensor {missing[:1]}, which does not exist")
    named = next(tensor_names([manifest.origin.layout]), None)
    check.true(named is None, f"the layout names tensor {named!r:.60}, and no layout holds tensors")
    check.true(not manifest.numbers.keys() & aliases.keys(), "aliases: a name of a parameter")
    have_owners = version == VERSION or set(manifest.aliases.values()) <= manifest.numbers.keys()
    check.true(have_owners, "aliases: one of no parameter")
    check.true(fields.get("content") == manifest.content, "content: the id does not fit what is listed")
    return manifest


def runs(numbers: list[int]) -> list[list[int]]:
    """Numbers as runs: the first number of each, and its length.

    >>> runs([4, 5, 6, 2])
    [[4, 3], [2, 1]]
    """
    result: list[list[int]] = []
    for number in numbers:
        if result and number == sum(result[-1]):
            result[-1][1] += 1
        else:
            result.append([number, 1])
    return result


def _names(items: list[Any], known: Sequence[str], check: FieldReader) -> tuple[str, ...]:
    """The names of parameters whose numbers are given as runs."""
    count, names = 0, list[str]()
    for item in items:
        valid = isinstance(item, list) and len(item) == 2 and all(map(is_natural, item))
        check.true(valid and item[1] > 0 and sum(item) <= len(known), "groups: numbers of parameters")
        count += item[1]
        check.true(count <= len(known), "groups: a parameter twice")
        names += known[item[0] : sum(item)]
    return tuple(names)


def _packs(fields: Any, path: Path, check: FieldReader) -> tuple[Pack, ...]:
    packs = tuple(_pack(item, check) for item in check.sequence(fields, "packs"))
    owners = [pack.owner for pack in packs if pack.owner is not None]
    own = len(packs) - len(owners)
    check.true(all(pack.owner is None for pack in packs[:own]), "packs: one of another member before an own one")
    check.true(len(set(owners)) == len(owners), "packs: one of another member twice")
    own_step = _step_of(path.parent.resolve().name) if owners else None
    later = [one.folder for one in owners if own_step is not None and (_step_of(one.folder) or 0) >= own_step]
    check.true(not later, f"packs: {later[:1]} is not an earlier member")
    return packs


def _step_of(folder: str) -> int | None:
    """The step in the name of a member's folder; None for another name."""
    from ckpt_formats.universal.chain.chain_file import step_of  # only chains share packs

    return step_of(folder)


def _pack(item: Any, check: FieldReader) -> Pack:
    valid = isinstance(item, list) and len(item) in (3, 5) and all(map(is_natural, item[:2])) and 8 < item[1] <= item[0]
    check.true(valid, "packs: an item")
    header = check.hash({"header": item[2]}, "header")
    if len(item) == 3:
        return Pack(item[0], item[1], header)
    folder, number = item[3:]
    check.true(
        isinstance(folder, str) and _step_of(folder) is not None, f"packs: {folder!r:.60} is not a member of a chain"
    )
    check.true(is_natural(number) and number < MAX_PACKS, "packs: the number of a pack of another member")
    return Pack(item[0], item[1], header, Owner(folder, number))


def _pack_fields(pack: Pack) -> list[Any]:
    own = [pack.nbytes, pack.header_nbytes, pack.header]
    return own if pack.owner is None else [*own, pack.owner.folder, pack.owner.number]


def _columns(data: bytes | None, stated: Any, types: Mapping[str, str], check: FieldReader) -> dict[str, Array]:
    """The columns of an index, which fits its checksum. `data`: its bytes; None if it is in a file of its own."""
    path = check.path.parent / INDEX if data is None else check.path
    nbytes, checksum = check.natural(stated, "nbytes"), check.hash(stated, "checksum")
    data = _index_file(path, nbytes) if data is None else data
    if len(data) != nbytes or xxhash.xxh3_128_intdigest(data) != hash_number(checksum):
        raise CorruptError("the index does not fit its checksum: it was damaged or edited", where=path)
    return columns.load(data, types, path)


def _boxes(stored: Mapping[str, Array], entries: Index, check: FieldReader) -> BoxTable:
    table = BoxTable({name: stored[name] for name in boxes.TYPES})
    check_boxes(table, entries, check.path.parent / INDEX)
    return table


def _index_file(path: Path, nbytes: int) -> bytes:
    if not path.exists():
        raise IncompleteError("the index of the checkpoint is missing", where=path)
    try:
        return read_whole(path, min(nbytes, MAX_MANIFEST))
    except UnsafeError:
        raise CorruptError(
            f"the index is longer than the {nbytes} bytes that the manifest states", where=path
        ) from None


def _parent(fields: Any, check: FieldReader) -> Parent | None:
    if fields.get("parent") is None:
        return None
    parent = check.mapping(fields, "parent")
    content, path = check.text(parent, "content"), check.text(parent, "path")
    check.true(_CONTENT.fullmatch(content) is not None, "parent.content is not a content id")
    is_relative = 0 < len(path) <= MAX_PATH and not path.startswith("/") and "\0" not in path
    check.true(is_relative, f"parent.path {path!r:.100} is not relative to the folder")
    return Parent(content, path)
