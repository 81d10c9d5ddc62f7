"""Which ranges of objects in stores are read for values, and small reads of many objects at once."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ckpt_formats.core.folders import file_nbytes
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.store_path import StorePath, is_remote, request
from ckpt_formats.core.tensor import Blob

T = TypeVar("T")

_START = 1 << 16
"""Bytes at the beginning of an object in which most headers end."""
_AHEAD = 32
"""Items of which the values are requested before they are needed."""


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """Bytes `start` to `stop` of an object."""

    path: StorePath
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def object_ranges(blobs: Iterable[Blob]) -> Iterator[ObjectRange]:
    """The ranges of objects that the values of blobs come from. No data is read."""
    nbytes: dict[StorePath, int] = {}
    for blob in blobs:
        for raw in blob.sources():
            path = raw.path
            if is_remote(path):
                if path not in nbytes:
                    nbytes[path] = file_nbytes(path, 0)
                yield ObjectRange(path, raw.offset, min(raw.offset + raw.span, nbytes[path]))


def sealed_range(seal: Seal) -> Iterator[ObjectRange]:
    """The range of a seal, if its file is in a store."""
    if is_remote(seal.path):
        yield ObjectRange(seal.path, seal.offset, min(seal.offset + seal.nbytes, file_nbytes(seal.path, 0)))


def requested(items: Iterable[T], blobs: Callable[[T], Iterable[Blob]]) -> Iterator[T]:
    """The items in their order. The blobs of the next ones are small; those in stores are requested before.

    So a few values from each of many objects take the time of one request, and not of one for each object.
    """
    waiting = deque[T]()
    for item in items:
        for one in object_ranges(blobs(item)):
            request(one.path, one.start, one.nbytes)
        waiting.append(item)
        if len(waiting) > _AHEAD:
            yield waiting.popleft()
    yield from waiting


def request_starts(paths: Iterable[Path]) -> None:
    """Request the beginnings of all objects among the paths, and do not wait for them."""
    for path in paths:
        if is_remote(path) and path.is_file():
            request(path, 0, _START)
