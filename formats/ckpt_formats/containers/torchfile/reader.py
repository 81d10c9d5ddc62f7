"""Open a file of `torch.save`, or a plain pickle. PyTorch is not needed, and no tensor data are read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckpt_formats.containers.file_starts import HEAD_NBYTES, SAFETENSORS
from ckpt_formats.containers.torchfile.file_window import ByteSource, Window
from ckpt_formats.containers.torchfile.opcodes import PROTO
from ckpt_formats.containers.torchfile.pickle_reader import PAD, Interpreter
from ckpt_formats.containers.torchfile.record_forms import RecordForm
from ckpt_formats.containers.torchfile.storages import (
    Storage,
    StorageOffsets,
    StorageSlice,
    TensorRef,
    storage_class,
    tensor_of,
)
from ckpt_formats.containers.torchfile.zip_archive import LOCAL, Archive, read_directory
from ckpt_formats.core.claims import MAX_ELEMENTS, MAX_PICKLE
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import FileBlob
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Global, Value

if TYPE_CHECKING:
    from ckpt_formats.containers.torchfile.same_shape import ParsedTemplate

Kind = Literal["zip", "legacy", "pickle"]


@dataclass(frozen=True, eq=False)
class TorchFile:
    """The content of a file: a tree of values, with `TensorRef`s in the places of tensors."""

    path: Path
    kind: Kind
    root: Value
    storages: tuple[Storage, ...]
    """In the order in which the tree refers to them."""
    globals: tuple[Global, ...]
    """Every class and function that the file names."""
    _archive: Archive | None = field(default=None, repr=False)

    @property
    def stem(self) -> str:
        """The name of the archive's one folder: the stem of the name under which the file was saved; else empty."""
        return self._archive.stem if self._archive else ""

    def seals(self) -> Sequence[Seal]:
        """The checksums that the file states; none in legacy files and plain pickles.

        Reads the local header of every member.
        """
        return self._archive.seals() if self._archive else ()

    def as_template(self, window: ByteSource) -> "ParsedTemplate | None":
        """A template to compare other archives with, if this one stores a single plain tensor; else None."""
        if self._archive is None or type(self.root) is not TensorRef:
            return None
        (fragment,) = tensor_of(self.root).fragments
        blob = fragment.blob
        if not isinstance(blob, FileBlob):
            return None
        from ckpt_formats.containers.torchfile.same_shape import parse_template  # only files of many archives need it

        return parse_template(self._archive, self.root.storage.key, blob, window)


def open_file(path: Path | str, base: int = 0, length: int | None = None) -> TorchFile:
    """Read the structure of a file, or of `length` bytes of it from `base` on.

    No tensor data are read. Raises `NotFoundError`, `CorruptError`, `UnsafeError`, or
    `UnsupportedError`, for example for files of TorchScript or of big-endian machines.
    """
    path = Path(path) if isinstance(path, str) else path
    with Window(path, base, length) as window:
        if not window.length:
            raise CorruptError("the file is empty", where=path, hint="It was never written to its end: copy it again.")
        head = window.at(0, min(4, window.length))
        if head == LOCAL:
            return _open_archive(window)
        start = window.at(0, min(HEAD_NBYTES, window.length))
        if SAFETENSORS.match(start):
            raise UnsupportedError(
                "is a file of safetensors, by its content", where=path, hint="Give it the ending .safetensors."
            )
        if head[0] == PROTO:
            return _open_stream(window)
        from ckpt_formats.containers.contents import check_content  # only what is not read needs it

        check_content(start, path)
        raise CorruptError(
            "is neither an archive nor a stream of torch.save, nor a pickle of protocol 2 or later", where=path
        )


def open_item(window: ByteSource) -> TorchFile:
    """Read an archive that is one of several in a file, through an open window.

    Looks up all storages now, and checks everything except their data. Raises the same errors as `open_file`.
    """
    if window.at(0, min(4, window.length)) != LOCAL:
        raise CorruptError("is not an archive of torch.save", where=window.path)
    file = _open_archive(window)
    assert file._archive is not None
    file._archive.check(window, MAX_PICKLE)
    return file


def load_pickle(data: bytes, where: str = "a pickle", forms: Sequence[RecordForm] = ()) -> Value:
    """The value of a pickle in memory, which must not refer to storages outside of it.

    Raises `CorruptError` or `UnsafeError`; `where` is the place in the message.
    """
    value, end = Interpreter(where, forms=forms).load(data + PAD)
    if end != len(data):
        raise CorruptError(f"{len(data) - end} bytes follow the pickle", where=where)
    return value


def _open_archive(window: ByteSource) -> TorchFile:
    archive = read_directory(window)
    if "byteorder" in archive:
        byte_order = archive.read("byteorder", window, 64)
        if byte_order == b"big":
            raise UnsupportedError("was written by a big-endian machine", where=window.path)
        if byte_order != b"little":
            raise window.corrupt(f"unknown byte order {byte_order!r:.20}")
    data = archive.read("data.pkl", window, MAX_PICKLE)
    where = f"{window.path} ({archive.stem}/data.pkl)"
    table = StorageTable(where, archive, archive)
    interpreter = Interpreter(where, table.resolve)
    root, end = interpreter.load(data + PAD)
    if end != len(data):
        raise CorruptError(f"{len(data) - end} bytes follow the pickle", where=where)
    _check_members(archive, table)
    return TorchFile(
        window.path, "zip", root, tuple(table.storages.values()), tuple(interpreter.globals.values()), archive
    )


