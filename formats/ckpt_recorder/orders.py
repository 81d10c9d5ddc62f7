"""The orders of a trainer to the process that writes its log, and to the one that makes its bases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_training.writing.orders import End


@dataclass(frozen=True)
class WriteRecord:
    """Write a record of a filled slot, or one without values."""

    kind: int
    """A `Kind`."""
    step: int
    meta: Mapping[str, Any]
    slot: int | None = None
    chunks: Sequence[int] | None = None
    """The numbers of the chunks with values; None: all."""


@dataclass(frozen=True)
class WriteValues:
    """Write a record of tensors as they are, whose bytes follow the order."""

    step: int
    meta: Mapping[str, Any]
    tensors: Sequence[Any]
    """The rows that the record announces."""
    changes: Sequence[Sequence[int]]
    """The numbers of the rows that changed, and whether each is `WHOLE`, with its bytes, or `GONE`."""


@dataclass(frozen=True)
class WriteRandomStates:
    """Write a record of random number generators, whose states follow the order."""

    step: int
    generators: Sequence[tuple[str, int, Any]]
    """Of each its name, the size of its bytes, and its fields."""


@dataclass(frozen=True)
class FlushEvery:
    """Flush after so many steps from now on."""

    steps: int


@dataclass(frozen=True)
class Flush:
    """Flush all records, and answer `flushed`."""


@dataclass(frozen=True)
class SegmentFollows:
    """The next segment begins as soon as the log has ended: nothing waits until its holders have all of it."""


@dataclass(frozen=True)
class BeginBase:
    """Begin a base after a step."""

    step: int


@dataclass(frozen=True)
class WritePiece:
    """Write a piece of a base, which is in a slot."""

    slot: int
    step: int
    """The step that the piece is of."""
    chunks: Sequence[int]
    states: Sequence[str]


@dataclass(frozen=True)
class FinishBase:
    """Make a base of the pieces, at a step, and answer `stored` or `failed`."""

    step: int


LogOrder = WriteRecord | WriteValues | WriteRandomStates | FlushEvery | Flush | SegmentFollows
LOG_ORDERS: tuple[type, ...] = (WriteRecord, WriteValues, WriteRandomStates, FlushEvery, Flush, SegmentFollows, End)
BaseOrder = BeginBase | WritePiece | FinishBase
BASE_ORDERS: tuple[type, ...] = (BeginBase, WritePiece, FinishBase, End)
