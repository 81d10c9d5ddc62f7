"""The universal format as others see it: reads, plans and writes checkpoints."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.containers.sealed_json import hash_number
from ckpt_formats.core.arguments import Positive
from ckpt_formats.core.checkpoint import OLDER, OLDEST_STEP, Checkpoint, ErrorFigures, Parameter, SourceFile
from ckpt_formats.core.claims import MAX_HEADER
from ckpt_formats.core.encoding import EncodingOptions, Level
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.files import Reader, unreadable
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.text import printable
from ckpt_formats.core.version import WRITTEN_BY
from ckpt_formats.universal import columns, manifest, original
from ckpt_formats.universal.check_index import Pack
from ckpt_formats.universal.index import TYPES, Index, index_of, join
from ckpt_formats.universal.lineage import Ancestor, LoadedFiles, lineage, once
from ckpt_formats.universal.manifest import ContentId, Manifest, PackFiles, Parent, pack_file, pack_path
from ckpt_formats.universal.pack_seals import pack_parts
from ckpt_formats.universal.shared_packs import with_packs
from ckpt_formats.universal.single_file import is_single
from ckpt_formats.universal.stored import StateDigests, StoredParameters, StoredSeals, state_errors
from ckpt_formats.universal.tables import Tables

if TYPE_CHECKING:
    from ckpt_formats.core.transfer import Transfer
    from ckpt_formats.universal.delta_plan import DeltaBase
    from ckpt_formats.universal.entry import Extent
    from ckpt_formats.universal.unchanged import EarlierMember
    from ckpt_formats.universal.write_single_file import PlacedRanges

_NO_PARAMETERS: Mapping[str, Parameter] = {}
"""Those of the parent of a base."""
PACK_NBYTES = 64 << 20
"""Bytes of values in one pack: enough for few files, and few enough to be written again after a crash."""
_SINGLE_FILE = "checkpoint.ucp"
"""The name of a single file before it is renamed to the target."""
_HEADER_NBYTES = 16 << 20
"""About as many bytes the header of a pack may have: other readers parse all of it."""
_OWNER_HINT = (
    "A member of a chain needs the packs of earlier members, next to it. Copy the whole chain; or take the state out "
    "of it: `ckpt restore CHAIN DST --step N`."
)
_HEADER_ENTRY = 128
"""About as many bytes an entry of a header has, besides its name."""


@dataclass(frozen=True)
class DeltaContent:
    """How a parameter is to be stored as a delta."""

    earlier: Parameter | None
    """The parent's parameter of the same name; None for one that needs no parent."""
    codec: Mapping[str, Any]
    """The configuration of the delta codec."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """What is known of the steps from the parent to this state: the fields of `StepInfo`."""


@dataclass(frozen=True)
class PackContent:
    """How the states of the parameters of a pack are to be stored."""

    number: int
    encoding: EncodingOptions | None = None
    """How values are encoded; None: they are stored as they are."""
    deltas: Mapping[str, DeltaContent] = field(default_factory=dict)
    """The parameters that are stored as deltas, by name."""
    errors: Mapping[tuple[str, str], ErrorFigures] = field(default_factory=dict)
    """The figures of states that are approximate already, by parameter and state."""
    place: "Extent | None" = None
    """Where in a single file the states lie whose lengths are known before they are written."""


@dataclass(frozen=True)
class _WrittenPacks(PackFiles):
    """The packs in a folder that is being written: there is no list of them yet."""

    placed: int | None = None
    """The number that states have which lie in the single file already."""

    def path(self, number: int) -> Path:
        return self.checkpoint / _SINGLE_FILE if number == self.placed else pack_path(self.checkpoint, number)


@dataclass(frozen=True, kw_only=True)
class Universal(WritableFormat):
    """The universal format: states in packs of safetensors, an index of columns, and a manifest."""

    name = "universal"
    summary = "all states in safetensors files of about 64 MiB, an index, and a JSON manifest"
    is_own = True
    needs_model = False

    codec: str | None = None
    """The codec of the states: `auto` is the best one for each, else the text of one, such as `planes:level=max`."""
    level: Level = "default"
    """The level of compression: a higher one needs more time."""
    check: bool = True
    """Whether encoded values are decoded and compared before they are stored."""
    content: ContentId | None = None
    """The content id that the result must have, if it is known: that of the source, if no values change."""
    pack_nbytes: Positive = PACK_NBYTES
    """The most bytes of values in a pack with more than one parameter. A parameter is never divided."""
    single_file: bool = False
    """Whether everything is in one file. A target whose name ends in `.ucp` is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.encoding  # noqa: B018  # raises if the codec does not exist

    @property
    def parent(self) -> Parent | None:
        """The parent of the deltas that are written; None if none are."""
        return None

    @property
    def earlier_member(self) -> "EarlierMember | None":
        """The earlier member of a chain whose states are not stored again; None if the target is no member."""
        return None

    @property
    def encoding(self) -> EncodingOptions | None:
        """The options of `codec`, `level`, `check`; None without a codec.

        Raises `InvalidArgumentError` for an unknown codec.
        """
        if self.codec is None:
            return None
        return EncodingOptions.of(self.codec, self.level, self.check)

    def detect(self, path: Path) -> bool:
        return path.is_file() if is_single(path) else (path / manifest.NAME).is_file()

    def for_target(self, target: Path) -> WritableFormat:
        return replace(self, single_file=True) if is_single(target) else self

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        return read_lineage(lineage(path), LoadedFiles())

    def plan(self, source: Checkpoint) -> Plan:
        from ckpt_formats.universal.pack import check_state_names, check_storable  # they import the codecs

        for parameter in source.parameters.values():
            check_storable(parameter)
        check_state_names(source.parameters.values())
        if self.single_file:
            assert self.earlier_member is None, "a single file is not a member of a chain"
            _check_header(source)
        packs = list(_packs(source.parameters.values(), self.pack_nbytes))
        files = tuple(self._pack(number, parameters, source) for number, parameters in enumerate(packs))
        if not self.single_file:
            return Plan(files)
        ranges = self._placed_ranges(packs)
        if ranges is not None:
            files = tuple(map(_placed, files, ranges.extents))
        return Plan(files, single_file=_SINGLE_FILE)

    def _placed_ranges(self, packs: Sequence[Sequence[Parameter]]) -> "PlacedRanges | None":
        """Where states lie in the single file; None if their lengths are known only when they are encoded."""
        from ckpt_formats.universal.write_single_file import PlacedRanges

        return None if self.encoding is not None else PlacedRanges.of(packs)

    def _pack(self, number: int, parameters: tuple[Parameter, ...], source: Checkpoint) -> FilePlan:
        keys = ((p.name, state) for p in parameters for state in p.states) if source.errors else ()
        errors = {key: source.errors[key] for key in keys if key in source.errors}
        return FilePlan(pack_file(number), parameters, PackContent(number, self.encoding, errors=errors))

    def bases(self, file: FilePlan, transfer: "Transfer") -> "dict[str, DeltaBase]":
        """What the parameters of a pack are to be encoded against, by name."""
        return {}

    def write(self, folder: Path, file: FilePlan, transfer: "Transfer") -> Receipt:
        from base64 import b64encode

        from ckpt_formats.universal.pack import write_pack

        content = file.content
        assert isinstance(content, PackContent)
        path = folder / file.file
        path.parent.mkdir(exist_ok=True)
        bases, place = self.bases(file, transfer), content.place
        written = write_pack(
            path,
            content.number,
            file.parameters,
            transfer,
            content.encoding,
            bases,
            content.errors,
            self.earlier_member,
            None if place is None else (folder / _SINGLE_FILE, place),
        )
        pack, index = written.pack, index_of(written.entries)
        header = Seal(Path(file.file), 0, pack.header_nbytes, "xxh3-128", hash_number(pack.header), "header")
        entry = {
            "pack": [pack.nbytes, pack.header_nbytes, pack.header],
            "index": b64encode(index.dump()).decode(),
            "tables": index.tables.to_json(),
            **({} if place is None else {"placed": place.pack}),
        }
        nbytes = 0 if place is None else place.nbytes
        return Receipt(file.file, pack.nbytes, (header,), entry, transfer.reader.evidence(), placed=nbytes)

    def is_intact(self, folder: Path, receipt: Receipt, reader: Reader) -> bool:
        """Of a pack, the seal is that of its header; the checksums of all else are in its part of the index."""
        if not super().is_intact(folder, receipt, reader):
            return False
        placed = receipt.entry.get("placed")
        if (placed is not None) != (self.single_file and self.encoding is None):
            return False  # an earlier release wrote it, which put packs together in another way
        parts = pack_parts(_WrittenPacks(folder, (), placed), _index_of(receipt, folder), 0)
        own = folder / receipt.file, folder / _SINGLE_FILE  # other states lie in packs of an earlier member
        return not any(part.unequal(reader) for part in parts if part.path in own)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        indexes = [_index_of(receipt, folder) for receipt in receipts]
        own = [Pack(*receipt.entry["pack"]) for receipt in receipts]
        index, packs = with_packs(join(indexes), own, () if self.earlier_member is None else self.earlier_member.packs)
        result = Manifest(
            source.origin,
            index,
            packs,
            source.groups,
            source.aliases,
            source.extras,
            WRITTEN_BY,
            None,
            source.original,
        )
        if result.with_deltas():
            result = replace(result, parent=self.parent)
        if self.content not in (None, result.content):
            raise _changed(result, source)
        if self.single_file:
            parameters = list(_packs(source.parameters.values(), self.pack_nbytes))
            _write_single_file(folder, result, self._placed_ranges(parameters))
            return
        data, (original_fields, form) = result.entries.dump(), original.dump(source.original)
        (folder / manifest.INDEX).write_bytes(data)
        if form is not None:
            (folder / original.NAME).write_bytes(form)
        draft = folder / f"{manifest.NAME}.tmp"
        draft.write_bytes(manifest.dump(result, data, original_fields))
        os.replace(draft, folder / manifest.NAME)


