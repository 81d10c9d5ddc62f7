"""Read blocks of tensors from items of `.distcp` files, which are archives of torch.save, one after another.

`.metadata` is enough to list a block. The item is opened only when the block's values,
problems or checksum are needed: this gives the place of the values in the item, and checks
that they agree with `.metadata`. A checkpoint may have hundreds of thousands of items, and
opening the checkpoint opens none of them.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import overload

from ckpt_formats.containers.compressed_range import DecompressedBlob, Frame, zstd_decoder
from ckpt_formats.containers.torchfile import ParsedTemplate, TensorRef, Window, open_item, tensor_of
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, NotFoundError, UnsupportedError
from ckpt_formats.core.files import Reader, open_regular
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.seals import LazySeals, Seal
from ckpt_formats.core.store_path import is_remote, request
from ckpt_formats.core.tensor import Array, Blob, FileBlob, FileProblem, cut_short
from ckpt_formats.core.text import printable
from ckpt_formats.engines.dcp.metadata import ItemRange

_EDGE = 4096
"""Bytes read at both ends of an item. In archives of torch.save, they contain everything but the tensor's values."""
_COMPRESSED = "stream.zstd/1"
"""The transformation that DCP states of an item which zstd compressed. It decodes to the archive of an ordinary one."""
_MAX_KNOWN = 1 << 16
_MAX_FORMS = 1 << 12
_MAX_OVERHEAD = 1 << 24


_MAX_COMING = 16
"""Items of a file whose ends are requested at once."""


class _ComingItems:
    """The items of a folder in a store, by their order in each file. Threads may share it."""

    def __init__(self, folder: Path, items: Sequence[Collection[ItemRange]], edge: int) -> None:
        """`items`: those that each metadata file names. `edge`: the bytes of an item's end that are read."""
        self._folder, self._items, self._edge = folder, items, edge
        self._extents: dict[str, list[tuple[int, int]]] | None = None
        self._places: dict[str, tuple[int, int]] = {}
        """By file: the number of the item that was opened last, and how many were opened in a row before it."""
        self._lock = Lock()

    def opened(self, item: ItemRange) -> None:
        """Request the ends of the items that will be opened next, if this one goes on a row."""
        with self._lock:
            extents = self._of(item.file)
            number = bisect_left(extents, (item.offset, 0))
            last, row = self._places.get(item.file, (-1, -1))
            if number == last:
                return
            row = row + 1 if number == last + 1 else 0
            self._places[item.file] = number, row
        path = self._folder / item.file
        for offset, nbytes in extents[number + 1 : number + 1 + min(row, _MAX_COMING)]:
            request(path, offset, self._edge)
            request(path, max(offset, offset + nbytes - self._edge), self._edge)

    def _of(self, file: str) -> list[tuple[int, int]]:
        """The offsets and lengths of the items of a file, in order."""
        if self._extents is None:
            self._extents = {}
            for item in (item for items in self._items for item in items):
                self._extents.setdefault(item.file, []).append((item.offset, item.nbytes))
            for extents in self._extents.values():
                extents.sort()
        return self._extents.get(file, [])


