"""The pieces of a base: chunks of all states of a rank, each piece at its own step, until they are folded.

Each rank writes a file of records into a folder of the chain, `pieces-STEP.RUN`. A record has some chunks of the
rank's vector, the values of all states as they are; the last record has the step of the base. The folder exists only
while a base is made: what remains after a kill is removed as a leftover of the chain.
"""

import fcntl
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpt_codecs.base import Array
from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.core.files import Reader
from ckpt_formats.universal.gradients.layout import SegmentLayout
from ckpt_formats.universal.gradients.record import FileHead, Kind, LogRecord, hash_values, scan
from ckpt_recorder.record_file import RecordFile

_DRAFT = ".tmp"


def folder_name(step: int, run: str) -> str:
    """The name of the folder of a base that begins after a step of a run (`SegmentLayout.run`)."""
    return f"pieces-{step:010d}.{run[:8]}"


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.ckg"


@dataclass(frozen=True)
class BaseSettings:
    """The first message of the trainer."""

    chain: str
    segment: str
    """The name of the segment's folder."""
    rank: int
    slot_nbytes: int
    slots: int
    seconds: float
    """How long to wait for another rank that makes no progress."""


class PiecesFile(RecordFile):
    """The pieces of one rank. The file has its final name once it is complete."""

    def __init__(self, folder: Path, head: FileHead) -> None:
        """Create the file, and the folder if no other rank has done so. Raises `OSError`."""
        folder.mkdir(exist_ok=True)
        self._published_path = folder / _file_name(head.rank)
        super().__init__(self._published_path.with_name(self._published_path.name + _DRAFT), head)

    def add(self, step: int, chunks: Sequence[int], values: Mapping[str, Sequence[Array]]) -> None:
        """Add a piece. `values`: for each state its chunks, each (n,) float32. Raises `OSError`."""
        arrays = [chunk for state in values.values() for chunk in state]
        meta = {"states": list(values), "chunks": list(chunks)}
        self.append(
            Kind.STATE, step, meta, [array.view(np.uint8).data for array in arrays], list(map(hash_values, arrays))
        )

    def finish(self, step: int) -> None:
        """Add the end, with the step of the base, and give the file its final name. Raises `OSError`."""
        self.append(Kind.END, step, {}, [], [])
        os.rename(self._published_path.with_name(self._published_path.name + _DRAFT), self._published_path)

    def close(self) -> None:
        """Close the file, so that it is not locked any more."""
        os.close(self.descriptor)


def give_up(folder: Path, rank: int) -> None:
    """Show the other ranks that the pieces of this one will not come, because its process has ended."""
    draft = folder / (_file_name(rank) + _DRAFT)
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        with draft.open("ab") as file:
            file.write(b"\0")


def missing_rank(folder: Path, world: int) -> int | None:
    """The first rank whose pieces are not complete; None if all are. Raises `IncompleteError` if one never will be."""
    missing = None
    for rank in reversed(range(world)):
        path = folder / _file_name(rank)
        if path.exists():
            continue
        if _was_left(path.with_name(path.name + _DRAFT)) and not path.exists():
            raise IncompleteError(f"the process that writes the pieces of rank {rank} has given up", where=path)
        missing = rank
    return missing


def _was_left(draft: Path) -> bool:
    """Does the file exist although no process writes it?"""
    try:
        file = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return os.fstat(file).st_size > 0  # an empty file is not locked yet
        return False
    finally:
        os.close(file)


@dataclass(frozen=True)
class StatePieces:
    """The complete pieces of all ranks."""

    step: int
    """The step of the base; no piece is of a later one."""
    paths: tuple[Path, ...]
    places: tuple[Mapping[int, tuple[LogRecord, int]], ...]
    """For each rank and chunk: its record, and the index of the chunk in it."""

    @property
    def names(self) -> frozenset[str]:
        """The names of all states."""
        return frozenset(
            name for places in self.places for record, _ in places.values() for name in record.meta["states"]
        )

    @property
    def first(self) -> int:
        """The step of the first piece."""
        return min((record.step for places in self.places for record, _ in places.values()), default=self.step)

    def read(self, rank: int, chunk: int, states: Mapping[str, Array], reader: Reader) -> int:
        """Fill a chunk of all states, each (n,) float32, where the piece has them. Returns its step.

        Raises `CorruptError`.
        """
        record, number = self.places[rank][chunk]
        names, count = record.meta["states"], len(record.meta["chunks"])
        for at, name in enumerate(names):
            if name not in states:
                continue
            out = states[name]
            data, digest = record.read_chunk(self.paths[rank], at * count + number, out.nbytes, reader)
            if data.nbytes != out.nbytes or hash_values(data) != digest:
                raise CorruptError(f"step {record.step}: a piece of {name!r} is damaged", where=self.paths[rank])
            out.view(np.uint8)[:] = data
        return record.step


def open_pieces(folder: Path, layout: SegmentLayout, heads: Sequence[FileHead]) -> StatePieces:
    """The pieces in a folder. Raises `CorruptError` unless they are complete and of this segment."""
    steps, places, paths = set[int](), [], []
    for head, rank in zip(heads, layout.ranks, strict=True):
        path = folder / _file_name(head.rank)
        log = scan(path, head)
        own: dict[int, tuple[LogRecord, int]] = {}
        for record in log.records:
            if record.kind is Kind.END:
                steps.add(record.step)
            elif record.kind is Kind.STATE:
                _check_piece(record, rank.chunk_count, path)
                own |= {chunk: (record, number) for number, chunk in enumerate(record.meta["chunks"])}
        if log.torn is not None or not log.records or log.records[-1].kind is not Kind.END:
            raise CorruptError(f"the pieces of a base are damaged: {log.torn or 'they have no end'}", where=path)
        if own.keys() != set(range(rank.chunk_count)):
            raise CorruptError("a base has not all pieces", where=path)
        places.append(own)
        paths.append(path)
    if len(steps) != 1:
        raise CorruptError("the ranks have pieces of different bases", where=folder)
    pieces = StatePieces(steps.pop(), tuple(paths), tuple(places))
    is_late = any(record.step > pieces.step for own in places for record, _ in own.values())
    if is_late or pieces.first < layout.first:
        raise CorruptError("a piece is of a step outside the base", where=folder)
    return pieces


def _check_piece(record: LogRecord, chunk_count: int, path: Path) -> None:
    names, chunks = record.meta.get("states"), record.meta.get("chunks")
    is_valid = (
        isinstance(names, list)
        and isinstance(chunks, list)
        and all(isinstance(name, str) for name in names)
        and all(is_natural(chunk) and chunk < chunk_count for chunk in chunks)
        and record.count == len(names) * len(chunks)
    )
    if not is_valid:
        raise CorruptError(f"step {record.step}: a piece of a base is damaged", where=path)