def read_lineage(ancestors: Sequence[Ancestor], loaded: LoadedFiles) -> Checkpoint:
    """The checkpoint that is the last of a lineage. What another one had `loaded` is shared with it.

    Raises `IncompleteError` or `CorruptError` if a file of the lineage is missing or has another length.
    """
    parameters: Mapping[str, Parameter] = _NO_PARAMETERS
    files = list[SourceFile]()
    for ancestor in ancestors:
        folder, of_ancestor = ancestor.folder, ancestor.manifest
        key = folder, id(parameters)
        if key not in loaded.parameters:
            loaded.parameters[key] = parameters_of(of_ancestor, folder, parameters)
        parameters = loaded.parameters[key]
        packs: tuple[SourceFile, ...] = once(loaded.packs, folder, partial(_packs_of, ancestor))
        files += packs
    path, stated = ancestors[-1].folder, ancestors[-1].manifest
    if stated.boxes is None:
        errors = state_errors(stated.entries)
    else:
        from ckpt_formats.universal.boxes.whole import box_errors  # only saves of live runs have boxes

        errors = box_errors(stated, stated.boxes)
    return Checkpoint(
        path=path,
        origin=stated.origin,
        parameters=parameters,
        groups=stated.groups,
        extras=stated.extras,
        aliases=stated.aliases,
        files=(*{file.path: file for file in files}.values(), *_form_of(path, stated)),  # a pack may be of two of them
        seals=StoredSeals(tuple((ancestor.folder, ancestor.manifest) for ancestor in ancestors)),
        notices=tuple(_notices(errors)),
        digests=StateDigests(stated.entries) if stated.boxes is None else {},  # those of boxes: `as_stored`
        errors=errors,
        original=stated.original,
    )


