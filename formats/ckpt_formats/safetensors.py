"""Model weights in safetensors: one file, or a folder of them with an index, as Hugging Face has them."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_formats.base import MODEL, Checkpoint, Goal, Options, Origin, Parameter, Part, Receipt, Shard, WritableFormat
from ckpt_formats.errors import Corrupt, Incomplete, Unsafe
from ckpt_formats.files import read_whole, write_sealed
from ckpt_formats.naming import show
from ckpt_formats.safetensors_file import SafetensorsFile, Slot, header_bytes, parse_json_object, read_header
from ckpt_formats.tensor import Tensor
from ckpt_formats.transfer import Transfer

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
_METADATA = {"format": "pt"}
_MOST_INDEX = 1 << 30
_NUMBERED = re.compile(rf"(.*)-(\d{{1,9}})-of-(\d{{1,9}}){re.escape(SUFFIX)}")


class Safetensors(WritableFormat):
    name = "safetensors"
    summary = "model weights: a .safetensors file, or a folder of them with an index"

    def detect(self, path: Path) -> bool:
        if path.is_dir():
            return bool(_indices(path) or _files(path))
        return path.name.endswith((SUFFIX, f"{SUFFIX}.index.json")) and path.is_file()

    def read(self, path: Path, options: Options) -> Checkpoint:
        listed, index = _listed(path)
        files = [read_header(file) for file in listed]
        parameters: dict[str, Parameter] = {}
        for file in files:
            for name, raw in file.tensors.items():
                if name in parameters:
                    raise Corrupt(f"tensor `{show(name)}` is in two files", where=file.path)
                parameters[name] = Parameter(name, "parameter", {MODEL: Tensor.of(raw)})
        if index is not None:
            _check_index(index, files)
        said = {key: value for file in files for key, value in file.metadata.items()}
        aliases = {alias: name for alias, name in said.items() if name in parameters and alias not in parameters}
        extras = {key: value for key, value in said.items() if key not in aliases and (key, value) != ("format", "pt")}
        shards = tuple(Shard(file.path, file.nbytes, "model") for file in files)
        return Checkpoint(path, Origin("safetensors"), parameters, (), extras, aliases, shards)

    def plan(self, source: Checkpoint, goal: Goal) -> tuple[Part, ...]:
        weights = [p for p in source.parameters.values() if p.role != "extra"]
        groups: list[list[Parameter]] = [[]]
        held = 0
        for parameter in weights:
            if groups[-1] and self.product(goal.target) is None and held + parameter.weight.nbytes > goal.shard_nbytes:
                groups.append([])
                held = 0
            groups[-1].append(replace(parameter, states={MODEL: parameter.weight}, values={}))
            held += parameter.weight.nbytes
        names = [f"model-{i:05}-of-{len(groups):05}{SUFFIX}" for i in range(1, len(groups) + 1)]
        if len(groups) == 1:
            names = [f"model{SUFFIX}"]
        parts = tuple(
            Part(name, tuple(group), {"aliases": _aliases(source, group)})
            for name, group in zip(names, groups, strict=True)
        )
        for part in parts:
            header_bytes(_slots(part.parameters), {})
        return parts

    def write(self, folder: Path, part: Part, transfer: Transfer) -> Receipt:
        slots = list(_slots(part.parameters))
        head = header_bytes(slots, {**_METADATA, **part.what["aliases"]})
        seal = write_sealed(folder, part.file, _stream(head, part.parameters, transfer))
        sizes = {slot.name: slot.nbytes for slot in slots}
        return Receipt(part.file, seal.nbytes, (seal,), sizes, transfer.reader.evidence())

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        if len(receipts) == 1:
            return
        total = sum(sum(receipt.entry.values()) for receipt in receipts)
        where = {name: receipt.file for receipt in receipts for name in receipt.entry}
        draft = folder / f"{INDEX}.tmp"
        draft.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n")
        os.replace(draft, folder / INDEX)

    def product(self, target: Path) -> str | None:
        return f"model{SUFFIX}" if target.name.endswith(SUFFIX) else None

    def losses(self, source: Checkpoint, parts: Sequence[Part]) -> tuple[str, ...]:
        states = sorted({state for p, state, t in source.tensors() if p.role != "extra" and t is not p.weight})
        lost = [f"optimizer states ({', '.join(states)})"] if states else []
        return (*lost, f"extras ({', '.join(source.extras)})") if source.extras else tuple(lost)


def _stream(head: bytes, parameters: Sequence[Parameter], transfer: Transfer) -> Iterator[bytes | memoryview]:
    yield head
    for parameter in parameters:
        yield from transfer.chunks(parameter.states[MODEL])


def _slots(parameters: Sequence[Parameter]) -> Iterator[Slot]:
    at = 0
    for parameter in parameters:
        tensor = parameter.states[MODEL]
        yield Slot(parameter.name, tensor.dtype, tensor.shape, at)
        at += tensor.nbytes


def _aliases(source: Checkpoint, group: Sequence[Parameter]) -> dict[str, str]:
    """Other names of tied tensors, where the ecosystem's own writer puts them: in the metadata."""
    names = {parameter.name for parameter in group}
    return {alias: name for alias, name in source.aliases.items() if name in names}


def _indices(path: Path) -> list[Path]:
    return sorted(path.glob(f"*{SUFFIX}.index.json"))


def _files(path: Path) -> list[Path]:
    return sorted(path.glob(f"*{SUFFIX}"))


def _listed(path: Path) -> tuple[list[Path], tuple[Path, dict[str, str]] | None]:
    """The files of a checkpoint, and its index if it has one: (path, name -> file)."""
    if path.name.endswith(SUFFIX) and path.is_file():
        return [path], None
    indices = [path] if path.is_file() else _indices(path)
    if not indices:
        return _all_of(_files(path)), None
    index = indices[0]
    said = parse_json_object(read_whole(index, _MOST_INDEX), index)
    where = said.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise Corrupt("the index has no weight_map of file names", where=index)
    for name in where.values():
        if Path(name).name != name or name in (".", ".."):
            raise Unsafe(f"the index names {show(name)!r}, which is not a file beside it", where=index)
    files = [index.parent / name for name in dict.fromkeys(where.values())]
    for file in files:
        if not os.path.isfile(file):  # unlike Path.is_file, it takes any name
            raise Incomplete(f"the index names {show(file.name)!r}, which is not there", where=index)
    return files, (index, where)


def _all_of(files: list[Path]) -> list[Path]:
    """The files, if those that are called `NAME-00002-of-00003` are all here. Raises `Incomplete`."""
    names = {file.name for file in files}
    for file in files:
        if match := _NUMBERED.fullmatch(file.name):
            stem, width, count = match[1], len(match[2]), int(match[3])
            numbered = (f"{stem}-{i:0{width}}-of-{match[3]}{SUFFIX}" for i in range(1, count + 1))
            if lacking := next((name for name in numbered if name not in names), None):
                raise Incomplete(f"{lacking} is missing", where=file.parent, hint="Copy all files into one folder.")
    return files


def _check_index(index: tuple[Path, dict[str, str]], files: Sequence[SafetensorsFile]) -> None:
    path, where = index
    found = {name: file.path.name for file in files for name in file.tensors}
    for name in (*where, *found):
        if where.get(name) != found.get(name):
            said, held = where.get(name, "no file"), found.get(name, "none")
            raise Incomplete(
                f"the index says that tensor `{show(name)}` is in {show(said)}, but it is in {held}", where=path
            )
