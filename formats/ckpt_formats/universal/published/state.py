"""A published step as a checkpoint: each chunk is decoded from the base and the deltas after it when it is read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from ckpt_formats.containers.safetensors import parse_json_object
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Origin, Parameter
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.claims import MAX_SMALL_JSON
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.folders import CONFIG
from ckpt_formats.core.geometry import Box, Shape, flat_boxes
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import Array, FileBlob, Fragment, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import TensorName, Value
from ckpt_formats.universal.boxes.whole import part_of_vector
from ckpt_formats.universal.chunked import read_chunks
from ckpt_formats.universal.published.model import MAX_FILE, PublishedModel, PublishedTensor, TensorPiece
from ckpt_formats.universal.published.records import (
    MAX_RECORD,
    Head,
    RankShare,
    StepName,
)
from ckpt_formats.universal.published.route import find_route, ref_of
from ckpt_formats.universal.published.share import ShareHeader, decode_chunk, digest_of, header_nbytes
from ckpt_formats.universal.published.steps import HINT, read_file, read_model, read_object, read_record_at
from ckpt_formats.universal.replay import DeltaBlob, Place

_STATE = "param"


def open_step(run: Path, head: Head, name: StepName) -> Checkpoint:
    """The weights after a published step.

    Raises `NotFoundError` if it is not published, `CorruptError` if what it needs is missing or damaged.
    """
    ref = head.record if name == head.record.name else ref_of(name, read_record_at(run, name)[1])
    route = find_route(head, None, lambda key: read_file(run / key, MAX_RECORD), run, ref)
    if not route.begins_with_base:
        raise CorruptError(f"step {name.step} does not lead back to a base", where=run / name.key, hint=HINT)
    model = read_model(run, route.end.model)
    for record in route.records:
        if record.model != route.end.model or len(record.shares) != len(model.pieces):
            raise CorruptError("deltas between two models", where=run / record.key, hint=HINT)
    objects = [
        [_StoredShare(run / one.object.key, one, rank, model) for rank, one in enumerate(record.shares)]
        for record in route.records
    ]
    parameters = dict(_parameters(model, objects))
    extras = dict(_extras(run, model, parameters))
    return Checkpoint(
        path=run,
        origin=Origin("published", None, name.step, {}),
        parameters=parameters,
        extras=extras,
        aliases=dict(model.aliases),
        seals=tuple(one.seal for of_step in objects for one in of_step),
    )


@dataclass(frozen=True, eq=False)
class _StoredShare:
    """The object of a rank at one step."""

    path: Path
    share: RankShare
    rank: int
    model: PublishedModel

    @cached_property
    def header(self) -> ShareHeader:
        """Where its chunks are. Raises `CorruptError`."""
        chunks, nbytes = sum(self.model.chunk_counts(self.rank)), self.share.object.nbytes
        size = header_nbytes(chunks)
        if not size <= nbytes <= self.model.max_share_nbytes(self.rank):
            raise CorruptError(f"{nbytes:,} bytes cannot be the {chunks:,} chunks of a rank", where=self.path)
        with Reader(check=False) as reader:
            data = np.empty(size, np.uint8)
            reader.read_into(self.path, 0, data.data)
        return ShareHeader.from_bytes(data.data, chunks, nbytes, self.share, self.path)

    @cached_property
    def offsets(self) -> Array:
        """Where each chunk begins: (chunks,) int64."""
        return self.header.offsets()

    def decode(self, chunk: int, before: Array | None, out: Array, label: str, reader: Reader) -> None:
        """Fill `out` with the values of a chunk after the step. Raises `CorruptError` unless their digest fits.

        before, out: (n,) of the tensor's dtype; `before` may be `out`, and is None for a base.
        """
        data = np.empty(int(self.header.sizes[chunk]), np.uint8)
        reader.read_into(self.path, int(self.offsets[chunk]), data.data)
        decode_chunk(data.data, before, out, self.path)
        digests = reader.cached_or((self, "digests"), lambda: self._read_digests(reader))
        if digest_of(out) != digests[16 * chunk : 16 * chunk + 16].tobytes():
            raise CorruptError(f"{label}: the values of a chunk do not fit their checksum", where=self.path, hint=HINT)

    @property
    def seal(self) -> Seal:
        """The checksum of the digests of its chunks, which the record states."""
        nbytes = 16 * sum(self.model.chunk_counts(self.rank))
        return Seal(
            self.path, header_nbytes(nbytes // 16) - nbytes, nbytes, "xxh3-128", int(self.share.state, 16), "digests"
        )

    def _read_digests(self, reader: Reader) -> Array:
        """The digests of all chunks: (16 * chunks,) uint8. They are evidence that the object is the published one."""
        seal = self.seal
        digests = np.empty(seal.nbytes, np.uint8)
        reader.read_into(self.path, seal.offset, digests.data, seal)
        return digests


@dataclass(frozen=True, eq=False)
class _PublishedPiece:
    """A piece of a tensor as a replay of its chunks: a vector of its elements. See `StatesReplay`."""

    tensor: PublishedTensor
    piece: TensorPiece
    first: int
    """The number of its first chunk in the objects of its rank."""
    objects: tuple[_StoredShare, ...]
    """Those of its rank, from the base on."""
    form: Mapping[str, DType] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", {_STATE: self.tensor.dtype})

    @property
    def shape(self) -> Shape:
        return (self.piece.size,)

    @property
    def chunking(self) -> Chunking:
        return self.piece.chunking

    def values(self, index: int, reader: Reader) -> Mapping[str, Array]:
        """A chunk of the values, decoded and checked. Raises `CorruptError`."""
        return {_STATE: reader.cached_or((self, index), lambda: self._decoded(index, reader))}

    def pieces(self, box: Box) -> Iterator[tuple[Place, Box]]:
        """See `StatesReplay.pieces`."""
        for index in self.chunking.touched(box):
            for run in flat_boxes(self.shape, *self.chunking.range(index)):
                common = run & box
                if common is not None:
                    yield (str(self.objects[-1].path), self.first, index), common

    def read_into(self, state: str, box: Box, out: Array, reader: Reader) -> None:
        """See `StatesReplay.read_into`. Any shape and dtype."""
        read_chunks(out, box, self.chunking, lambda index: self.values(index, reader)[state])

    def sources(self, box: Box) -> Iterator[FileBlob]:
        """The chunks of all objects from the base on."""
        touched = self.chunking.touched(box)
        for one in self.objects if touched else ():
            first, last = self.first + touched.start, self.first + touched.stop - 1
            begin, end = int(one.offsets[first]), int(one.offsets[last] + one.header.sizes[last])
            yield FileBlob.packed(one.path, begin, (end - begin,), np.dtype(np.uint8))

    def _decoded(self, index: int, reader: Reader) -> Array:
        start, stop = self.chunking.range(index)
        values: Array | None = None
        out = np.empty(stop - start, self.tensor.dtype)
        for one in self.objects:
            one.decode(self.first + index, values, out, printable(self.tensor.name), reader)
            values = out
        return out


def _parameters(model: PublishedModel, objects: list[list[_StoredShare]]) -> Iterator[tuple[str, Parameter]]:
    fragments: list[list[Fragment]] = [[] for _ in model.tensors]
    for rank, pieces in enumerate(model.pieces):
        of_rank, first = tuple(of_step[rank] for of_step in objects), 0
        for piece in pieces:
            stored = _PublishedPiece(model.tensors[piece.tensor], piece, first, of_rank)
            first += piece.chunking.count
            vector, at = DeltaBlob.whole(stored, _STATE), 0
            for box in piece.place.boxes():
                fragments[piece.tensor].append(Fragment(box, part_of_vector(vector, at, box.shape)))
                at += box.size
    for tensor, own in zip(model.tensors, fragments, strict=True):
        yield tensor.name, Parameter(tensor.name, "parameter", {MODEL: Tensor(tensor.shape, tensor.dtype, tuple(own))})


def _extras(run: Path, model: PublishedModel, parameters: dict[str, Parameter]) -> Iterator[tuple[str, Value]]:
    """The files of the model as the reader of Hugging Face's folders has them: JSON as values, others as bytes."""
    for name, ref in model.files.items():
        key, path = f"hf/{name}", run / ref.key
        if name == CONFIG or (name.endswith(".json") and ref.nbytes <= MAX_SMALL_JSON):
            data = read_object(run, ref, MAX_FILE)
            try:
                yield key, parse_json_object(data, path)
                continue
            except CorruptError:
                if name == CONFIG:
                    raise
        if ref.nbytes > MAX_FILE:
            raise CorruptError(f"{ref.nbytes:,} bytes are too many for the file {name!r}", where=path)
        if key not in parameters:
            seal = Seal(path, 0, ref.nbytes, "xxh3-128", int(ref.hash, 16), name)
            blob = FileBlob.packed(path, 0, (ref.nbytes,), np.dtype(np.uint8), seal)
            parameters[key] = Parameter(key, "extra", {MODEL: Tensor.of(blob)})
            yield key, TensorName(key)
