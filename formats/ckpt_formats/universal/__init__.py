"""The universal format: one safetensors file per parameter, and a manifest written last. See docs/format.md."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_formats.base import Checkpoint, Goal, Options, Parameter, Part, Receipt, Shard, WritableFormat
from ckpt_formats.coding import Coding
from ckpt_formats.errors import Corrupt, Incomplete
from ckpt_formats.files import unreadable
from ckpt_formats.naming import file_stem
from ckpt_formats.transfer import Transfer
from ckpt_formats.universal import manifest, parameter_file
from ckpt_formats.universal.manifest import Entry, Manifest
from ckpt_formats.version import WRITTEN_BY


class Universal(WritableFormat):
    name = "universal"
    summary = "one safetensors file per parameter with all its states, and a JSON manifest"

    def detect(self, path: Path) -> bool:
        return (path / manifest.NAME).is_file()

    def read(self, path: Path, options: Options) -> Checkpoint:
        said = manifest.load(path / manifest.NAME)
        parameters = {entry.name: _parameter(path, entry) for entry in said.entries}
        files = tuple(Shard(path / entry.file, entry.nbytes, entry.role) for entry in said.entries)
        return Checkpoint(
            path,
            said.origin,
            parameters,
            said.groups,
            said.extras,
            said.aliases,
            files,
            tuple(seal for entry in said.entries for seal in parameter_file.seals(path / entry.file, entry)),
            digests={
                (entry.name, name): manifest.hash_number(state.values)
                for entry in said.entries
                for name, state in entry.states.items()
                if state.chunk is not None
            },
        )

    def plan(self, source: Checkpoint, goal: Goal) -> tuple[Part, ...]:
        for parameter in source.parameters.values():
            parameter_file.check_storable(parameter)
        what = {} if goal.coding is None else {"coding": goal.coding.to_json()}
        return tuple(
            Part(f"{_folder(parameter)}/{file_stem(name)}.safetensors", (parameter,), what)
            for name, parameter in source.parameters.items()
        )

    def write(self, folder: Path, part: Part, transfer: Transfer) -> Receipt:
        (parameter,) = part.parameters
        (folder / part.file).parent.mkdir(exist_ok=True)
        coding = Coding.of_json(part.what.get("coding"))
        entry = parameter_file.write_parameter(folder, part.file, parameter, transfer, coding)
        seals = tuple(replace(seal, path=Path(part.file)) for seal in parameter_file.seals(folder / part.file, entry))
        return Receipt(part.file, entry.nbytes, seals, manifest.entry_json(entry), transfer.reader.evidence())

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        entries = tuple(manifest.entry_of(receipt.entry, folder) for receipt in receipts)
        said = Manifest(source.origin, entries, source.groups, source.aliases, source.extras, WRITTEN_BY)
        draft = folder / f"{manifest.NAME}.tmp"
        draft.write_bytes(manifest.dump(said))
        os.replace(draft, folder / manifest.NAME)


def _parameter(folder: Path, entry: Entry) -> Parameter:
    path = folder / entry.file
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise Incomplete(f"the file of `{entry.name}` is missing", where=path) from None
    except OSError as error:
        raise unreadable(error, path) from error
    if found != entry.nbytes:
        raise Corrupt(f"the file of `{entry.name}` has {found} bytes, the manifest says {entry.nbytes}", where=path)
    return Parameter(entry.name, entry.role, parameter_file.read_states(path, entry), entry.values)


def _folder(parameter: Parameter) -> str:
    return "extras" if parameter.role == "extra" else "parameters"
