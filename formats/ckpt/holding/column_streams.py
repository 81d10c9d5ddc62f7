"""What a rank adds to parities: its pieces, each in one of the streams that are its columns.

`ckpt_formats.stores.parity_requests` has what a parity is.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckpt.holding.generation import SentGeneration
from ckpt.holding.peers import Peers
from ckpt.holding.sent_file import SentFile
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.parity.scheme import ParitySet
from ckpt_formats.stores.parity_requests import HeldColumn, ParityName


@dataclass(frozen=True)
class Contribution:
    """A piece that is added to parities."""

    name: str
    file: SentFile
    number: int
    at: int
    """Where it begins in the stream."""


@dataclass(eq=False)
class ColumnStream:
    """What a rank adds to the parities of a set."""

    set: ParitySet
    column: int
    contributions: list[Contribution] = field(default_factory=list)
    nbytes: int = 0

    def added(self, column: HeldColumn) -> tuple[int, bool]:
        """How many contributions a parity has, and whether it lacks one of those before the last.

        Raises `CorruptError` if it has something else.
        """
        at, has_gap = 0, False
        for piece in column.pieces:
            while at < len(self.contributions) and self.contributions[at].at < piece.at:
                at += 1  # it could not be read any more
                has_gap = True
            one = self.contributions[at] if at < len(self.contributions) else None
            if one is None or (one.name, one.at, *one.file.pieces[one.number]) != (
                *(piece.file, piece.at),
                *(piece.nbytes, piece.digest),
            ):
                raise CorruptError("has added other pieces of this run", where=piece.file)
            at += 1
        return at, has_gap


class ColumnStreams:
    """The streams of a rank; none with copies."""

    def __init__(self, peers: Peers, generation: SentGeneration, rank: int) -> None:
        host = peers.host_of(rank, generation.world)
        self._scheme, self._lane = peers.parsed, peers.lane_of(rank, generation.world)
        self._run, self._generation = generation.run, generation.name
        self._streams = [ColumnStream(one, one.data.index(host)) for one in peers.sets_of(host)]

    def __iter__(self) -> Iterator[ColumnStream]:
        return iter(self._streams)

    def __bool__(self) -> bool:
        return bool(self._streams)

    def rows_at(self, host: int) -> tuple[tuple[ColumnStream, int], ...]:
        """The streams of which a host holds a parity, and which row of it."""
        return tuple((one, one.set.parities.index(host)) for one in self if host in one.set.parities)

    def parity_of(self, stream: ColumnStream, row: int) -> ParityName:
        """The name of a row of a stream's parity."""
        numbers = (stream.set.group, stream.set.number, self._lane, row, self._scheme.data, self._scheme.spares)
        return ParityName(self._run, self._generation, *numbers)

    def place(self, name: str, file: SentFile) -> None:
        """Append each new piece of a file to the shortest stream: so all holders of parities have the same streams."""
        for number in range(file.placed, len(file.pieces) if self._streams and not file.is_small else 0):
            stream = min(self._streams, key=lambda one: one.nbytes)
            stream.contributions.append(Contribution(name, file, number, stream.nbytes))
            stream.nbytes += file.pieces[number][0]
            file.placed = number + 1

    def starts(self, is_start: Callable[[Contribution], bool]) -> dict[ColumnStream, int]:
        """By stream, how many contributions have all from which a replay begins. `is_start`: whether one is of that."""
        return {
            stream: max((number for number, one in enumerate(stream.contributions, 1) if is_start(one)), default=0)
            for stream in self
        }
