"""What a published state consists of: tensors, the elements that each rank has, and files such as `config.json`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from ckpt_formats.containers import sealed_json
from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.core.chunking import DEFAULT_ELEMENTS, Chunking
from ckpt_formats.core.claims import MAX_AXES, MAX_ELEMENTS, MAX_EXPECTED_NAMES, MAX_FILE_NAME, MAX_NAME, MAX_RANKS
from ckpt_formats.core.dtypes import DTYPES, NAMES, DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.values import is_natural
from ckpt_formats.universal.boxes.check_table import first_gap_or_overlap
from ckpt_formats.universal.boxes.table import BoxPlace
from ckpt_formats.universal.published.records import VERSION, ObjectRef

MAX_MODEL = 1 << 30
"""Bytes of the description of a model."""
MAX_FILE = 1 << 26
"""Bytes of a file such as a tokenizer's."""


@dataclass(frozen=True)
class PublishedTensor:
    """A tensor of the published state, in the name and dtype of those that follow."""

    name: str
    dtype: DType
    shape: Shape


@dataclass(frozen=True)
class TensorPiece:
    """Elements of one tensor that a rank has: a block, or a range of its elements in C order."""

    tensor: int
    place: BoxPlace

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.place.size

    @cached_property
    def chunking(self) -> Chunking:
        """Its elements in C order, in chunks of 2^18."""
        return Chunking((self.size,), (DEFAULT_ELEMENTS,))


