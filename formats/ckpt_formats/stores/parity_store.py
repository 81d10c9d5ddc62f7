"""A damaged folder, or file, read through its parity: `parity:///PATH`, `parity://s3://BUCKET/KEY`. Nothing is written.

Each block is compared with its hash when it is read; one that does not fit is computed from others.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ckpt_codecs.base import Array
from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.folders import PARITY, below
from ckpt_formats.core.store_path import StorePath, is_remote
from ckpt_formats.parity.blocks import (
    BlockAddress,
    BlockSource,
    ProtectedFolder,
    StripeBuffers,
    find_parity,
    has_parity,
    protected_folders,
    recover,
)
from ckpt_formats.parity.manifest import BLOCK_NBYTES, HASH_NBYTES
from ckpt_formats.stores.listed_store import ListedStore, StoredObject

SCHEME = "parity"
_CHAIN = "chain.json"
_RECENT = 32
"""Blocks that are in memory, since small reads share them."""


@dataclass(frozen=True, slots=True)
class _StoredPart:
    """Blocks of a file that follow each other in a domain."""

    folder: ProtectedFolder
    group: int
    column: int
    stripe: int
    """That of the first one."""
    count: int


class ParityStore(ListedStore):
    """The files of folders as they were when they were protected. Threads may share it."""

    def __init__(self, root: Path, folders: Sequence[ProtectedFolder], plain: Sequence[str] = ()) -> None:
        """`root`: the folder with all of them. `plain`: the names of files in it without parity, read as they are."""
        self._arguments = (root, folders, plain)
        objects: dict[str, StoredObject] = {}
        self._plain = {f"{_key(root)}/{name}": root / name for name in plain}
        for key, path in self._plain.items():
            status = path.stat()
            objects[key] = StoredObject(status.st_size, f"{status.st_mtime_ns}-{status.st_size}", status.st_mtime)
        self._parts: dict[str, list[_StoredPart]] = {}
        for folder in folders:
            above, tag = _key(folder.root), folder.hashes.to_bytes()[-HASH_NBYTES:].hex()
            for number, (name, nbytes) in enumerate(folder.manifest.lengths.items()):
                objects[f"{above}/{name}"] = StoredObject(nbytes, f"{tag}-{number}", 0.0)
            for number, group in enumerate(folder.manifest.groups):
                for column, domain in enumerate(group.domains):
                    stripe = 0
                    for file in domain.files:
                        part = _StoredPart(folder, number, column, stripe, file.block_count)
                        self._parts.setdefault(f"{above}/{file.name}", []).append(part)
                        stripe += file.block_count
        super().__init__(f"{SCHEME}://{root.store.url if is_remote(root) else ''}", objects, _key(root))
        self._recent: OrderedDict[tuple[str, int], Array] = OrderedDict()
        self._lock_of_recent = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def level(self, key: str) -> tuple[Mapping[str, StoredObject], list[str]]:
        """Nothing is known of what lies around the folder."""
        return {}, []

    def get(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range of a file. Raises `IncompleteError` if more is lost than parity replaces."""
        if key in self._plain:
            data = np.empty(nbytes, np.uint8)
            with Reader(check=False) as reader:
                reader.read_into(self._plain[key], offset, data.data)
            return data.data
        parts = []
        for index in range(offset // BLOCK_NBYTES, -(-(offset + nbytes) // BLOCK_NBYTES)):
            start = index * BLOCK_NBYTES
            block = self._block(key, index)
            parts.append(block[max(offset - start, 0) : offset + nbytes - start])
        return parts[0].data if len(parts) == 1 else np.concatenate(parts).data

    def _address(self, key: str, index: int) -> tuple[ProtectedFolder, BlockAddress]:
        """Where a block of a file is among all of its folder."""
        for part in self._parts[key]:
            if index < part.count:
                return part.folder, BlockAddress(part.group, part.column, part.stripe + index)
            index -= part.count
        raise IndexError(f"{key} has no such block")

    def _block(self, key: str, index: int) -> Array:
        """A block, (n,) uint8, that fits its hash."""
        with self._lock_of_recent:
            if (key, index) in self._recent:
                self._recent.move_to_end((key, index))
                return self._recent[key, index]
        folder, at = self._address(key, index)
        block = np.empty(folder.place(at).nbytes, np.uint8)
        with Reader(check=False) as reader:
            source = BlockSource(folder, reader)
            if not source.fetch(at, block):
                (computed,) = recover(source, [at], [], StripeBuffers(1))
                block[:] = computed[: block.size]
        with self._lock_of_recent:
            self._recent[key, index] = block
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
    named = place.with_name(place.name.rpartition("@")[0]) if "@" in place.name else place
    around = (place, named, *_above(place))
    chain = next((one for one in around if (one / _CHAIN).is_file()), None)
    store = None if chain is None else _of_states(chain)
    if store is None:
        folder = find_parity(next((one for one in around if has_parity(one)), place))
        store = ParityStore(folder.root, [folder])
    return StorePath(store, _key(place))


def _of_states(chain: Path) -> ParityStore | None:
    """A chain whose states have parity, each its own or in groups; None if it has none, or as a whole.

    Its list has none, nor have states that were appended without: they have checksums of their own.
    """
    folders = [find_parity(one) for one in protected_folders(chain)]
    known = {f"{_key(folder.root)}/{name}" for folder in folders for name in folder.manifest.lengths}
    if not folders or f"{_key(chain)}/{_CHAIN}" in known:
        return None
    names = (name for name, _ in below(chain) if not any(part.endswith(PARITY) for part in name.split("/")))
    return ParityStore(chain, folders, [name for name in names if f"{_key(chain)}/{name}" not in known])


def _above(path: Path) -> Iterator[Path]:
    while _key(path):
        path = path.parent
        yield path


def _key(path: Path) -> str:
    return path.key if is_remote(path) else path.absolute().as_posix().lstrip("/")
