"""Blocks of tensors as items of `.distcp` files: archives of torch.save, one after another.

What `.metadata` says of a block is enough to list it. Where in its item the
values lie, and that the item holds what `.metadata` says, is found out when
the block is first asked for its values, its problems or its checksum: a
checkpoint may have hundreds of thousands of items, and opening it opens none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import overload

from ckpt_formats.containers.torchfile import ParsedTemplate, TensorRef, Window, open_item, tensor_of
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import CkptError, Corrupt, Incomplete, NotFound, Unsupported
from ckpt_formats.core.files import Reader, Seal, open_regular
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Array, Blob, FileBlob
from ckpt_formats.core.text import printable
from ckpt_formats.engines.dcp.compressed_items import DESCRIPTOR, DecompressedBlob, Frame
from ckpt_formats.engines.dcp.metadata import ItemRange

_EDGE = 4096
"""Bytes read at either end of an item: all of an archive that is no tensor data fits, as torch writes it."""
_MOST_KNOWN = 1 << 16
_MOST_FORMS = 1 << 12
_MOST_OVERHEAD = 1 << 24


@dataclass(eq=False)
class ItemReader:
    """The items of one folder, and where in them the values of the last few lie."""

    folder: Path
    _known: dict[tuple[str, int, int], Blob] = field(default_factory=dict, repr=False)
    _forms: dict[tuple[int, DType, Shape], ParsedTemplate] = field(default_factory=dict, repr=False)

    def window(self, item: ItemRange, most: int) -> Window | Frame:
        """The bytes of an item, which may decode to so many. Raises `Corrupt`, `Unsafe`, `NotFound`, `Unsupported`."""
        path = self.folder / item.file
        window = Window(path, item.offset, item.nbytes, _EDGE)
        if not item.transforms:
            return window
        with window:
            if item.transforms != (DESCRIPTOR,):
                names = ", ".join(printable(name) for name in item.transforms)
                raise Unsupported(f"the item went through {names:.200}, which is unknown", where=path)
            return Frame(path, item.offset, item.nbytes, most)

    def blob(self, block: "ItemBlob") -> Blob:
        """All values of a block. Raises as `window` does, and `Corrupt` if the item does not hold what it should."""
        key = (block.item.file, block.item.offset, block.item.nbytes)
        found = self._known.get(key)
        if found is None:
            try:
                found = self._found(block)
            except CkptError as error:
                error.where = f"{self.folder / block.item.file}, {block.label}"
                raise
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = found
        if found.dtype != block.dtype or found.shape != block.at.shape:
            raise Corrupt(
                f"the item holds {found.dtype.name} {list(found.shape)}, but .metadata says "
                f"{block.dtype.name} {list(block.at.shape)}",
                where=f"{self.folder / block.item.file}, {block.label}",
            )
        return found

    def __getstate__(self) -> Path:
        return self.folder

    def __setstate__(self, folder: Path) -> None:
        self.folder, self._known, self._forms = folder, {}, {}

    def _found(self, block: "ItemBlob") -> Blob:
        with self.window(block.item, 2 * block.at.size * block.dtype.itemsize + _MOST_OVERHEAD) as window:
            form = (block.item.nbytes, block.dtype, block.at.shape)
            known = self._forms.get(form)
            if known is not None and isinstance(window, Window) and (crc := known.checksum(window)) is not None:
                return _placed(known, crc, window, block)
            file = open_item(window)
            if type(file.root) is not TensorRef:
                raise Corrupt("the item holds no tensor")
            (fragment,) = tensor_of(file.root).fragments
            raw = fragment.blob
            assert isinstance(raw, FileBlob)
            if isinstance(window, Frame):
                window.check(file.seals())
                return DecompressedBlob(window, replace(raw, seal=None))
            if (found := file.as_template(window)) is not None and len(self._forms) < _MOST_FORMS:
                self._forms[form] = found
            return raw if raw.seal is None else replace(raw, seal=replace(raw.seal, label=block.label))


def _placed(known: ParsedTemplate, crc: int, window: Window, block: "ItemBlob") -> FileBlob:
    """The values of an item that is like another."""
    raw, base = known.blob, window.base
    seal = Seal(window.path, base + known.start, known.stop - known.start, "crc32", crc, block.label)
    return FileBlob(window.path, base + raw.offset, raw.shape, raw.dtype, raw.strides, seal)


# Not frozen, as items are not: there are as many.
@dataclass(slots=True, eq=False)
class ItemBlob:
    """The blob of one item, or of a block of it."""

    name: str
    """Of the tensor, for messages."""
    at: Box
    """Where in the tensor all of the item belongs."""
    dtype: DType
    item: ItemRange
    items: ItemReader
    part: Box | None = None
    """Counted from the item's corner; None for all of it."""

    @property
    def shape(self) -> Shape:
        return self.at.shape if self.part is None else self.part.shape

    @property
    def label(self) -> str:
        return f"`{printable(self.name)}` {self.at}"

    def crop(self, box: Box) -> "ItemBlob":
        part = box if self.part is None else box.shift(self.part.start)
        return ItemBlob(self.name, self.at, self.dtype, self.item, self.items, part)

    def read_into(self, out: Array, reader: Reader) -> None:
        self._blob().read_into(out, reader)

    def sources(self) -> Iterator[FileBlob]:
        """None where the item cannot be opened: then `problems` says why."""
        try:
            blob = self._blob()
        except (Corrupt, Incomplete, NotFound):
            return
        yield from blob.sources()

    def problems(self) -> Iterator[str]:
        try:
            self.items.blob(self)
        except (Corrupt, Incomplete, NotFound) as error:
            yield str(error)

    def seals(self) -> Iterator[Seal]:
        """The checksums of its values, if the item can be opened and has any."""
        yield from (raw.seal for raw in self.sources() if raw.seal is not None)

    def _blob(self) -> Blob:
        blob = self.items.blob(self)
        return blob if self.part is None else blob.crop(self.part)


