"""The universal format: one safetensors file per parameter, and a manifest written last. See docs/format.md."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_formats.containers.sealed_json import hash_number
from ckpt_formats.core.checkpoint import Checkpoint, ErrorFigures, Parameter, SourceFile
from ckpt_formats.core.encoding import EncodingOptions, Level
from ckpt_formats.core.errors import Corrupt, Incomplete
from ckpt_formats.core.files import unreadable
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import file_stem, printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.version import WRITTEN_BY
from ckpt_formats.universal import manifest, parameter_file
from ckpt_formats.universal import read_states as stored_states
from ckpt_formats.universal.delta_plan import DeltaBase
from ckpt_formats.universal.entry import ParameterEntry, entry_json, entry_of
from ckpt_formats.universal.lineage import lineage
from ckpt_formats.universal.manifest import Manifest, Parent


@dataclass(frozen=True)
class StatesContent:
    """How the states of a parameter are stored."""

    encoding: EncodingOptions | None = None
    """How values are encoded; None: as they are."""
    codec: Mapping[str, Any] | None = None
    """The configuration of a delta codec; None: the states stand alone."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """What is known of the way from the parent to this state: the fields of `StepInfo`."""


@dataclass(frozen=True, kw_only=True)
class Universal(WritableFormat):
    """One file for each parameter with all its states, and a manifest."""

    name = "universal"
    summary = "one safetensors file per parameter with all its states, and a JSON manifest"
    needs_model = False

    codec: str | None = None
    """Encode the states: `auto` is the best codec for each, else one codec by its text, such as `planes:level=max`."""
    level: Level = "default"
    """How hard an encoder tries."""
    check: bool = True
    """Decode what was encoded, and compare, before it is trusted."""
    content: str | None = None
    """The content id that must come out, where it is known: that of the source, when nothing is to change."""

    @property
    def parent(self) -> Parent | None:
        """What the deltas that are written are against."""
        return None

    @property
    def encoding(self) -> EncodingOptions | None:
        """How values are encoded. Raises `Unsupported` for a codec that does not exist."""
        if self.codec is None:
            return None
        return EncodingOptions.of(self.codec, self.level, self.check)

    def detect(self, path: Path) -> bool:
        return (path / manifest.NAME).is_file()

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        ancestors = lineage(path)
        said, known = ancestors[-1].said, dict[str, Parameter]()
        for ancestor in ancestors:
            known = {
                entry.name: _parameter(ancestor.folder, entry, known.get(entry.name)) for entry in ancestor.entries
            }
        stored = [(ancestor.folder / entry.file, entry) for ancestor in ancestors for entry in ancestor.entries]
        states = {(entry.name, name): state for entry in said.entries for name, state in entry.states.items()}
        losses = {key: state.loss for key, state in states.items() if state.loss is not None}
        return Checkpoint(
            path,
            said.origin,
            known,
            said.groups,
            said.extras,
            said.aliases,
            tuple(SourceFile(file, entry.nbytes, entry.role) for file, entry in stored),
            tuple(seal for file, entry in stored for seal in stored_states.seals(file, entry)),
            _notices(losses),
            digests={
                key: hash_number(state.values)
                for key, state in states.items()
                if state.chunk is not None or (state.codec is None and state.offset is None)
            },
            errors=losses,
            original=said.original,
        )

    def plan(self, source: Checkpoint) -> Plan:
        for parameter in source.parameters.values():
            parameter_file.check_storable(parameter)
        content = StatesContent(self.encoding)
        return Plan(
            tuple(
                FilePlan(f"{_folder(parameter)}/{file_stem(name)}.safetensors", (parameter,), content)
                for name, parameter in source.parameters.items()
            )
        )

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        assert isinstance(part.content, StatesContent)
        return self._write(folder, part, transfer, part.content.encoding, None)

    def _write(
        self,
        folder: Path,
        part: FilePlan,
        transfer: Transfer,
        coding: EncodingOptions | None,
        against: DeltaBase | None,
    ) -> Receipt:
        parameter = part.parameters[0]
        (folder / part.file).parent.mkdir(exist_ok=True)
        entry = parameter_file.write_parameter(folder, part.file, parameter, transfer, coding, against)
        found = stored_states.seals(folder / part.file, entry)
        seals = tuple(replace(seal, path=Path(part.file)) for seal in found)
        return Receipt(part.file, entry.nbytes, seals, entry_json(entry), transfer.reader.evidence())

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        entries = tuple(_carried(entry_of(receipt.entry, folder), source.errors) for receipt in receipts)
        stands = any(entry.delta is not None and entry.delta.before for entry in entries)
        said = Manifest(
            source.origin,
            entries,
            source.groups,
            source.aliases,
            source.extras,
            WRITTEN_BY,
            self.parent if stands else None,
            source.original,
        )
        if self.content not in (None, said.content):
            raise _changed(said, source)
        draft = folder / f"{manifest.NAME}.tmp"
        draft.write_bytes(manifest.dump(said))
        os.replace(draft, folder / manifest.NAME)


def _parameter(folder: Path, entry: ParameterEntry, earlier: Parameter | None) -> Parameter:
    path = folder / entry.file
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise Incomplete(f"the file of `{entry.name}` is missing", where=path) from None
    except OSError as error:
        raise unreadable(error, path) from error
    if found != entry.nbytes:
        raise Corrupt(f"the file of `{entry.name}` has {found} bytes, the manifest says {entry.nbytes}", where=path)
    return Parameter(entry.name, entry.role, stored_states.read_states(path, entry, earlier), entry.values)


def _changed(said: Manifest, source: Checkpoint) -> Corrupt:
    """What was read is not what was once written: name the first state that shows it."""
    states = ((entry.name, name, state) for entry in said.entries for name, state in entry.states.items())
    wrong = (
        (name, state)
        for name, state, found in states
        if source.digests.get((name, state)) not in (None, hash_number(found.values))
    )
    name, state = next(wrong, ("the checkpoint", "as a whole"))
    return Corrupt(
        f"{printable(name)}/{state}: the values that are decoded do not fit their checksum", where=source.path
    )


def _carried(entry: ParameterEntry, losses: Mapping[tuple[str, str], ErrorFigures]) -> ParameterEntry:
    """The entry with what its source says was lost before, where nothing more was."""
    if not losses:
        return entry
    states = {
        name: replace(state, loss=losses.get((entry.name, name))) if state.loss is None else state
        for name, state in entry.states.items()
    }
    return replace(entry, states=states)


def _notices(losses: Mapping[tuple[str, str], ErrorFigures]) -> tuple[Notice, ...]:
    if not losses:
        return ()
    kinds = ", ".join(sorted({state for _, state in losses}))
    text = f"approximate: {len(losses)} states are not bit for bit what was saved ({kinds}); `--json` has the losses"
    return (Notice(text, weight=Weight.LOST),)


def _folder(parameter: Parameter) -> str:
    return "extras" if parameter.role == "extra" else "parameters"
