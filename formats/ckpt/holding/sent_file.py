"""A file that is sent to holders, as a row of pieces."""

import os
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapreplace
from pathlib import Path

from ckpt_formats.stores import piece_requests, wire

_SMALL, _SMALL_SECONDS = 1 << 16, 0.1
"""Bytes up to which a piece is small, and how long the next one waits for more: each piece costs memory besides."""


@dataclass(eq=False)
class SentFile:
    """A file that is sent, as far as it was cut into pieces."""

    path: Path
    nbytes: int
    """The bytes that may be sent."""
    is_small: bool = False
    """Whether hosts hold copies of it, also with parity."""
    content: bytes | None = None
    """All of a small file that is replaced by newer ones; its `version` counts them."""
    version: int = 0
    pieces: list[tuple[int, str]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Where each piece begins."""
    placed: int = 0
    """How many pieces have a place in a stream."""
    cut: int = 0
    """Where the pieces end."""
    cut_at: float = 0.0
    """When the last one was cut."""
    ends: list[int] = field(default_factory=list)
    """Where records end after which a step is whole."""
    steps: list[int] = field(default_factory=list)
    start_end: int | None = None
    """Where that ends from which a replay begins: the first records of a log, or all of another file."""
    is_gone: bool = False
    """Whether it is in the chain no longer: what was not sent until then cannot be sent."""

    @classmethod
    def of_bytes(cls, content: bytes, folder: Path, version: int = 1) -> "SentFile":
        """A small file that is in no folder. `folder`: stands for it in messages."""
        return cls(folder, len(content), True, content, version, start_end=len(content))

    @property
    def has_rest(self) -> bool:
        """Whether bytes are in no piece yet, and can still be read."""
        return self.cut < self.nbytes and not self.is_gone

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the file. Raises `OSError` if it has fewer."""
        if self.content is not None:
            return self.content[offset : offset + nbytes]
        with self.path.open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), nbytes, offset)
        if len(content) != nbytes:
            raise OSError(f"{self.path.name} has become shorter")
        return content

    def cut_pieces(self, count: int, is_last: bool = True) -> None:
        """Cut what is new into pieces, until there are `count` of them. They are the same for all holders.

        `is_last`: no more bytes follow soon, so that a small piece need not wait for them.
        """
        while self.cut < self.nbytes and len(self.pieces) < count:
            nbytes = min(wire.CHUNK_NBYTES, self.nbytes - self.cut)
            if nbytes < _SMALL and not is_last and time.monotonic() < self.cut_at + _SMALL_SECONDS:
                return
            content = self.read(self.cut, nbytes)
            self.cut_at = time.monotonic()
            self.pieces.append((len(content), piece_requests.digest_of(content)))
            self.offsets.append(self.cut)
            self.cut += len(content)

    def step_at(self, end: int) -> int:
        """The last step that is whole with the bytes before this one."""
        at = bisect_right(self.ends, end)
        return self.steps[at - 1] if at else 0


def shares(sizes: Mapping[str, int], world: int) -> list[list[str]]:
    """The files that each rank sends: the largest first, each by the rank that has fewest bytes until then."""
    least, result = [(0, rank) for rank in range(world)], [list[str]() for _ in range(world)]
    for name in sorted((name for name in sizes if sizes[name]), key=lambda one: (-sizes[one], one)):
        nbytes, rank = least[0]
        heapreplace(least, (nbytes + sizes[name], rank))
        result[rank].append(name)
    return result