@dataclass(eq=False)
class ItemReader:
    """Opens the items of one folder. Caches the places of values in the last items."""

    folder: Path
    items: Sequence[Collection[ItemRange]] = field(default=(), repr=False)
    """All items that each metadata file names."""
    _known: dict[tuple[str, int, int], Blob] = field(default_factory=dict, repr=False)
    _forms: dict[tuple[int, DType, Shape], ParsedTemplate] = field(default_factory=dict, repr=False)
    _paths: dict[str, Path] = field(default_factory=dict, repr=False)
    """The path of each file: a path is hashed often, and keeps its hash."""

    def window(self, item: ItemRange, max_nbytes: int) -> Window | Frame:
        """The bytes of an item, decoded if it is compressed, then at most `max_nbytes`.

        Raises `CorruptError`, `UnsafeError`, `NotFoundError` or `UnsupportedError`.
        """
        path = self._paths.get(item.file)
        if path is None:
            path = self._paths[item.file] = self.folder / item.file
        window = Window(path, item.offset, item.nbytes, _EDGE)
        if not item.transforms:
            return window
        with window:
            if item.transforms != (_COMPRESSED,):
                names = ", ".join(printable(name) for name in item.transforms)
                raise UnsupportedError(f"the item was transformed by {names:.200}, which is unknown", where=path)
            return Frame(path, item.offset, item.nbytes, max_nbytes, zstd_decoder)

    def blob(self, block: "ItemBlob") -> Blob:
        """All values of a block.

        Raises like `window`, and `CorruptError` if the item is not what `.metadata` states.
        """
        key = (block.item.file, block.item.offset, block.item.nbytes)
        blob = self._known.get(key)
        if blob is None:
            try:
                blob = self._open_item(block)
            except CkptError as error:
                error.where = f"{self.folder / block.item.file}, {block.label}"
                raise
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = blob
        if blob.dtype != block.dtype or blob.shape != block.at.shape:
            raise CorruptError(
                f"the item holds {blob.dtype.name} {list(blob.shape)}, but .metadata states "
                f"{block.dtype.name} {list(block.at.shape)}",
                where=f"{self.folder / block.item.file}, {block.label}",
            )
        return blob

    def cut_short(self, item: ItemRange) -> FileProblem | None:
        """The problem of a file that ends before this item does; None if it does not."""
        path, end = self.folder / item.file, item.offset + item.nbytes
        try:
            nbytes = path.stat().st_size
        except (OSError, CkptError):
            return None
        return cut_short(path, nbytes, self._ends.get(item.file, end)) if nbytes < end else None

    @cached_property
    def _ends(self) -> Mapping[str, int]:
        """Where the last item of each file ends, as far as the metadata are known here."""
        ends: dict[str, int] = {}
        for item in chain.from_iterable(self.items):
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.nbytes)
        return ends

    def __getstate__(self) -> Path:
        return self.folder

    def __setstate__(self, folder: Path) -> None:
        self.folder, self.items, self._known, self._forms, self._paths = folder, (), {}, {}, {}

    @cached_property
    def _coming(self) -> _ComingItems | None:
        """None if the folder is in no store, or its metadata is not known here."""
        return _ComingItems(self.folder, self.items, _EDGE) if is_remote(self.folder) and self.items else None

    def _open_item(self, block: "ItemBlob") -> Blob:
        if self._coming is not None:
            self._coming.opened(block.item)
        with self.window(block.item, 2 * block.at.size * block.dtype.itemsize + _MAX_OVERHEAD) as window:
            form = (block.item.nbytes, block.dtype, block.at.shape)
            known = self._forms.get(form)
            if known is not None and isinstance(window, Window) and (crc := known.checksum(window)) is not None:
                return _from_template(known, crc, window, block)
            file = open_item(window)
            if type(file.root) is not TensorRef:
                raise CorruptError("the item holds no tensor")
            (fragment,) = tensor_of(file.root).fragments
            raw = fragment.blob
            assert isinstance(raw, FileBlob)
            if isinstance(window, Frame):
                window.check(file.seals())
                return DecompressedBlob(window, replace(raw, seal=None))
            if (template := file.as_template(window)) is not None and len(self._forms) < _MAX_FORMS:
                self._forms[form] = template
            return raw if raw.seal is None else replace(raw, seal=replace(raw.seal, label=block.label))


def _from_template(known: ParsedTemplate, crc: int, window: Window, block: "ItemBlob") -> FileBlob:
    """The values of an item that has the same form as an earlier one."""
    raw, base = known.blob, window.base
    seal = Seal(window.path, base + known.start, known.stop - known.start, "crc32", crc, block.label)
    return FileBlob(window.path, base + raw.offset, raw.shape, raw.dtype, raw.strides, seal)


