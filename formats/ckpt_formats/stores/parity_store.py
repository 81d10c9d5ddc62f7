"""A damaged folder, or file, read through its parity: `parity:///PATH`, `parity://s3://BUCKET/KEY`. Nothing is written.

Each block is compared with its hash when it is read; one that does not fit is computed from others.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ckpt_codecs.base import Array
from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.store_path import StorePath, is_remote
from ckpt_formats.parity.blocks import (
    BlockAddress,
    BlockSource,
    ProtectedFolder,
    StripeBuffers,
    find_parity,
    has_parity,
    recover,
)
from ckpt_formats.parity.manifest import BLOCK_NBYTES, HASH_NBYTES
from ckpt_formats.stores.listed_store import ListedStore, StoredObject

SCHEME = "parity"
_RECENT = 32
"""Blocks that are in memory, since small reads share them."""


@dataclass(frozen=True, slots=True)
class _StoredPart:
    """Blocks of a file that follow each other in a domain."""

    group: int
    column: int
    stripe: int
    """That of the first one."""
    count: int


class ParityStore(ListedStore):
    """The files of a folder as they were when they were protected. Threads may share it."""

    def __init__(self, folder: ProtectedFolder) -> None:
        root, tag = _key(folder.root), folder.hashes.to_bytes()[-HASH_NBYTES:].hex()
        objects = {
            f"{root}/{name}": StoredObject(nbytes, f"{tag}-{number}", 0.0)
            for number, (name, nbytes) in enumerate(folder.manifest.lengths.items())
        }
        above = folder.root.store.url if is_remote(folder.root) else ""
        super().__init__(f"{SCHEME}://{above}", objects, root)
        self._folder = folder
        self._parts: dict[str, list[_StoredPart]] = {}
        for number, group in enumerate(folder.manifest.groups):
            for column, domain in enumerate(group.domains):
                stripe = 0
                for file in domain.files:
                    part = _StoredPart(number, column, stripe, file.block_count)
                    self._parts.setdefault(f"{root}/{file.name}", []).append(part)
                    stripe += file.block_count
        self._recent: OrderedDict[BlockAddress, Array] = OrderedDict()
        self._lock_of_recent = Lock()
        self.computed: set[BlockAddress] = set()
        """Blocks that did not fit, and were computed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._folder,)

    def level(self, key: str) -> tuple[Mapping[str, StoredObject], list[str]]:
        """Nothing is known of what lies around the folder."""
        return {}, []

    def get(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range of a file. Raises `IncompleteError` if more is lost than parity replaces."""
        parts = []
        for index in range(offset // BLOCK_NBYTES, -(-(offset + nbytes) // BLOCK_NBYTES)):
            start = index * BLOCK_NBYTES
            block = self._block(self._address(key, index))
            parts.append(block[max(offset - start, 0) : offset + nbytes - start])
        return parts[0].data if len(parts) == 1 else np.concatenate(parts).data

    def _address(self, key: str, index: int) -> BlockAddress:
        """Where a block of a file is among all."""
        for part in self._parts[key]:
            if index < part.count:
                return BlockAddress(part.group, part.column, part.stripe + index)
            index -= part.count
        raise IndexError(f"{key} has no such block")

    def _block(self, at: BlockAddress) -> Array:
        """A block, (n,) uint8, that fits its hash."""
        with self._lock_of_recent:
            if at in self._recent:
                self._recent.move_to_end(at)
                return self._recent[at]
        block = np.empty(self._folder.place(at).nbytes, np.uint8)
        with Reader(check=False) as reader:
            source = BlockSource(self._folder, reader)
            if not source.fetch(at, block):
                (computed,) = recover(source, [at], [], StripeBuffers(1))
                block[:] = computed[: block.size]
                self.computed.add(at)
        with self._lock_of_recent:
            self._recent[at] = block
            while len(self._recent) > _RECENT:
                self._recent.popitem(last=False)
        return block


def open_parity(url: str, path: Path) -> StorePath:
    """The path that `parity:///PATH` names: a folder that has parity, something in it, or a state of a chain.

    `path`: the one after the scheme. Raises as `find_parity`.
    """
    place = path.absolute()
    if ".." in place.parts:
        raise InvalidArgumentError("has a part `..`", where=url, hint="Name the folder itself.")
    chain = place.with_name(place.name.rpartition("@")[0]) if "@" in place.name else place
    root = next((one for one in (place, chain, *_above(place)) if has_parity(one)), place)
    return StorePath(ParityStore(find_parity(root)), _key(place))


def _above(path: Path) -> Iterator[Path]:
    while _key(path):
        path = path.parent
        yield path


def _key(path: Path) -> str:
    return path.key if is_remote(path) else path.absolute().as_posix().lstrip("/")
