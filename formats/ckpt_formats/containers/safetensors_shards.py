"""A model in safetensors files, one or many: read as one, and cut into several.

Files that the ranks of a job wrote, each its own blocks, are read too: PyTorch's
`HuggingFaceStorageWriter` notes in a file's metadata where each of its tensors
begins in the whole (source: torch.distributed.checkpoint.hf_storage). The whole
shape is nowhere; it reaches as far as the blocks do.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_formats.containers.safetensors import (
    SafetensorsFile,
    TensorSlot,
    header_bytes,
    is_natural,
    parse_json_object,
    read_header,
)
from ckpt_formats.containers.shard_index import INDEX_SUFFIX, NO_INDEX, ShardIndex, one_set, read_index
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Parameter, SourceFile
from ckpt_formats.core.errors import Corrupt
from ckpt_formats.core.files import write_sealed
from ckpt_formats.core.format import FilePlan, Receipt
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import FileBlob, Fragment, Tensor, from_fragments
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer

SUFFIX = ".safetensors"
SAFETENSORS_INDEX = f"{SUFFIX}{INDEX_SUFFIX}"
_SHARDING = "DCP_SHARDING_INFO"
_OF_SHARDING = ("DCP_VERSION", _SHARDING)


@dataclass(frozen=True)
class ShardedWeights:
    """The tensors of a model, and what the files say beside."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    """Of all files together, without what only says that they are PyTorch's."""
    shards: tuple[SourceFile, ...]
    notices: tuple[Notice, ...] = ()
    cut: bool = False
    """Whether files hold blocks of tensors."""

    def aliases(self) -> dict[str, str]:
        """Other names of tied tensors, which the ecosystem's own writer puts into the metadata."""
        said = self.metadata.items()
        return {alias: name for alias, name in said if name in self.tensors and alias not in self.tensors}


def shard_paths(path: Path) -> tuple[list[Path], ShardIndex | None]:
    """The files of a model, and its index if it has one. `path` is a file, an index, or the folder of either."""
    if path.name.endswith(SUFFIX) and path.is_file():
        return [path], None
    found = path if path.is_file() else one_set(path, SUFFIX)
    if isinstance(found, Path):
        index = read_index(found)
        return index.files(), index
    return found, None


def read_weights(paths: Iterable[Path], index: ShardIndex | None = None) -> ShardedWeights:
    """The tensors of several files.

    Raises `Corrupt` if two files hold one tensor, `Incomplete` if the index tells of others.
    """
    files = [read_header(path) for path in paths]
    placed = [_SHARDING in file.metadata for file in files]
    tensors = _joined(files) if any(placed) else _together(files)
    if index is not None:
        index.check({name: file.path.name for file in files for name in file.tensors})
    said = {key: value for file in files for key, value in file.metadata.items() if key not in _OF_SHARDING}
    if said.get("format") == "pt":
        del said["format"]
    shards = [SourceFile(file.path, file.nbytes, "model") for file in files]
    if index is None:
        numbered = len(files) > 1 and not any(placed)
        notices = (*_of_packed(files), *((NO_INDEX,) if numbered else ()))
        return ShardedWeights(tensors, said, tuple(shards), notices, any(placed))
    notices = index.notices(sum(tensor.nbytes for tensor in tensors.values()))
    return ShardedWeights(tensors, said, (*shards, index.shard()), (*_of_packed(files), *notices))


def _of_packed(files: Sequence[SafetensorsFile]) -> tuple[Notice, ...]:
    names = tuple(name for file in files for name in file.packed)
    text = (
        "elements of 4 or 6 bits (F4, F6) are read and written as their bytes (uint8), several in one, with a last "
        "axis that is shorter by as much"
    )
    return (Notice(text, names, Weight.UNSURE),) if names else ()


@dataclass(frozen=True)
class WeightsContent:
    """What a file of weights holds besides its tensors."""

    metadata: Mapping[str, str]
    header: int
    """Bytes that the header had in the file that it once was; 0 if it was none."""


def cut(parameters: Iterable[Parameter], most: int | None) -> list[list[Parameter]]:
    """The parameters' weights in groups of at most so many bytes, or of one tensor; None: in one group."""
    groups: list[list[Parameter]] = [[]]
    held = 0
    for parameter in parameters:
        if groups[-1] and most is not None and held + parameter.weight.nbytes > most:
            groups.append([])
            held = 0
        groups[-1].append(replace(parameter, states={MODEL: parameter.weight}, values={}))
        held += parameter.weight.nbytes
    return groups


