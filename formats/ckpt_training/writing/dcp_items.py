"""Write saves as PyTorch Distributed Checkpoints: the items of a rank, and the metadata of all. Needs no torch.

An item is an archive of torch.save. Where the values are in it follows from their type and shape, so they are written
as they come, and what is around them, with their checksums, at the end.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ckpt.pipeline import check_complete
from ckpt_codecs.base import Array, Bytes
from ckpt_formats.containers.torchfile import FileLayout
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, IncompleteError, InvalidArgumentError
from ckpt_formats.core.files import Reader, write_at
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.own_folder import create_own
from ckpt_formats.core.publish import flush
from ckpt_formats.core.seals import crc32
from ckpt_formats.core.tensor import BlockBlob, Fragment, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Value
from ckpt_formats.engines.dcp.entries import Entry, EntryLayouts
from ckpt_formats.engines.dcp.nesting import flattened
from ckpt_formats.engines.dcp.write import block_json, write_items, write_metadata
from ckpt_formats.state_dicts.keys import StateKeys
from ckpt_formats.state_dicts.write import state_tree
from ckpt_formats.universal.boxes import CheckpointNotes, RankBox

_OBJECTS = "__0_1.distcp"
"""The second file of rank 0, with what its process knows only when all ranks have written."""


def items_file(rank: int) -> str:
    """Return the name that torch gives the first file of a rank."""
    return f"__{rank}_0.distcp"


@dataclass(frozen=True)
class SavedItem:
    """A block of a state of a parameter, and where its item is in the file of a rank."""

    parameter: str
    role: str
    state: str
    dtype: str
    shape: Sequence[int]
    """That of the full tensor."""
    start: Sequence[int]
    sizes: Sequence[int]
    """Where the block begins in the tensor, and its shape."""
    at: int
    nbytes: int
    """The range of bytes in the file."""

    @property
    def box(self) -> Box:
        return Box(tuple(self.start), tuple(low + n for low, n in zip(self.start, self.sizes, strict=True)))


@dataclass(frozen=True)
class DcpReceipt:
    """The file of a rank: its items. No values."""

    save: str
    """What all ranks of one save have in common."""
    number: int
    nbytes: int
    items: Sequence[SavedItem]

    def to_bytes(self) -> bytes:
        """The receipt as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: Path) -> "DcpReceipt":
        """The receipt in bytes that came from `where`. Raises `CorruptError`."""
        try:
            fields = json.loads(data)
            return cls(**{**fields, "items": [SavedItem(**item) for item in fields["items"]]})
        except (ValueError, TypeError, KeyError):
            raise CorruptError("not the receipt of a file of items", where=where) from None


@dataclass
class _OpenItem:
    item: SavedItem
    layout: FileLayout
    first: int
    """Where its values begin in the state of the box, in bytes."""
    checksum: int = 0

    @property
    def values_nbytes(self) -> int:
        return self.layout.storages[0].nbytes


class ItemsFile:
    """The file of items of one rank while it is written."""

    def __init__(self, folder: Path, number: int, boxes: Sequence[RankBox], save: str) -> None:
        """Begin the file of the rank `number` in `folder`. `boxes`: all that the rank saves. `save`: as in `RankPack`.

        Raises `OutputError` if the file cannot be created, `UnsupportedError` for types that PyTorch does not have.
        """
        self._path, self._number, self._save = folder / items_file(number), number, save
        self._states: dict[tuple[int, str], list[_OpenItem]] = {}
        self._received: dict[tuple[int, str], int] = {}
        self._end = 0
        layouts = EntryLayouts()
        for row, box in enumerate(boxes):
            for state, dtype in box.states.items():
                self._states[row, state] = list(self._placed(box, state, dtype, layouts))
                self._received[row, state] = 0
        try:
            self._file = create_own(self._path)
        except OSError as error:
            raise unwritable(error, self._path) from error

    def _placed(self, box: RankBox, state: str, dtype: str, layouts: EntryLayouts) -> Iterator[_OpenItem]:
        place, first = box.place, 0
        for block in [*place.boxes()] or [place.block]:  # a tensor without elements has an item, too
            layout = layouts.of_block(DTYPES[dtype], block.shape)
            item = SavedItem(
                box.parameter, box.role, state, dtype, place.shape, block.start, block.shape, self._end, layout.nbytes
            )
            yield _OpenItem(item, layout, first)
            self._end += layout.nbytes
            first += block.size * DTYPES[dtype].itemsize

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def add(self, box: int, state: str, offset: int, data: Bytes) -> None:
        """Add the bytes of a state of the box with this number, from byte `offset` of the state on.

        Boxes and states may come in any order; the bytes of one state come front to back. Values are little-endian, in
        C order. Raises `InvalidArgumentError` for bytes that are not the next ones of a state, `OutputError` if they
        cannot be written.
        """
        view, items = memoryview(data).cast("B"), self._states.get((box, state), [])
        end = offset + len(view)
        if not items or offset != self._received[box, state] or end > items[-1].first + items[-1].values_nbytes:
            raise InvalidArgumentError(
                f"box {box}: bytes {offset} to {end} are not the next ones of `{printable(state)}`"
            )
        for one in items:
            low, high = max(offset, one.first), min(end, one.first + one.values_nbytes)
            if low < high:
                part = view[low - offset : high - offset]
                self._write(part, one.item.at + one.layout.storages[0].offset + low - one.first)
                one.checksum = crc32(part, one.checksum)
        self._received[box, state] = end

    def finish(self) -> DcpReceipt:
        """Write what is around the values, and flush the file to the disk. Returns what the metadata need.

        Raises `InvalidArgumentError` if bytes of a state were not added, `OutputError` if they cannot be written.
        """
        for (box, state), items in self._states.items():
            if self._received[box, state] != items[-1].first + items[-1].values_nbytes:
                raise InvalidArgumentError(f"box {box}: bytes of `{printable(state)}` were not added")
            for one in items:
                for at, data in one.layout.frame([one.checksum]):
                    self._write(memoryview(data), one.item.at + at)
        self.__exit__(None, None, None)
        flush(self._path)
        written = [one.item for of_state in self._states.values() for one in of_state]
        return DcpReceipt(self._save, self._number, self._end, written)

    def _write(self, data: memoryview, at: int) -> None:
        try:
            write_at(self._file, data, at)
        except OSError as error:
            raise unwritable(error, self._path) from error