def parameters_of(stated: Manifest, folder: Path, parent: Mapping[str, Parameter]) -> Mapping[str, Parameter]:
    """The parameters of the checkpoint in a folder, whose deltas are against those of `parent`. Lazy."""
    if stated.boxes is not None:
        from ckpt_formats.universal.boxes.whole import whole_parameters

        return whole_parameters(stated.files(folder), stated, stated.boxes, stated.numbers.keys(), parent)
    return StoredParameters(stated.files(folder), stated.entries, stated.numbers.keys(), parent)


def _index_of(receipt: Receipt, folder: Path) -> Index:
    """The part of the index for the pack of a receipt."""
    from base64 import b64decode

    stored = columns.load(b64decode(receipt.entry["index"]), TYPES, folder)
    return Index(stored, Tables.of_json(receipt.entry["tables"], FieldReader(folder)))


def _placed(file: FilePlan, place: "Extent") -> FilePlan:
    assert isinstance(file.content, PackContent)
    return replace(file, content=replace(file.content, place=place))


def _write_single_file(folder: Path, result: Manifest, ranges: "PlacedRanges | None") -> None:
    """Put the packs in a folder together, with the index and the manifest behind them."""
    from ckpt_formats.universal import write_single_file as single

    packs = [(folder / pack_file(number), pack) for number, pack in enumerate(result.packs)]
    draft, (fields, form) = single.draft(result.entries, packs, ranges), original.dump(result.original)
    index, nbytes = draft.index.dump(), 0
    last = () if form is None else (form,)
    for _ in range(2):  # the header has the length of the manifest, and the manifest the checksum of the header
        header = draft.header(single.lengths(len(index), nbytes, None if form is None else len(form)))
        stated = replace(result, entries=draft.index, packs=(draft.pack(header),))
        text = manifest.dump(stated, index, fields)
        nbytes = len(text)
    begin = draft.header_nbytes if ranges is None else ranges.end
    single.write(folder / _SINGLE_FILE, header, begin, draft.pieces, (*last, index, text))


def _check_header(source: Checkpoint) -> None:
    """Raise `UnsupportedError` if the header of a single file would be larger than other programs read."""

    entries = sum(
        _text_nbytes(parameter.name) + _text_nbytes(state) + _HEADER_ENTRY
        for parameter in source.parameters.values()
        for state in parameter.states
    )
    if entries > MAX_HEADER:
        raise UnsupportedError(
            "one file cannot hold so many states: its header would be too large for the safetensors library",
            hint="Give a target whose name does not end in .ucp: it will be a folder.",
        )


