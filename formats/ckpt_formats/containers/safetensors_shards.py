"""A model in one or several safetensors files: read as one model, and split into files.

Each file may also store only blocks of tensors: PyTorch's `HuggingFaceStorageWriter` writes
one file per rank, and its metadata state where each block begins in the full tensor (source:
torch.distributed.checkpoint.hf_storage). No file states the full shape: it is computed from the blocks.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_formats.containers.safetensors import (
    SUFFIX,
    SafetensorsFile,
    TensorSlot,
    header_bytes,
    is_natural,
    parse_json_object,
    read_header,
)
from ckpt_formats.containers.shard_index import NO_COUNT, NO_INDEX, ShardIndex, one_set, read_index
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Parameter, SourceFile
from ckpt_formats.core.coming_reads import request_starts
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.folders import INDEX_SUFFIX, part_of_vllm
from ckpt_formats.core.format import FilePlan, Receipt
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import FileBlob, Fragment, Tensor, from_fragments
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer

SAFETENSORS_INDEX = f"{SUFFIX}{INDEX_SUFFIX}"
OPTIMIZER_KEY = "ckpt.optimizer"
"""The key of the metadata of a file that has states of an optimizer, too: see `state_dicts.states_beside_weights`."""
_SHARDING = "DCP_SHARDING_INFO"
_SHARDING_KEYS = ("DCP_VERSION", _SHARDING)


@dataclass(frozen=True)
class ShardedWeights:
    """The tensors of a model, and the metadata of their files."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    """Of all files together, without the entries that PyTorch writes into every file."""
    shards: tuple[SourceFile, ...]
    notices: tuple[Notice, ...] = ()
    has_blocks: bool = False
    """True if the files store blocks of tensors."""

    def aliases(self) -> dict[str, str]:
        """Further names of tied tensors, which the safetensors library stores in the metadata: alias -> name."""
        entries = self.metadata.items()
        return {alias: name for alias, name in entries if name in self.tensors and alias not in self.tensors}


def shard_paths(path: Path) -> tuple[list[Path], ShardIndex | None]:
    """The files of a model, and its index if it has one. `path` is a file, an index, or the folder of either."""
    if path.suffix != ".json" and path.is_file():
        return [path], None
    files = path if path.is_file() else one_set(path, SUFFIX)
    if isinstance(files, Path):
        index = read_index(files)
        return index.files(), index
    return files, None


def read_weights(
    paths: Iterable[Path], index: ShardIndex | None = None, *, with_states: bool = False
) -> ShardedWeights:
    """The tensors of several files. `with_states`: the caller sorts out the states of an optimizer.

    Raises `CorruptError` if two files have a tensor of the same name, `IncompleteError` if the files do not match the
    index,
    `UnsupportedError` for files of the universal format, whose names of tensors are those of states, and for a file
    with states of an optimizer if the caller does not sort them out.
    """
    paths = list(paths)
    request_starts(paths)
    files = [read_header(path) for path in paths]
    placed = [_SHARDING in file.metadata for file in files]
    tensors = _tensors_of_blocks(files) if any(placed) else _distinct_tensors(files)
    if index is not None:
        index.check({name: file.path.name for file in files for name in file.tensors})
    for file in files:
        if file.metadata.get("ckpt", "").startswith("universal "):
            raise UnsupportedError(
                "a file of a checkpoint in the universal format",
                where=file.path,
                hint="Name the folder of its manifest.json; a single file must have a name that ends in .ucp.",
            )
        if OPTIMIZER_KEY in file.metadata and not with_states:
            raise UnsupportedError(
                "holds states of an optimizer next to the weights",
                where=file.path,
                hint="Name the file itself, not its folder.",
            )
    metadata = {key: value for file in files for key, value in file.metadata.items() if key not in _SHARDING_KEYS}
    if metadata.get("format") == "pt":
        del metadata["format"]
    shards = [SourceFile(file.path, file.nbytes, "model") for file in files]
    if index is None:
        numbered = len(files) > 1 and not any(placed)
        of_vllm = any(part_of_vllm(file.path.name) is not None for file in files)
        missing = (NO_COUNT,) if of_vllm else (NO_INDEX,) if numbered else ()
        notices = (*_packed_notices(files), *missing)
        return ShardedWeights(tensors, metadata, tuple(shards), notices, any(placed))
    notices = index.notices(sum(tensor.nbytes for tensor in tensors.values()))
    return ShardedWeights(tensors, metadata, (*shards, index.shard()), (*_packed_notices(files), *notices))


def _packed_notices(files: Sequence[SafetensorsFile]) -> tuple[Notice, ...]:
    names = tuple(name for file in files for name in file.packed)
    text = (
        "elements of 4 or 6 bits (F4, F6) are read and written as bytes (uint8): a byte has several elements, so the "
        "last axis is shorter"
    )
    return (Notice(text, names, Weight.UNSURE),) if names else ()


@dataclass(frozen=True)
class WeightsContent:
    """The content of a file of weights in addition to its tensors."""

    metadata: Mapping[str, str]
    header: int
    """Length of the header in the source file, in bytes; 0 if there is none."""


def split_weights(parameters: Iterable[Parameter], max_nbytes: int | None) -> list[list[Parameter]]:
    """The parameters, with their weights only, in groups of at most `max_nbytes` bytes; None: in one group.

    A tensor that is larger is a group of its own.
    """
    groups: list[list[Parameter]] = [[]]
    nbytes = 0
    for parameter in parameters:
        if groups[-1] and max_nbytes is not None and nbytes + parameter.weight.nbytes > max_nbytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(replace(parameter, states={MODEL: parameter.weight}, values={}))
        nbytes += parameter.weight.nbytes
    return groups


def weights_part(name: str, parameters: Sequence[Parameter], metadata: Mapping[str, str], header: int = 0) -> FilePlan:
    """The plan of a file of weights. Raises `UnsupportedError` for tensors that safetensors cannot store.

    `header` is the length of the header in the source file, in bytes. The new header is padded to that length.
    """
    header_bytes(_slots(parameters), metadata)
    return FilePlan(name, tuple(parameters), WeightsContent(dict(metadata), header), role="model")


def write_weights(folder: Path, plan: FilePlan, transfer: Transfer) -> Receipt:
    """Write the file from front to back. The receipt lists the bytes of every tensor."""
    slots = list(_slots(plan.parameters))
    content = plan.content
    assert isinstance(content, WeightsContent)
    header = header_bytes(slots, content.metadata, content.header, reference_style=bool(content.header))
    seal = transfer.write_sealed(folder, plan.file, _stream(header, plan.parameters, transfer))
    sizes = {slot.name: slot.nbytes for slot in slots}
    return Receipt(plan.file, seal.nbytes, (seal,), sizes, transfer.reader.evidence())


def lost_states(source: Checkpoint) -> tuple[Notice, ...]:
    """A notice that lists the states which files of weights cannot store."""
    states = sorted({state for p, state, t in source.tensors() if p.role != "extra" and t is not p.weight})
    return (Notice(f"optimizer states ({', '.join(states)})"),) if states else ()


def write_last(folder: Path, name: str, text: str) -> None:
    """Write a text file atomically: it is complete or absent."""
    temporary = folder / f"{name}.tmp"
    temporary.write_text(text, "utf-8")
    os.replace(temporary, folder / name)


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


def _distinct_tensors(files: Sequence[SafetensorsFile]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, raw in file.tensors.items():
            if name in tensors:
                raise CorruptError(f"tensor `{printable(name)}` is in two files", where=file.path)
            tensors[name] = Tensor.of(raw)
    return tensors


def _tensors_of_blocks(files: Sequence[SafetensorsFile]) -> dict[str, Tensor]:
    blocks: dict[str, list[tuple[Box, FileBlob]]] = {}
    for file in files:
        offsets = _offsets(file)
        for name, raw in file.tensors.items():
            blocks.setdefault(name, []).append((Box.whole(raw.shape).shift(offsets[name]), raw))
    tensors = {}
    for name, members in blocks.items():
        ranks = {len(raw.shape) for _, raw in members}
        if len(ranks) > 1:
            raise CorruptError(
                f"tensor `{printable(name)}`: its blocks have {sorted(ranks)} axes", where=members[-1][1].path
            )
        shape = tuple(map(max, zip(*(box.stop for box, _ in members), strict=True)))
        tensors[name] = from_fragments(shape, (Fragment(box, raw) for box, raw in members), members[0][1].dtype)
    return tensors


def _offsets(file: SafetensorsFile) -> dict[str, tuple[int, ...]]:
    """Where each tensor of a file begins in the full tensor, by name."""
    if _SHARDING not in file.metadata:
        raise CorruptError(
            "does not state where its tensors are in the full tensors, but the other files do", where=file.path
        )
    sharding = parse_json_object(file.metadata[_SHARDING].encode("utf-8", "surrogatepass"), file.path)
    return {name: _offset(sharding.get(name), name, raw, file.path) for name, raw in file.tensors.items()}


def _offset(entry: Any, name: str, raw: FileBlob, path: Path) -> tuple[int, ...]:
    start = entry.get("saved_offsets") if isinstance(entry, dict) else None
    if not isinstance(start, list) or len(start) != len(raw.shape) or not all(is_natural(n, 1 << 48) for n in start):
        raise CorruptError(
            f"does not state where tensor `{printable(name)}` is in the full tensor: {entry!r:.80}", where=path
        )
    return tuple(start)
