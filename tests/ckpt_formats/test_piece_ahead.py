"""Pieces are fetched once, before they are needed where reads go on, and again after an error."""

from concurrent.futures import wait
from itertools import pairwise

import pytest

from ckpt_formats.core.errors import IncompleteError
from ckpt_formats.stores import piece_ahead
from ckpt_formats.stores.piece_ahead import PieceAhead

STARTS = [0, 100, 250, 300, 420, 500, 600, 700]
PIECES = len(STARTS) - 1


class Source:
    """Gives pieces, and notes which ones."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.fails = False
        self.missing = range(0)

    def __call__(self, name: str, number: int) -> memoryview:
        self.fetched.append(number)
        if self.fails or number in self.missing:
            raise IncompleteError("gone")
        return memoryview(bytes([number]) * (STARTS[number + 1] - STARTS[number]))


def read(ahead: PieceAhead, first: int, last: int | None = None, goes_on: bool = True) -> list[bytes]:
    numbers = range(first, (first if last is None else last) + 1)
    pieces = ahead.request("a", numbers, STARTS, goes_on=goes_on)
    return [bytes(ahead.result("a", number, piece)) for number, piece in zip(numbers, pieces, strict=True)]


def test_a_file_that_is_read_from_start_to_end_is_fetched_once_and_ahead() -> None:
    source = Source()
    ahead = PieceAhead(source)
    read(ahead, 0)
    assert not ahead.has("a", range(1, 2))
    for number in range(1, PIECES):
        read(ahead, number)
        assert ahead.has("a", range(number, min(number + 1 + piece_ahead._AHEAD, PIECES)))
    assert read(ahead, 0, PIECES - 1) == [bytes([n]) * (high - low) for n, (low, high) in enumerate(pairwise(STARTS))]
    assert sorted(source.fetched) == list(range(PIECES))


def test_headers_and_reads_within_a_piece_fetch_nothing_ahead() -> None:
    source = Source()
    ahead = PieceAhead(source)
    for number in (0, 1, 2):
        read(ahead, number, goes_on=False)
    read(ahead, 5)
    read(ahead, 5)
    assert source.fetched == [0, 1, 2, 5]
    ahead.limit(1 << 20)  # too little memory for many streams
    read(ahead, 3)
    read(ahead, 4)
    assert source.fetched == [0, 1, 2, 5, 3, 4]


def test_the_pieces_that_were_needed_last_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_ahead, "_MIN_NBYTES", 0)
    source = Source()
    ahead = PieceAhead(source)
    ahead.limit(250)
    for number in (6, 0, 4, 0):
        read(ahead, number)
    assert [ahead.has("a", range(number, number + 1)) for number in (0, 4, 6)] == [True, True, False]
    read(ahead, 0, PIECES - 1)  # more than the limit: what a read needs is there until it has it
    assert source.fetched == [6, 0, 4, 1, 2, 3, 5, 6]


def test_a_piece_that_failed_is_asked_for_again_and_shared_by_those_that_wait() -> None:
    source = Source()
    ahead = PieceAhead(source)
    source.fails = True
    with pytest.raises(IncompleteError, match="gone"):
        read(ahead, 3)
    source.fails = False
    (piece,) = ahead.request("a", range(3, 4), STARTS)
    (other,) = ahead.request("a", range(3, 4), STARTS)
    assert piece is other
    assert bytes(ahead.result("a", 3, piece)) == bytes([3]) * 120
    assert source.fetched == [3, 3]


def test_a_piece_that_failed_ahead_of_its_read_is_asked_for_again_by_the_read() -> None:
    source = Source()
    ahead = PieceAhead(source)
    source.missing = range(2, 4)
    read(ahead, 0)
    read(ahead, 1)
    wait([piece for piece, _ in ahead._pieces.values()])
    source.missing = range(0)
    assert read(ahead, 2, 3) == [bytes([2]) * 50, bytes([3]) * 120]
    assert [source.fetched.count(number) for number in range(4)] == [1, 1, 2, 2]
    assert ahead._nbytes == sum(nbytes for _, nbytes in ahead._pieces.values())