def weights_part(name: str, parameters: Sequence[Parameter], metadata: Mapping[str, str], header: int = 0) -> FilePlan:
    """The part that writes a file of weights. Raises `Unsupported` for tensors that it cannot hold.

    `header` is how many bytes the header had in the file that it once was, and has again if that is enough.
    """
    header_bytes(_slots(parameters), metadata)
    return FilePlan(name, tuple(parameters), WeightsContent(dict(metadata), header), role="model")


def write_weights(folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
    """Write the file, front to back. The receipt tells the bytes of every tensor."""
    slots = list(_slots(part.parameters))
    content = part.content
    assert isinstance(content, WeightsContent)
    head = header_bytes(slots, content.metadata, content.header, plain=bool(content.header))
    seal = write_sealed(folder, part.file, _stream(head, part.parameters, transfer))
    sizes = {slot.name: slot.nbytes for slot in slots}
    return Receipt(part.file, seal.nbytes, (seal,), sizes, transfer.reader.evidence())


def lost_states(source: Checkpoint) -> tuple[Notice, ...]:
    """The states for which files of weights have no place, in words."""
    states = sorted({state for p, state, t in source.tensors() if p.role != "extra" and t is not p.weight})
    return (Notice(f"optimizer states ({', '.join(states)})"),) if states else ()


def write_last(folder: Path, name: str, text: str) -> None:
    """A file that is there whole, or not at all."""
    draft = folder / f"{name}.tmp"
    draft.write_text(text, "utf-8")
    os.replace(draft, folder / name)


def _stream(head: bytes, parameters: Sequence[Parameter], transfer: Transfer) -> Iterator[bytes | memoryview]:
    yield head
    for parameter in parameters:
        yield from transfer.chunks(parameter.states[MODEL])


def _slots(parameters: Sequence[Parameter]) -> Iterator[TensorSlot]:
    at = 0
    for parameter in parameters:
        tensor = parameter.states[MODEL]
        yield TensorSlot(parameter.name, tensor.dtype, tensor.shape, at)
        at += tensor.nbytes


def _together(files: Sequence[SafetensorsFile]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, raw in file.tensors.items():
            if name in tensors:
                raise Corrupt(f"tensor `{printable(name)}` is in two files", where=file.path)
            tensors[name] = Tensor.of(raw)
    return tensors


def _joined(files: Sequence[SafetensorsFile]) -> dict[str, Tensor]:
    blocks: dict[str, list[tuple[Box, FileBlob]]] = {}
    for file in files:
        offsets = _offsets(file)
        for name, raw in file.tensors.items():
            blocks.setdefault(name, []).append((Box.whole(raw.shape).shift(offsets[name]), raw))
    tensors = {}
    for name, held in blocks.items():
        ranks = {len(raw.shape) for _, raw in held}
        if len(ranks) > 1:
            raise Corrupt(f"tensor `{printable(name)}`: its blocks have {sorted(ranks)} axes", where=held[-1][1].path)
        shape = tuple(map(max, zip(*(box.stop for box, _ in held), strict=True)))
        tensors[name] = from_fragments(shape, (Fragment(box, raw) for box, raw in held), held[0][1].dtype)
    return tensors


def _offsets(file: SafetensorsFile) -> dict[str, tuple[int, ...]]:
    """Where each of a file's tensors begins in the whole one."""
    if _SHARDING not in file.metadata:
        raise Corrupt("does not say where its tensors are in the whole, as the other files do", where=file.path)
    said = parse_json_object(file.metadata[_SHARDING].encode("utf-8", "surrogatepass"), file.path)
    return {name: _offset(said.get(name), name, raw, file.path) for name, raw in file.tensors.items()}


def _offset(said: Any, name: str, raw: FileBlob, path: Path) -> tuple[int, ...]:
    at = said.get("saved_offsets") if isinstance(said, dict) else None
    if not isinstance(at, list) or len(at) != len(raw.shape) or not all(is_natural(n, 1 << 48) for n in at):
        raise Corrupt(f"does not say where tensor `{printable(name)}` is in the whole: {said!r:.80}", where=path)
    return tuple(at)