class ItemSeals(Sequence[Seal]):
    """The checksums of all items. They are in the items, so these are opened when somebody asks for the first one."""

    def __init__(self, blocks: Sequence[ItemBlob], others: Sequence[Seal]) -> None:
        self._blocks, self._others = blocks, others
        self._found: tuple[Seal, ...] | None = None

    @property
    def _all(self) -> tuple[Seal, ...]:
        if self._found is None:
            self._found = (*self._others, *(seal for block in self._blocks for seal in block.seals()))
        return self._found

    @overload
    def __getitem__(self, index: int) -> Seal: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Seal, ...]: ...
    def __getitem__(self, index: int | slice) -> Seal | tuple[Seal, ...]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)


def unnamed_bytes(folder: Path, sizes: Mapping[str, int], items: Iterable[ItemRange]) -> Iterator[Notice]:
    """Files that are longer than the items that are named in them: torch writes items without gaps.

    Raises `Corrupt` if what lies behind the last item is more than padding: a later save overwrote the file.
    """
    named: dict[str, dict[int, int]] = {}
    for item in items:
        held = named.setdefault(item.file, {})
        held[item.offset] = max(item.nbytes, held.get(item.offset, 0))
    gaps: list[str] = []
    for file, held in named.items():
        end, size = max(start + nbytes for start, nbytes in held.items()), sizes.get(file, 0)
        if size > end:
            with open_regular(folder / file) as opened:
                opened.seek(end)
                if opened.read(_EDGE).strip(b"\0"):
                    raise Corrupt(
                        f"{printable(file)} has {size - end:,} bytes behind the last item that .metadata names",
                        where=folder,
                        hint="A later save overwrote the file: copy all files of one save again.",
                    )
        if sum(held.values()) < end:
            gaps.append(file)
    if gaps:
        text = "these files hold bytes that no item of .metadata names: what was saved there is not read"
        yield Notice(text, tuple(gaps), Weight.LOST)