@dataclass(frozen=True, slots=True)
class ItemBlock(BlockBlob):
    """The block of an item that a rank has written. Its values are not read: the metadata state where they are."""

    box: Box
    dtype: DType
    file: str
    item: SavedItem

    def read_into(self, out: Array, reader: Reader) -> None:
        raise AssertionError("values of a save are not read again")


def assemble_items(
    folder: Path, receipts: Sequence[DcpReceipt], notes: CheckpointNotes, keys: StateKeys, *, elsewhere: bool
) -> None:
    """Write the values that are no tensors, and `.metadata`, which makes the files of all ranks a checkpoint.

    Args:
        folder: Of the checkpoint. It has the files of the ranks, unless these are `elsewhere`, in a store.
        receipts: Of all ranks.
        notes: Everything that is no tensor.
        keys: The keys of the state dicts.
        elsewhere: The caller compares the files with the receipts.

    Raises `IncompleteError` if a file is missing, or the items do not have each element of each tensor once;
    `InvalidArgumentError` for receipts of several saves; `OutputError` if a file cannot be written.
    """
    if len({one.save for one in receipts}) != 1:
        raise InvalidArgumentError("receipts of several saves", where=str(folder))
    for one in () if elsewhere else receipts:
        file = folder / items_file(one.number)
        if not file.is_file() or file.stat().st_size != one.nbytes:
            raise IncompleteError("the file is not as its receipt states", where=file)
    source = _checkpoint(folder, receipts, notes)
    check_complete(source)
    rows: dict[str, list[Any]] = {items_file(one.number): [] for one in receipts}
    others: list[Entry] = []
    for number, (name, path, value) in enumerate(flattened(state_tree(source, keys, objects=True))):
        if not _is_saved(value):
            box = Box.whole(value.shape) if isinstance(value, Tensor) else None
            others.append(Entry(name, path, number, value, box))
            continue
        for chunk, fragment in enumerate(value.fragments):
            block = fragment.blob
            assert isinstance(block, ItemBlock)
            item = [number, name, list(path), block.item.at, block.item.nbytes]
            rows[block.file].append([*item, *block_json(value.dtype.name, value.shape, chunk, fragment.box)])
    try:
        with Reader(check=False) as reader, Transfer(reader) as transfer:
            objects = write_items(folder, _OBJECTS, others, transfer)
        files = [Receipt(name, 0, (), {"items": items}) for name, items in rows.items()]
        write_metadata(folder, [*files, objects])
        flush(folder)
    except OSError as error:
        raise unwritable(error, folder) from error


def _checkpoint(folder: Path, receipts: Sequence[DcpReceipt], notes: CheckpointNotes) -> Checkpoint:
    """All items as the fragments of a checkpoint's tensors."""
    fragments: dict[str, dict[str, list[tuple[SavedItem, Fragment]]]] = {name: {} for name in notes.order}
    for receipt in receipts:
        for item in receipt.items:
            block = ItemBlock(item.box, DTYPES[item.dtype], items_file(receipt.number), item)
            of_state = fragments.setdefault(item.parameter, {}).setdefault(item.state, [])
            of_state.append((item, Fragment(item.box, block)))
    if missing := next((name for name, states in fragments.items() if not states), None):
        raise IncompleteError(f"no rank has a part of `{printable(missing)}`", where=folder)
    parameters = {name: _parameter(name, states, notes.values.get(name, {})) for name, states in fragments.items()}
    return Checkpoint(
        path=folder,
        origin=notes.origin,
        parameters=parameters,
        groups=tuple(notes.groups),
        extras=notes.extras,
        aliases=notes.aliases,
    )


def _parameter(
    name: str, states: Mapping[str, Sequence[tuple[SavedItem, Fragment]]], values: Mapping[str, Value]
) -> Parameter:
    tensors = {}
    for state, of_state in states.items():
        first = of_state[0][0]
        tensors[state] = Tensor(_shape(first), DTYPES[first.dtype], tuple(fragment for _, fragment in of_state))
    role = next(iter(states.values()))[0][0].role
    return Parameter(name, role, tensors, values)  # type: ignore[arg-type]  # `Parameter` checks it


def _shape(item: SavedItem) -> Shape:
    return tuple(item.shape)


def _is_saved(value: Value) -> bool:
    """Whether ranks have written the blocks of a tensor."""
    return isinstance(value, Tensor) and isinstance(value.fragments[0].blob, ItemBlock)
