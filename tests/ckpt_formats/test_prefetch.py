"""Ranges of objects in stores, requested before they are read: few large requests, each byte once, bounded memory."""

import random
import threading
from collections.abc import Callable, Iterable, Sequence

import pytest

from ckpt_formats.core.coming_reads import ObjectRange
from ckpt_formats.core.errors import CkptError, InvalidArgumentError
from ckpt_formats.core.prefetch import PlannedReads, Prefetch
from ckpt_formats.core.store_path import FolderEntry, StoreError, StorePath
from ckpt_formats.stores.repetition import Repetition, RetryPolicy, Transient

MiB = 1 << 20
MEMORY = 64 * MiB


class Objects:
    """A store in memory, of objects whose bytes follow from their offset, and all requests for their ranges."""

    url = "memory://bucket"

    def __init__(self, is_open: threading.Event | None = None) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        self.fails: Callable[[int], bool] = lambda number: False
        self._is_open = is_open
        self._lock = threading.Lock()

    def stat(self, key: str) -> object:
        raise FileNotFoundError(key)

    def entries(self, key: str) -> list[FolderEntry]:
        raise FileNotFoundError(key)

    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        raise AssertionError("only ranges are requested here")

    def request(self, key: str, offset: int, nbytes: int) -> None:
        raise AssertionError("only ranges are requested here")

    def has(self, key: str, offset: int, nbytes: int) -> bool:
        return False

    def keep(self, nbytes: int) -> None:
        pass

    def get(self, key: str, offset: int, nbytes: int) -> memoryview:
        with self._lock:
            self.ranges.append((key, offset, nbytes))
            number = len(self.ranges)
        if self._is_open is not None:
            self._is_open.wait(60)
        if self.fails(number):
            raise OSError("the store is gone")
        return memoryview(content(offset, nbytes))

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.ranges)

    def range(self, key: str, start: int, stop: int) -> ObjectRange:
        return ObjectRange(StorePath(self, key), start, stop)  # type: ignore[arg-type]


PATTERN = random.Random(0).randbytes(1 << 16) * 2


