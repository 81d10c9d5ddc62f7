"""The stream format that `torch.save` wrote before PyTorch 1.6, and still writes on request.

    magic number, protocol version, system, object, storage keys    five pickles
    then for each key: number of elements (int64), elements         in the order of the keys

The file does not state how long the pickles are, so they are read through a
buffer that grows until they fit. Source: `torch/serialization.py`, `_legacy_save`.
"""

import struct
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_formats.containers.torchfile.file_window import Window
from ckpt_formats.containers.torchfile.pickle_reader import PAD, Interpreter, Truncated
from ckpt_formats.containers.torchfile.storages import Storage
from ckpt_formats.core.claims import MAX_PICKLE
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.values import Value

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
_FIRST_WINDOW = 64 << 10


@dataclass(eq=False)
class LegacyStream:
    """Where the storages of a legacy file are; known only after its pickles are read. There are no checksums."""

    path: Path
    offsets: dict[str, int] = field(default_factory=dict)

    def find(self, key: str) -> tuple[int, Seal | None]:
        """Byte offset of a storage in the file; no checksum. Raises `CorruptError` for an unknown key."""
        if key not in self.offsets:
            raise CorruptError(f"storage {key!r:.40} is not in the file", where=self.path)
        return self.offsets[key], None


@dataclass(eq=False)
class Pickles:
    """Reads pickles that lie one after another in a window of a file."""

    window: Window
    interpreter: Interpreter
    at: int = 0
    """Offset in the window at which the next pickle begins."""
    _from: int = 0
    _buffer: bytes = PAD

    def next(self) -> Value:
        """The value of the next pickle. Raises `CorruptError` or `UnsafeError`."""
        nbytes = _FIRST_WINDOW
        while True:
            available = self._from + len(self._buffer) - len(PAD)
            wanted = min(self.at + nbytes, self.window.length)
            if available < wanted:
                rest = self._buffer[self.at - self._from : -len(PAD)]
                self._buffer = rest + self.window.at(self.at + len(rest), wanted - self.at - len(rest)) + PAD
                self._from, available = self.at, wanted
            try:
                value, end = self.interpreter.load(self._buffer, self.at - self._from)
            except Truncated as error:
                if available == self.window.length or self._from + error.needs > self.window.length:
                    raise
                nbytes = max(2 * (available - self.at), self._from + error.needs - self.at)
                if nbytes > MAX_PICKLE:
                    raise UnsafeError("the pickle would exhaust memory", where=self.window.path) from None
                continue
            self.at = self._from + end
            return value


def is_magic(value: Value) -> bool:
    """Whether a value is the first pickle of a legacy file."""
    return type(value) is int and value == MAGIC


def read_object(pickles: Pickles) -> Value:
    """Read what follows the magic number: version, system, and the object, which is returned."""
    window = pickles.window
    version, system = pickles.next(), pickles.next()
    if version != VERSION or type(system) is not dict:
        raise window.corrupt(f"unknown version of the legacy format: {version!r:.40}")
    if system.get("little_endian") is not True:
        raise UnsupportedError("was written by a big-endian machine", where=window.path)
    return pickles.next()


def place_storages(pickles: Pickles, storages: dict[str, Storage], stream: LegacyStream) -> None:
    """Read the keys and the length of each storage into `stream`; skip the data."""
    window, keys = pickles.window, pickles.next()
    if type(keys) is not list or sorted(map(str, keys)) != sorted(storages):
        raise window.corrupt("the list of storages does not match the tensors")
    at = pickles.at
    for key in map(str, keys):
        storage = storages[key]
        (numel,) = struct.unpack("<q", window.at(at, 8))
        at += 8
        if numel != storage.numel:
            raise window.corrupt(f"storage {key!r:.40} should have {storage.numel} elements, but has {numel}")
        if at + storage.nbytes > window.length:
            raise CorruptError(
                f"storage {key!r:.40} is truncated",
                where=window.path,
                hint="The file was truncated, or is still being written: copy it again.",
            )
        stream.offsets[key] = window.base + at
        at += storage.nbytes
    if at != window.length:
        raise window.corrupt(f"{window.length - at} bytes follow the last storage")