# Not frozen, like `ItemRange`: there is one for each block.
@dataclass(slots=True, eq=False)
class ItemBlob(Blob):
    """The blob of one item, or of a block of it."""

    name: str
    """The name of the tensor, for messages."""
    at: Box
    """The block of the tensor that the complete item is."""
    dtype: DType
    item: ItemRange
    items: ItemReader
    part: Box | None = None
    """The part of the item, relative to its first element; None for the complete item."""

    @property
    def shape(self) -> Shape:
        return self.at.shape if self.part is None else self.part.shape

    @property
    def label(self) -> str:
        """Name and block of the tensor, for messages."""
        return f"`{printable(self.name)}` {self.at}"

    @property
    def reads_in_place(self) -> bool:
        return self._blob().reads_in_place

    def crop(self, box: Box) -> "ItemBlob":
        part = box if self.part is None else box.shift(self.part.start)
        return ItemBlob(self.name, self.at, self.dtype, self.item, self.items, part)

    def read_into(self, out: Array, reader: Reader) -> None:
        """Read the values into `out`, an array of this shape and dtype. Raises like `ItemReader.blob`."""
        self._blob().read_into(out, reader)

    def sources(self) -> Iterator[FileBlob]:
        """The stored values. Empty if the item cannot be opened; then `problems` states the reason."""
        try:
            blob = self._blob()
        except (CorruptError, IncompleteError, NotFoundError):
            return
        yield from blob.sources()

    def problems(self) -> Iterator[str | FileProblem]:
        """The error, if the item cannot be opened."""
        try:
            self.items.blob(self)
        except (CorruptError, IncompleteError, NotFoundError) as error:
            yield self.items.cut_short(self.item) or str(error)

    def seals(self) -> Iterator[Seal]:
        """The checksums of the block's values, if the item can be opened and has any."""
        yield from (raw.seal for raw in self.sources() if raw.seal is not None)

    def _blob(self) -> Blob:
        blob = self.items.blob(self)
        return blob if self.part is None else blob.crop(self.part)


class ItemSeals(LazySeals):
    """The checksums of all items. They are inside the items, which are opened at the first access."""

    def __init__(self, blocks: Sequence[ItemBlob], object_seals: Sequence[Seal]) -> None:
        self._blocks, self._object_seals = blocks, object_seals
        self._opened: tuple[Seal, ...] | None = None

    def listed(self) -> Sequence[Seal]:
        """Those of the objects, which are opened with the checkpoint."""
        return self._object_seals

    @property
    def _all(self) -> tuple[Seal, ...]:
        if self._opened is None:
            self._opened = (*self._object_seals, *(seal for block in self._blocks for seal in block.seals()))
        return self._opened

    @overload
    def __getitem__(self, index: int) -> Seal: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Seal, ...]: ...
    def __getitem__(self, index: int | slice) -> Seal | tuple[Seal, ...]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)


def unnamed_bytes(folder: Path, sizes: Mapping[str, int], items: Iterable[ItemRange]) -> Iterator[Notice]:
    """Yield a notice on files with bytes that belong to no item: torch writes items without gaps.

    Raises `CorruptError` if bytes after the last item are not padding: then a later save overwrote the file.
    """
    named: dict[str, dict[int, int]] = {}
    for item in items:
        lengths = named.setdefault(item.file, {})
        lengths[item.offset] = max(item.nbytes, lengths.get(item.offset, 0))
    gaps: list[str] = []
    for file, lengths in named.items():
        end, size = max(start + nbytes for start, nbytes in lengths.items()), sizes.get(file, 0)
        if size > end:
            with open_regular(folder / file) as opened:
                opened.seek(end)
                if opened.read(_EDGE).strip(b"\0"):
                    raise CorruptError(
                        f"{printable(file)} has {size - end:,} bytes after the last item that .metadata names",
                        where=folder,
                        hint="A later save overwrote the file: copy all files of one save again.",
                    )
        if sum(lengths.values()) < end:
            gaps.append(file)
    if gaps:
        text = "these files contain bytes that belong to no item of .metadata: they are not read"
        yield Notice(text, tuple(gaps), Weight.LOST)