def content(offset: int, nbytes: int) -> bytes:
    begin = offset % (1 << 16)
    return (PATTERN * (nbytes // (1 << 16) + 2))[begin : begin + nbytes]


def read(reads: PlannedReads, one: ObjectRange, step: int = MiB) -> None:
    """Read a range as a `Reader` does, and compare its bytes."""
    for start in range(one.start, one.stop, step):
        buffer, done = bytearray(min(step, one.stop - start)), 0
        while done < len(buffer):
            got = reads.read_into(one.path, start + done, memoryview(buffer)[done:])
            assert got, f"byte {start + done} is not there"
            done += got
        assert bytes(buffer) == content(start, len(buffer))


def prefetch(*plan: Iterable[ObjectRange], nbytes: int = MEMORY, readers: int = 1) -> Prefetch:
    return Prefetch(plan, nbytes, readers)


def test_tensors_one_after_another_are_few_large_requests() -> None:
    store = Objects()
    tensors = [store.range("a", at, at + 3 * MiB) for at in range(0, 96 * MiB, 3 * MiB)]
    with prefetch(tensors) as ahead:
        for tensor in tensors:
            read(ahead.reads[0], tensor)
    assert store.nbytes == 96 * MiB
    assert len(store.ranges) <= 14


def test_neighbours_are_joined_and_others_are_not() -> None:
    store = Objects()
    near = [store.range("a", at, at + 1000) for at in (0, MiB // 4, MiB // 2)]
    far = [store.range("a", at, at + 1000) for at in (10 * MiB, 11 * MiB)]
    with prefetch([far[0], *near, far[1]]) as ahead:
        for one in (*near, *far):
            read(ahead.reads[0], one)
    assert sorted(store.ranges) == [("a", 0, MiB // 2 + 1000), ("a", 10 * MiB, 1000), ("a", 11 * MiB, 1000)]


def test_a_larger_gap_is_requested_after_as_many_bytes_that_are_read() -> None:
    store = Objects()
    ranges = [store.range("a", 0, 2 * MiB), store.range("a", 3 * MiB, 3 * MiB + 1000)]
    with prefetch(ranges) as ahead:
        for one in ranges:
            read(ahead.reads[0], one)
    assert sorted(store.ranges) == [("a", 0, 3 * MiB + 1000)]


def test_several_places_are_read_on_at_once() -> None:
    """As of a master that is compared with the model's copy; the plan names one after the other."""
    store = Objects()
    master, copy = store.range("a", 0, 64 * MiB), store.range("b", 0, 32 * MiB)
    with prefetch([copy, master]) as ahead:
        for at in range(0, 64 * MiB, 2 * MiB):
            read(ahead.reads[0], store.range("a", at, at + 2 * MiB))
            read(ahead.reads[0], store.range("b", at // 2, at // 2 + MiB))
    assert store.nbytes == 96 * MiB
    assert len(store.ranges) == 12


def test_columns_of_one_file_that_many_files_name_are_requested_once() -> None:
    store = Objects()
    named = [store.range("a", rank * 1000, 16 * MiB - 7000 + rank * 1000) for rank in range(8)]
    with prefetch(named) as ahead:
        read(ahead.reads[0], store.range("a", 0, 16 * MiB))
    assert store.nbytes == 16 * MiB


@pytest.mark.parametrize("readers", [1, 4])
def test_memory_bounds_what_is_requested(readers: int) -> None:
    is_open = threading.Event()
    store = Objects(is_open)
    plan = [[store.range(f"{n}", 0, 100 * MiB)] for n in range(readers)]
    with prefetch(*plan, readers=readers) as ahead:
        threads = [threading.Thread(target=read, args=(ahead.reads[n], plan[n][0])) for n in range(readers)]
        for thread in threads:
            thread.start()
        ahead._pool.submit(int).cancel()
        for _ in range(100):
            threading.Event().wait(0.002)
        assert sum(one.nbytes for one in ahead._fetched) <= MEMORY + readers * 8 * MiB
        is_open.set()
        for thread in threads:
            thread.join()
    assert store.nbytes == readers * 100 * MiB


def test_the_next_file_is_requested_before_this_one_is_read() -> None:
    store = Objects()
    first, second = [store.range("a", 0, 8 * MiB)], [store.range("b", 0, 8 * MiB)]
    with prefetch(first, second) as ahead:
        read(ahead.reads[0], store.range("a", 0, MiB))
        assert {one.path.key for one in ahead._fetched} == {"a", "b"}


def test_a_wrong_plan_is_not_followed() -> None:
    """It names far more than is read: what was requested for nothing is bounded."""
    store = Objects()
    named = [store.range("a", at, at + 8 * MiB) for at in range(0, 8 << 30, 8 * MiB)]
    with prefetch(named, nbytes=8 * MiB) as ahead:
        for one in named[::8]:
            ahead.reads[0].read_into(one.path, one.start, memoryview(bytearray(MiB)))
    assert store.nbytes < (128 + 8 * 16) * MiB


def test_prefetch_leaves_reads_that_were_not_planned_to_the_reader() -> None:
    store = Objects()
    with prefetch([store.range("a", 0, 1000)]) as ahead:
        assert ahead.reads[0].read_into(StorePath(store, "b"), 0, memoryview(bytearray(5))) is None  # type: ignore[arg-type]
        assert ahead.reads[0].read_into(StorePath(store, "a"), 1000, memoryview(bytearray(5))) is None  # type: ignore[arg-type]
        read(ahead.reads[0], store.range("a", 0, 1000))
        assert ahead.reads[0].read_into(StorePath(store, "a"), 0, memoryview(bytearray(5))) is None  # type: ignore[arg-type]


def test_a_failure_reaches_the_reader() -> None:
    store = Objects()
    store.fails = lambda number: number == 1
    one = store.range("a", 0, 1000)
    with prefetch([one]) as ahead:
        with pytest.raises(OSError, match="gone"):
            read(ahead.reads[0], one)
        assert ahead.reads[0].read_into(one.path, 0, memoryview(bytearray(5))) is None


@pytest.mark.parametrize("seed", range(6))
def test_any_plan_and_any_order_give_the_bytes(seed: int) -> None:
    chosen, store = random.Random(seed), Objects()
    plan: Sequence[list[ObjectRange]] = [
        [
            store.range(chosen.choice("abc"), start, start + chosen.choice((1, 5000, MiB, 5 * MiB)))
            for start in (chosen.randrange(40 * MiB) for _ in range(30))
        ]
        for _ in range(3)
    ]

    def work(reads: PlannedReads, ranges: list[ObjectRange]) -> None:
        with reads:
            for one in ranges:
                buffer = bytearray(one.stop - one.start)
                got = reads.read_into(one.path, one.start, memoryview(buffer)) or 0
                assert bytes(buffer[:got]) == content(one.start, got)

    with prefetch(*plan, nbytes=8 * MiB, readers=3) as ahead:
        for ranges in plan:
            chosen.shuffle(ranges)
        threads = [threading.Thread(target=work, args=pair) for pair in zip(ahead.reads, plan, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not ahead._fetched


def test_a_store_that_complains_gets_half_as_many_for_a_while() -> None:
    now, pauses, left = [1000.0], list[float](), [3]

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    def request() -> int:
        if left[0]:
            left[0] -= 1
            now[0] += 2
            raise Transient("SlowDown", is_throttled=True)
        return 7

    requests = Repetition(lambda: now[0], sleep)
    assert requests(request, "s3://bucket/a") == 7
    assert requests.depth == 2  # 16, and a half three times
    assert len(pauses) == 3
    now[0] += 70
    assert requests(request, "s3://bucket/a") == 7
    assert requests.depth == 16


class Clock:
    """A clock that goes on only while something sleeps, so that no test waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.mark.parametrize("budget", [0.0, 20.0, 120.0])
def test_a_request_that_always_fails_is_repeated_until_the_budget_is_spent(budget: float) -> None:
    clock = Clock()

    def request() -> int:
        raise Transient("500 Internal Server Error", hint="Wait.")

    with pytest.raises(StoreError, match="500 Internal") as failed:
        Repetition(clock, clock.sleep, RetryPolicy(budget))(request, "s3://bucket/a")
    assert (failed.value.filename, failed.value.hint) == ("s3://bucket/a", "Wait.")
    assert budget - 15 <= clock.now <= budget
    assert max(clock.pauses, default=0) <= 15
    assert bool(clock.pauses) == (budget > 0)


def test_a_store_that_was_never_reached_is_given_up_soon() -> None:
    clock = Clock()
    requests = Repetition(clock, clock.sleep, RetryPolicy(100.0))

    def request() -> int:
        raise Transient("no connection", is_unreached=True)

    with pytest.raises(StoreError):
        requests(request, "s3://bucket/a")
    assert clock.now <= 10
    assert requests(lambda: 7, "s3://bucket/a") == 7
    with pytest.raises(StoreError):
        requests(request, "s3://bucket/a")
    assert clock.now > 90


def test_a_wrong_answer_is_asked_for_a_few_times_only() -> None:
    clock = Clock()

    def request() -> int:
        raise Transient("another range", is_wrong=True)

    with pytest.raises(StoreError, match="another range"):
        Repetition(clock, clock.sleep)(request, "s3://bucket/a")
    assert len(clock.pauses) == 3


def test_a_request_that_makes_another_one_waits_for_no_place_of_its_own() -> None:
    clock = Clock()
    requests = Repetition(clock, clock.sleep)
    complaints = [Transient("SlowDown", is_throttled=True) for _ in range(5)]

    def complaining() -> None:
        clock.now += 2
        if complaints:
            raise complaints.pop()

    requests(complaining, "s3://bucket/a")
    assert requests.depth == 1
    assert requests(lambda: requests(lambda: 7, "s3://bucket/b"), "s3://bucket/a") == 7


@pytest.mark.parametrize("name", ["CKPT_STORE_RETRY", "CKPT_STORE_TIMEOUT"])
def test_a_user_states_how_patient_requests_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7.5")
    assert 7.5 in (RetryPolicy.of_user().budget, RetryPolicy.of_user().silence)
    for wrong in ("", "soon", "-1", "nan", "inf"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(InvalidArgumentError, match=f"{name} is not a number of seconds"):
            RetryPolicy.of_user()


def test_prefetch_repeats_no_request_that_cannot_succeed() -> None:
    pauses = list[float]()

    def request() -> int:
        raise CkptError("was changed")

    with pytest.raises(CkptError, match="was changed"):
        Repetition(sleep=pauses.append)(request, "s3://bucket/a")
    assert not pauses