_MEMBERS = ("data.pkl", "version", "byteorder", ".format_version", ".storage_alignment")
_MEMBERS_OF_DATA = (".data/serialization_id", ".data/version")


def _check_members(archive: Archive, table: "StorageTable") -> None:
    """Raise `UnsupportedError` for members that torch does not write, or that are storages without a tensor."""
    stem = len(archive.stem) + 1
    expected = {f"{archive.stem}/data/{key}" for key in table.storages}
    unexpected = [name[stem:] for name in archive.directory.names if name not in expected]
    unexpected = [name for name in unexpected if name not in _MEMBERS and name not in _MEMBERS_OF_DATA]
    if unexpected:
        reason = (
            "holds values that no tensor refers to"
            if unexpected[0].startswith("data/")
            else "is not one that torch.save writes"
        )
        raise UnsupportedError(
            f"the archive's member `{printable(unexpected[0][:80])}` {reason}: its purpose is unknown",
            where=archive.path,
            hint="If nothing needs it, remove it (zip -d).",
        )


def _open_stream(window: Window) -> TorchFile:
    from ckpt_formats.containers.torchfile import legacy_stream as legacy  # most files are archives

    stream = legacy.LegacyStream(window.path)
    table = StorageTable(str(window.path), stream, None)
    interpreter = Interpreter(str(window.path), table.resolve)
    pickles = legacy.Pickles(window, interpreter)
    root, kind = pickles.next(), "pickle"
    if legacy.is_magic(root):
        root, kind = legacy.read_object(pickles), "legacy"
        legacy.place_storages(pickles, table.storages, stream)
    elif pickles.at != window.length or table.storages:
        raise CorruptError(
            f"{window.length - pickles.at} bytes follow the pickle",
            where=window.path,
            hint="torch.save did not write this file.",
        )
    return TorchFile(
        window.path,
        "legacy" if kind == "legacy" else "pickle",
        root,
        tuple(table.storages.values()),
        tuple(interpreter.globals.values()),
    )


class StorageTable:
    """The storages that the pickle of one file refers to."""

    def __init__(self, where: str, offsets: StorageOffsets, archive: Archive | None) -> None:
        self.storages: dict[str, Storage] = {}
        self._where = where
        self._offsets = offsets
        self._archive = archive
        self._kinds: dict[int, tuple[Value, DType | None, int]] = {}
        """By the id of a storage class: the class, its element type, and bytes per element."""

    def resolve(self, persistent_id: Value) -> Value:
        """The storage, part of a storage, or class that a persistent id means. Raises `CorruptError`.

        In archives it is `("storage", class, key, location, numel)`. Legacy streams
        add a view, and also contain `("module", class, source file, source)`.
        """
        if type(persistent_id) is not tuple or len(persistent_id) < 4:
            raise self._malformed()
        if len(persistent_id) == 5 and persistent_id[0] == "storage":
            _, cls, key, location, numel = persistent_id
        elif persistent_id[0] == "module" and self._archive is None and type(persistent_id[1]) is Global:
            return persistent_id[1]
        elif persistent_id[0] == "storage" and len(persistent_id) == 6 and not self._archive:
            _, cls, key, location, numel, _ = persistent_id
        else:
            raise self._malformed()
        if type(key) is int:
            key = str(key)
        if type(key) is not str or type(location) is not str or type(numel) is not int:
            raise self._malformed()
        storage = self.storages.get(key)
        if storage is None or storage.cls is not cls or storage.numel != numel:
            storage = self._storage(cls, key, location, numel, storage)
        if len(persistent_id) == 6 and persistent_id[5] is not None:
            return self._slice(storage, persistent_id[5])
        return storage

    def _storage(self, cls: Value, key: str, location: str, numel: int, earlier: Storage | None) -> Storage:
        known = self._kinds.get(id(cls))
        if known is None:
            kind = storage_class(cls) if type(cls) is Global else None
            if kind is None:
                raise self._malformed()
            known = self._kinds[id(cls)] = (cls, *kind)
        _, dtype, itemsize = known
        if not 0 <= numel < MAX_ELEMENTS:
            raise self._malformed()
        nbytes = numel * itemsize
        if self._archive is not None:
            actual_nbytes = self._archive.storage_nbytes(key)
            # A storage of foreign memory may end with a part of an element, which `numel` does not count.
            if not nbytes <= actual_nbytes < nbytes + itemsize:
                raise CorruptError(
                    f"storage {key!r:.40} should have {nbytes} bytes, but has {actual_nbytes}", where=self._where
                )
        storage = Storage(key, cls, dtype, itemsize, numel, location, self._offsets)
        if earlier is None:
            self.storages[key] = storage
        elif earlier.nbytes != nbytes:
            raise CorruptError(f"storage {key!r:.40} is given with two sizes", where=self._where)
        return storage

    def _slice(self, storage: Storage, view: Value) -> Value:
        """The part of a storage that a view `(key, offset, numel)` means, in elements."""
        if type(view) is not tuple or len(view) != 3 or not all(type(n) is int for n in view[1:]):
            raise self._malformed()
        _, start, numel = view
        if start < 0 or numel < 0 or start + numel > storage.numel:
            raise CorruptError(f"a part of storage {storage.key!r:.40} lies outside it", where=self._where)
        return StorageSlice(storage, start, numel)

    def _malformed(self) -> CorruptError:
        return CorruptError("the pickle refers to something that is not a storage", where=self._where)