@dataclass(frozen=True)
class PublishedModel:
    """Describes all states of an epoch; a delta and its parent have the same model."""

    tensors: tuple[PublishedTensor, ...]
    pieces: tuple[tuple[TensorPiece, ...], ...]
    """By rank, in the order of their tensors."""
    files: Mapping[str, ObjectRef]
    """Files that a folder of the model has next to its weights, by name."""
    aliases: Mapping[str, str]
    """Further names of tensors, with the name under which each is published."""

    @property
    def nbytes(self) -> int:
        """The bytes of a state."""
        return sum(prod(one.shape) * one.dtype.itemsize for one in self.tensors)

    def chunk_counts(self, rank: int) -> list[int]:
        """The number of chunks of each piece of a rank."""
        return [piece.chunking.count for piece in self.pieces[rank]]

    def max_share_nbytes(self, rank: int) -> int:
        """The most bytes that an object of a rank may have: no codec takes more than its values and a sixteenth."""
        values = sum(piece.size * self.tensors[piece.tensor].dtype.itemsize for piece in self.pieces[rank])
        return values + values // 16 + 1024 * (sum(self.chunk_counts(rank)) + 1)

    def to_bytes(self) -> bytes:
        """The description as bytes, the same for the same model."""
        return sealed_json.dump(
            {
                "format": "ckpt-published-model",
                "version": VERSION,
                "files": {name: ref.to_json() for name, ref in sorted(self.files.items())},
                "aliases": dict(sorted(self.aliases.items())),
                "tensors": [[one.name, NAMES[one.dtype], list(one.shape)] for one in self.tensors],
                "ranks": [[_piece_to_json(piece) for piece in own] for own in self.pieces],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, where: Path) -> "PublishedModel":
        """The description in bytes that came from `where`.

        Raises `CorruptError` unless the ranks have every element of every tensor exactly once; `UnsupportedError` for
        another version or an unknown dtype.
        """
        fields, check = sealed_json.parse(data, where, "the model of a published chain"), FieldReader(where)
        check.true(fields.get("format") == "ckpt-published-model", "format")
        version = fields.get("version")
        if not is_natural(version) or version != VERSION:
            raise UnsupportedError(
                f"the model of a published chain: version {version!r:.30}; this program reads version {VERSION}",
                where=where,
                hint="Upgrade ckpt.",
            )
        files = check.mapping(fields, "files")
        for name in files:
            check.true(is_file_name(name), f"files: {name!r:.100} is not the name of a file")
        rows = check.sequence(fields, "tensors")
        check.true(len(rows) <= MAX_EXPECTED_NAMES, "tensors: their number")
        tensors = tuple(_tensor_of_json(row, check) for row in rows)
        names = {one.name for one in tensors}
        check.true(len(names) == len(tensors), "tensors: a name twice")
        aliases = check.mapping(fields, "aliases")
        valid = all(isinstance(name, str) and name in names for name in aliases.values())
        check.true(valid and not names & aliases.keys(), "aliases: not of tensors")
        ranks = check.sequence(fields, "ranks")
        check.true(0 < len(ranks) <= MAX_RANKS, "ranks: their number")
        pieces = tuple(_pieces_of_json(row, tensors, check) for row in ranks)
        _check_complete(tensors, pieces, check)
        return cls(tensors, pieces, {name: ObjectRef.from_json(row, check) for name, row in files.items()}, aliases)

    def with_files(self, files: Mapping[str, ObjectRef]) -> "PublishedModel":
        """The model with other files."""
        return PublishedModel(self.tensors, self.pieces, files, self.aliases)


def _piece_to_json(piece: TensorPiece) -> list[Any]:
    """The tensor and its block; then, for a range of the block's elements, its first element and their number."""
    place = piece.place
    row: list[Any] = [piece.tensor, list(place.block.start), list(place.block.stop)]
    return row if place.size == place.block.size else [*row, place.first, place.size]


def is_file_name(name: str) -> bool:
    """Whether a model may have a file of this name."""
    printable = name.isprintable() and len(name.encode("utf-8", "replace")) <= MAX_FILE_NAME
    return printable and not name.startswith(".") and "/" not in name and "\\" not in name and bool(name)


def _tensor_of_json(row: Any, check: FieldReader) -> PublishedTensor:
    valid = isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and len(row[0]) <= MAX_NAME
    check.true(valid and isinstance(row[1], str) and _is_shape(row[2]), "tensors: not a name, dtype and shape")
    name, dtype, shape = row
    check.true(prod(max(length, 1) for length in shape) <= MAX_ELEMENTS, f"tensors: the shape of {name!r:.100}")
    if dtype not in DTYPES:
        raise UnsupportedError(f"{name!r:.100} has the dtype {dtype!r:.30}, which ckpt does not know", where=check.path)
    return PublishedTensor(name, DTYPES[dtype], tuple(shape))


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_AXES and all(map(is_natural, value))


def _pieces_of_json(rows: Any, tensors: Sequence[PublishedTensor], check: FieldReader) -> tuple[TensorPiece, ...]:
    check.true(isinstance(rows, list), "ranks: not a list")
    pieces = []
    for row in rows:
        valid = isinstance(row, list) and len(row) in (3, 5) and is_natural(row[0]) and row[0] < len(tensors)
        check.true(valid and _is_shape(row[1]) and _is_shape(row[2]), "ranks: not a tensor and a block")
        shape = tensors[row[0]].shape
        inside = len(row[1]) == len(row[2]) == len(shape)
        inside = inside and all(a <= b <= n for a, b, n in zip(row[1], row[2], shape, strict=True))
        check.true(inside, "ranks: a block that is not within its tensor")
        block, first, own = Box(tuple(row[1]), tuple(row[2])), 0, None
        if len(row) == 5:
            check.true(all(map(is_natural, row[3:])) and sum(row[3:]) <= block.size, "ranks: a range of a block")
            first, own = row[3], (row[4],)
        pieces.append(TensorPiece(row[0], BoxPlace(shape, block, first, block.shape if own is None else own)))
    in_order = all(a.tensor <= b.tensor for a, b in pairwise(pieces))
    check.true(in_order, "ranks: pieces that are not in the order of the tensors")
    return tuple(pieces)


def _check_complete(
    tensors: Sequence[PublishedTensor], pieces: Sequence[Sequence[TensorPiece]], check: FieldReader
) -> None:
    places: list[list[BoxPlace]] = [[] for _ in tensors]
    for own in pieces:
        for piece in own:
            places[piece.tensor].append(piece.place)
    for tensor, of_tensor in zip(tensors, places, strict=True):
        missing = "no rank has it" if prod(tensor.shape) else None
        wrong = first_gap_or_overlap(of_tensor) if of_tensor else missing
        check.true(wrong is None, f"{tensor.name!r:.100}: {wrong}")


def model_digest(model: PublishedModel) -> str:
    """By what two models have the same names, shapes and dtypes, whatever their ranks and files."""
    rows = [[one.name, NAMES[one.dtype], list(one.shape)] for one in model.tensors]
    return ObjectRef.of(json.dumps(sorted(rows), separators=(",", ":")).encode()).hash
