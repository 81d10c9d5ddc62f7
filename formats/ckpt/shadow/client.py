"""Read the state of a shadow that listens at an address: a checkpoint like any other, as long as it is connected."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from ckpt.shadow import described
from ckpt.shadow.described import PartOfState
from ckpt_formats.core.checkpoint import Checkpoint, Edit
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Array, Blob, FileBlob
from ckpt_formats.stores import wire
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.http_client import NO_CREDENTIALS, Credentials
from ckpt_formats.stores.wire import FrameKind
from ckpt_formats.universal.chunked import read_chunks


@dataclass(frozen=True)
class ReadFromShadow(Edit):
    """The checkpoint was read from a shadow. The state of each connection is another one."""

    address: str
    connection: str


class ShadowConnection:
    """A connection to a shadow, which freezes its state until this is closed. Threads may share it.

    checkpoint: The frozen state.
    part: Which part of the state this is; None: it is the whole state.
    """

    checkpoint: Checkpoint
    part: PartOfState | None

    def __init__(self, address: NetworkAddress, credentials: Credentials = NO_CREDENTIALS) -> None:
        """Connect. Raises as `Connection`, and what the shadow answers if it has no state or is busy."""
        self._lock = threading.Lock()
        self._address = address
        self._connection = Connection(address, credentials)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "ShadowConnection":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the connection: the shadow goes on. The checkpoint must not be read any more."""
        self._connection.close()

    def advance(self, step: int) -> None:
        """Let the shadow go on to a later step, and freeze it there: `checkpoint` is another one then.

        Possible once. Raises `IncompleteError` if the shadow does not reach the step in time.
        """
        with self._lock:
            self._connection.send(FrameKind.ADVANCE, wire.ADVANCE.pack(step))
            self._load()

    def values(self, tensor: int, index: int, size: int, dtype: DType) -> Array:
        """A chunk of a tensor: (size,) of `dtype`.

        Raises `CorruptError`, and `IncompleteError` if the shadow is gone.
        """
        with self._lock:
            self._connection.send(FrameKind.READ, wire.READ.pack(tensor, index))
            body = self._connection.receive(FrameKind.VALUES, wire.CHUNK_NBYTES)
        if len(body) != size * dtype.itemsize:
            raise CorruptError("the shadow sent a chunk of another size", where=self._connection.where)
        return np.frombuffer(body, dtype)

    def _load(self) -> None:
        content = self._connection.receive(FrameKind.STATE, wire.MAX_STATE)
        history = (ReadFromShadow(str(self._address), os.urandom(16).hex()),)
        where = Path(self._connection.where)
        self.checkpoint, self.part = described.load(content, where, self._blob, history)

    def _blob(self, number: int, shape: Shape, dtype: DType) -> Blob:
        return _ShadowBlob(self, number, shape, dtype, Box.whole(shape))


@dataclass(frozen=True, eq=False)
class _ShadowBlob(Blob):
    """A block of a tensor of a shadow."""

    connection: ShadowConnection
    number: int
    full_shape: Shape
    dtype: DType
    box: Box

    @property
    def shape(self) -> Shape:
        return self.box.shape

    def crop(self, box: Box) -> "_ShadowBlob":
        return _ShadowBlob(self.connection, self.number, self.full_shape, self.dtype, box.shift(self.box.start))

    def read_into(self, out: Array, reader: Reader) -> None:
        chunking = Chunking(self.full_shape, (wire.CHUNK_NBYTES // self.dtype.itemsize,))

        def values(index: int) -> Array:
            start, stop = chunking.range(index)
            key = (id(self.connection), self.number, index)
            return reader.cached_or(key, lambda: self.connection.values(self.number, index, stop - start, self.dtype))

        read_chunks(out, self.box, chunking, values)

    def sources(self) -> Iterator[FileBlob]:
        return iter(())