def _packs(parameters: Iterable[Parameter], limit: int) -> Iterator[tuple[Parameter, ...]]:
    """Parameters in their order, cut where a pack has reached `limit` bytes of values, or its header its own limit."""
    pack, nbytes, header = list[Parameter](), 0, 0
    for parameter in parameters:
        entries = sum(_text_nbytes(parameter.name) + _text_nbytes(state) + _HEADER_ENTRY for state in parameter.states)
        if pack and (nbytes + parameter.nbytes > limit or header + entries > _HEADER_NBYTES):
            yield tuple(pack)
            pack, nbytes, header = [], 0, 0
        pack.append(parameter)
        nbytes += parameter.nbytes
        header += entries
    if pack:
        yield tuple(pack)


def _text_nbytes(text: str) -> int:
    """The most bytes that a text has in JSON."""
    return len(text) if text.isascii() and text.isprintable() else 12 * len(text)


def _packs_of(ancestor: Ancestor) -> tuple[SourceFile, ...]:
    """The packs of a checkpoint. Raises `IncompleteError` or `CorruptError` if one is missing or has another length."""
    if is_single(ancestor.folder):  # `manifest.load` has compared its length
        return (SourceFile(ancestor.folder, ancestor.folder.stat().st_size, "all"),)
    files = ancestor.manifest.files(ancestor.folder)
    return tuple(
        SourceFile(files.path(number), _pack_length(ancestor, files.path(number), number), "all")
        for number in range(len(files.packs))
    )


def _pack_length(ancestor: Ancestor, path: Path, number: int) -> int:
    """The length of a pack, which is the one that the manifest states. Errors about packs of others name a state."""
    pack = ancestor.manifest.packs[number]
    try:
        return _length(path, pack.nbytes, "pack")
    except (IncompleteError, CorruptError) as error:
        if pack.owner is None:
            raise
        index = ancestor.manifest.entries
        row = int((index.columns["state.pack"] == number).argmax())  # `check_index` checks that there is one
        name = index.names[int(index.columns["state.parameter"][row])]
        state = index.tables.states[int(index.columns["state.name"][row])]
        error.what = (
            f"`{printable(name)}` {printable(state)} of {ancestor.folder.resolve().name} is in a pack of "
            f"{pack.owner.folder}: {error.what}"
        )
        error.hint = error.hint or _OWNER_HINT
        raise


def _form_of(path: Path, stated: Manifest) -> Iterator[SourceFile]:
    """The file with the form of the original file. Those of ancestors are not read."""
    form = original.seal(stated.original)
    if form is not None and not is_single(path):
        yield SourceFile(form.path, _length(form.path, form.nbytes, "form of the original file"), "form")


def _length(path: Path, stated: int, what: str) -> int:
    """The length of a file, which is the one that the manifest states."""
    try:
        nbytes = path.stat().st_size
    except CkptError:
        raise
    except FileNotFoundError:
        raise IncompleteError(f"a {what} of the checkpoint is missing", where=path) from None
    except OSError as error:
        raise unreadable(error, path) from error
    if nbytes != stated:
        raise CorruptError(f"the {what} has {nbytes} bytes, the manifest says {stated}", where=path)
    return nbytes


def _changed(result: Manifest, source: Checkpoint) -> CorruptError:
    """The error for values that are not those that were once written. It names the first state that differs."""
    differing = (
        (entry.name, name)
        for entry in result.entries
        for name, state in entry.states.items()
        if source.digests.get((entry.name, name)) not in (None, state.digest)
    )
    name, state = next(differing, ("the checkpoint", "as a whole"))
    return CorruptError(
        f"{printable(name)}/{state}: the values that are decoded do not fit their checksum", where=source.path
    )


_AGE = frozenset((OLDER, OLDEST_STEP, "elements"))
"""Figures of a state with exact blocks of earlier steps."""


def _notices(errors: Mapping[tuple[str, str], ErrorFigures]) -> Iterator[Notice]:
    mixed = [figures for figures in errors.values() if OLDER in figures]
    if mixed:
        ages = (step for figures in mixed if isinstance(step := figures.get(OLDEST_STEP), int))
        since = min(ages, default=None)
        oldest = "" if since is None else f", the oldest of step {since}"
        text = f"approximate: {len(mixed)} states have blocks of earlier steps, on purpose{oldest}"
        yield Notice(text, weight=Weight.LOST)
    rounded = [key for key, figures in errors.items() if not figures.keys() <= _AGE]
    if rounded:
        kinds = ", ".join(sorted({state for _, state in rounded}))
        text = (
            f"approximate: {len(rounded)} states are not bit for bit what was saved ({kinds}); `--json` has the errors"
        )
        yield Notice(text, weight=Weight.LOST)
