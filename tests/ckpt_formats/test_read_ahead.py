"""Ranges of objects: what is requested, how often, and how much is kept."""

import random
import threading
from collections.abc import Callable

import pytest

from ckpt_formats.stores.read_ahead import BLOCK, ReadAhead

MiB = 1 << 20


class Requests:
    """Objects of known bytes, and all requests for their ranges."""

    def __init__(self, fail: Callable[[int], bool] = lambda number: False) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        self._fail = fail
        self._lock = threading.Lock()

    def __call__(self, key: str, offset: int, nbytes: int) -> memoryview:
        with self._lock:
            self.ranges.append((key, offset, nbytes))
            if self._fail(len(self.ranges)):
                raise OSError("the store is gone")
        return memoryview(content(key, offset, nbytes))


def content(key: str, offset: int, nbytes: int) -> bytes:
    """Bytes that differ by object and block."""
    blocks = range(offset // 4096, (offset + nbytes - 1) // 4096 + 1) if nbytes else range(0)
    whole = b"".join(random.Random(f"{key}{block}").randbytes(4096) for block in blocks)
    return whole[offset % 4096 :][:nbytes]


def read(ahead: ReadAhead, key: str, length: int, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    return bytes(buffer[: ahead.read_into(key, length, offset, memoryview(buffer))])


def test_small_reads_of_a_header_share_requests() -> None:
    requests = Requests()
    ahead = ReadAhead(requests)
    for offset in range(0, 16 * 4096, 4096):
        assert read(ahead, "a", 50 * MiB, offset, 100) == content("a", offset, 100)
    assert requests.ranges == [("a", 0, BLOCK)]
    for offset in range(16 * 4096, 64 * 4096, 4096):
        assert read(ahead, "a", 50 * MiB, offset, 100) == content("a", offset, 100)
    assert len(requests.ranges) <= 3
    assert sum(nbytes for _, _, nbytes in requests.ranges) <= 2 * 64 * 4096


def test_blocks_are_requested_again_after_an_outage() -> None:
    """Also those that were requested ahead of the read that failed: each would fail once more, when it is read."""
    is_gone = [False]
    requests = Requests(lambda number: is_gone[0])
    ahead = ReadAhead(requests)
    for offset in range(0, 2 * MiB, BLOCK):
        read(ahead, "a", 8 * MiB, offset, BLOCK)
    is_gone[0] = True
    with pytest.raises(OSError, match="the store is gone"):
        read(ahead, "a", 8 * MiB, 2 * MiB, 6 * MiB)
    ahead._pool.shutdown()  # all have failed that were on their way
    del ahead._pool
    is_gone[0] = False
    for offset in range(2 * MiB, 8 * MiB, BLOCK):
        assert read(ahead, "a", 8 * MiB, offset, BLOCK) == content("a", offset, BLOCK)


def test_a_small_object_is_one_request() -> None:
    requests = Requests()
    ahead = ReadAhead(requests)
    for offset in range(0, MiB, 1 << 17):
        assert read(ahead, "a", MiB, offset, 100) == content("a", offset, 100)
    assert requests.ranges == [("a", 0, MiB)]


@pytest.mark.parametrize(("apart", "most"), [(MiB // 8, 5), (4 * MiB, 2)])
def test_rows_of_a_large_object_take_few_bytes(apart: int, most: int) -> None:
    """Rows near one another share requests after a while; others cost a block each. `most`: MiB."""
    requests, length = Requests(), 200 * MiB
    ahead = ReadAhead(requests)
    for offset in range(0, 32 * apart, apart):
        assert read(ahead, "a", length, offset, 4096) == content("a", offset, 4096)
    assert len(requests.ranges) <= 32
    assert sum(nbytes for _, _, nbytes in requests.ranges) <= most * MiB


def test_reading_front_to_back_takes_large_requests() -> None:
    requests, length = Requests(), 40 * MiB + 5000
    ahead = ReadAhead(requests)
    data = b"".join(read(ahead, "a", length, offset, MiB // 2) for offset in range(0, length, MiB // 2))
    assert data == content("a", 0, length)
    assert sum(nbytes for _, _, nbytes in requests.ranges) == length  # nothing twice
    assert len(requests.ranges) <= 10


def test_several_places_of_an_object_are_read_on_at_once() -> None:
    """As of a ZeRO shard: a parameter's master and its two moments lie far from one another."""
    requests, length, each = Requests(), 96 * MiB, 16 * MiB
    ahead = ReadAhead(requests)
    begins = (0, 32 * MiB, 64 * MiB)
    for at in range(0, each, MiB):
        for begin in begins:
            assert read(ahead, "a", length, begin + at, MiB) == content("a", begin + at, MiB)
    needed = [r for r in requests.ranges if any(begin <= r[1] < begin + each for begin in begins)]
    assert len(needed) <= 3 * 8
    assert len({offset for _, offset, _ in requests.ranges}) == len(requests.ranges)


@pytest.mark.parametrize("seed", range(4))
def test_any_reads_give_the_bytes(seed: int) -> None:
    chosen, ahead, length = random.Random(seed), ReadAhead(Requests()), 6 * MiB + 77
    for _ in range(60):
        key, offset = chosen.choice("ab"), chosen.randrange(length + 1000)
        nbytes = chosen.choice((0, 1, 4096, 3 * MiB))
        assert read(ahead, key, length, offset, nbytes) == content(key, offset, max(0, min(nbytes, length - offset)))


def test_a_request_that_failed_is_made_again_by_the_next_read() -> None:
    requests = Requests(fail=lambda number: number == 1)
    ahead = ReadAhead(requests)
    with pytest.raises(OSError, match="gone"):
        read(ahead, "a", 100, 0, 100)
    assert read(ahead, "a", 100, 0, 100) == content("a", 0, 100)


def test_read_ahead_is_bounded() -> None:
    requests = Requests()
    ahead = ReadAhead(requests)
    for number in range(400):
        read(ahead, f"object {number}", MiB, 0, 10)
    before = len(requests.ranges)
    read(ahead, "object 399", MiB, 0, 10)
    assert len(requests.ranges) == before
    read(ahead, "object 0", MiB, 0, 10)
    assert len(requests.ranges) == before + 1  # it was given up for others


def test_threads_share_requests() -> None:
    requests, length = Requests(), 8 * MiB
    ahead = ReadAhead(requests)
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(read(ahead, "a", length, 0, length))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == 4 * [content("a", 0, length)]
    assert sum(nbytes for _, _, nbytes in requests.ranges) == length
