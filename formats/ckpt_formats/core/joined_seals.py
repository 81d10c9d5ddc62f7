"""The checksums of several checkpoints, which are read as one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import xxhash

from ckpt_formats.core.seals import LazySeals, Seal, digest_of_seals


class JoinedSeals(LazySeals):
    """The seals of all parts, without those of some files. They are evaluated when needed: some are read from files."""

    def __init__(self, parts: Sequence[Sequence[Seal]], without: frozenset[Path] = frozenset()) -> None:
        self._parts, self._without = tuple(parts), without

    def __len__(self) -> int:
        return sum(1 for _ in self) if self._without else sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Seal]:
        return (seal for part in self._parts for seal in part if seal.path not in self._without)

    def listed(self) -> Iterator[Seal]:
        parts = (part.listed() if isinstance(part, LazySeals) else part for part in self._parts)
        return (seal for part in parts for seal in part if seal.path not in self._without)

    def digest(self) -> bytes:
        return xxhash.xxh3_128(b"".join(map(digest_of_seals, self._parts))).digest()

    @overload
    def __getitem__(self, index: int) -> Seal: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Seal]: ...
    def __getitem__(self, index: int | slice) -> Seal | Sequence[Seal]:
        return tuple(self)[index]
