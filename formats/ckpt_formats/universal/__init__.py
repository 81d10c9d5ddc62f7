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
    """How the states of a parameter are to be stored."""

    encoding: EncodingOptions | None = None
    """How values are encoded; None: they are stored as they are."""
    codec: Mapping[str, Any] | None = None
    """The configuration of a delta codec; None: the states are stored without a parent."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """What is known of the steps from the parent to this state: the fields of `StepInfo`."""


@dataclass(frozen=True, kw_only=True)
class Universal(WritableFormat):
    """The universal format: one file for each parameter with all its states, and a manifest."""

    name = "universal"
    summary = "one safetensors file per parameter with all its states, and a JSON manifest"
    needs_model = False

    codec: str | None = None
    """The codec of the states: `auto` is the best one for each, else the text of one, such as `planes:level=max`."""
    level: Level = "default"
    """The level of compression: a higher one needs more time."""
    check: bool = True
    """Whether encoded values are decoded and compared before they are stored."""
    content: str | None = None
    """The content id that the result must have, if it is known: that of the source, if no values change."""

    @property
    def parent(self) -> Parent | None:
        """The parent of the deltas that are written; None if none are."""
        return None

    @property
    def encoding(self) -> EncodingOptions | None:
        """The options of `codec`, `level`, `check`; None without a codec. Raises `Unsupported` for an unknown codec."""
        if self.codec is None:
            return None
        return EncodingOptions.of(self.codec, self.level, self.check)

    def detect(self, path: Path) -> bool:
        return (path / manifest.NAME).is_file()

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        ancestors = lineage(path)
        stated, parameters = ancestors[-1].manifest, dict[str, Parameter]()
        for ancestor in ancestors:
            parameters = {
                entry.name: _parameter(ancestor.folder, entry, parameters.get(entry.name)) for entry in ancestor.entries
            }
        stored = [(ancestor.folder / entry.file, entry) for ancestor in ancestors for entry in ancestor.entries]
        states = {(entry.name, name): state for entry in stated.entries for name, state in entry.states.items()}
        errors = {key: state.error for key, state in states.items() if state.error is not None}
        return Checkpoint(
            path,
            stated.origin,
            parameters,
            stated.groups,
            stated.extras,
            stated.aliases,
            tuple(SourceFile(file, entry.nbytes, entry.role) for file, entry in stored),
            tuple(seal for file, entry in stored for seal in stored_states.seals(file, entry)),
            _notices(errors),
            digests={
                key: hash_number(state.values)
                for key, state in states.items()
                if state.chunk is not None or (state.codec is None and state.offset is None)
            },
            errors=errors,
            original=stated.original,
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
        file_seals = tuple(
            replace(seal, path=Path(part.file)) for seal in stored_states.seals(folder / part.file, entry)
        )
        return Receipt(part.file, entry.nbytes, file_seals, entry_json(entry), transfer.reader.evidence())

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        entries = tuple(_with_source_errors(entry_of(receipt.entry, folder), source.errors) for receipt in receipts)
        needs_parent = any(entry.delta is not None and entry.delta.parent_states for entry in entries)
        result = Manifest(
            source.origin,
            entries,
            source.groups,
            source.aliases,
            source.extras,
            WRITTEN_BY,
            self.parent if needs_parent else None,
            source.original,
        )
        if self.content not in (None, result.content):
            raise _changed(result, source)
        draft = folder / f"{manifest.NAME}.tmp"
        draft.write_bytes(manifest.dump(result))
        os.replace(draft, folder / manifest.NAME)


def _parameter(folder: Path, entry: ParameterEntry, parent: Parameter | None) -> Parameter:
    path = folder / entry.file
    try:
        nbytes = path.stat().st_size
    except FileNotFoundError:
        raise Incomplete(f"the file of `{entry.name}` is missing", where=path) from None
    except OSError as error:
        raise unreadable(error, path) from error
    if nbytes != entry.nbytes:
        raise Corrupt(f"the file of `{entry.name}` has {nbytes} bytes, the manifest says {entry.nbytes}", where=path)
    return Parameter(entry.name, entry.role, stored_states.read_states(path, entry, parent), entry.values)


def _changed(result: Manifest, source: Checkpoint) -> Corrupt:
    """The error for values that are not those that were once written. It names the first state that differs."""
    states = ((entry.name, name, state) for entry in result.entries for name, state in entry.states.items())
    differing = (
        (parameter, name)
        for parameter, name, state in states
        if source.digests.get((parameter, name)) not in (None, hash_number(state.values))
    )
    name, state = next(differing, ("the checkpoint", "as a whole"))
    return Corrupt(
        f"{printable(name)}/{state}: the values that are decoded do not fit their checksum", where=source.path
    )


def _with_source_errors(entry: ParameterEntry, errors: Mapping[tuple[str, str], ErrorFigures]) -> ParameterEntry:
    """The entry with the error figures of its source, for states that have no figures of their own."""
    if not errors:
        return entry
    states = {
        name: replace(state, error=errors.get((entry.name, name))) if state.error is None else state
        for name, state in entry.states.items()
    }
    return replace(entry, states=states)


def _notices(errors: Mapping[tuple[str, str], ErrorFigures]) -> tuple[Notice, ...]:
    if not errors:
        return ()
    kinds = ", ".join(sorted({state for _, state in errors}))
    text = f"approximate: {len(errors)} states are not bit for bit what was saved ({kinds}); `--json` has the errors"
    return (Notice(text, weight=Weight.LOST),)


def _folder(parameter: Parameter) -> str:
    return "extras" if parameter.role == "extra" else "parameters"
