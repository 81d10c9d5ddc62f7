"""Kill shards and workers that write into a bucket, or let them wait there.

Three shards (`ckpt convert --shard i/3`) and `ckpt commit` write one target. One process is sent SIGKILL at its k-th
request, for every k, which the store carries out or not: the shard that comes first, the second one, the one that
publishes, or `ckpt commit`. The other shards, and the same shard once more, run before, at the same time, or
afterwards. Then the same commands are run again, in a random order and sometimes killed again, or after `ckpt clean`.
In a cluster, a worker of Dask is killed at its requests, and the command that coordinates it.

In `shard_store_waits`, a process is not killed, but waits at its k-th request until the others have published.

Until the end, the target is absent or whole: `ckpt inspect` refuses it, and no object by which a format is known is
there before all data are. At the end, each object has the bytes of a local file, and nothing else is left but the mark
that the job is done.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import obstore

from clusters import DaskProcesses, dask_processes, files
from damage import SAMPLES, ckpt
from forking import forking
from object_stores import BUCKET, Killer, StoreServer, killing, moto, reached, start
from run import Round, counted

COUNT = 3
SECONDS = 120
SOURCE = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
FORMATS: dict[str, tuple[str, ...]] = {
    "universal": ("--pack-size", "60000"),
    "dcp": ("--to", "dcp", "--dp", "6"),
}
MARKS = {"universal": "manifest.json", "dcp": ".metadata"}
"""The object that each format knows a checkpoint by."""
ROLES = ("first", "second", "last", "commit")
CLUSTER_ROLES = ("worker", "coordinator")
FOLDER, NAME = "run", "out"
URL = f"s3://{BUCKET}/{FOLDER}/{NAME}"
KILLED = -9
LEASE_SECONDS = 3.0
"""After so long, one that waits and has the lease is taken for dead."""
LATE = 3.0
"""Seconds: who comes so late is known to be late, though the clock of the store has whole seconds."""
_PARTS = 100_000
"""Bytes of a file that takes one request here; larger ones are uploaded in parts."""


def command(words: Sequence[str], output: str, lease_seconds: float) -> None:
    """What a process does: `ckpt` with these words. What it says goes into a file."""
    from ckpt.pipeline import lease
    from ckpt_formats.stores import bucket
    from ckpt_formats.stores.bucket_place import BucketPlace

    bucket._SINGLE_REQUEST, lease.SECONDS = _PARTS, lease_seconds
    BucketPlace.look_seconds = 0.3
    ran = ckpt(*words)
    Path(output).write_text(f"ckpt {' '.join(map(str, words))}: {ran.code}\n{ran.out}{ran.err}")
    sys.exit(ran.code)


@dataclass
class Run:
    """A process that runs."""

    process: Any
    words: Sequence[str]
    output: Path

    def code(self) -> int:
        """How it ended."""
        self.process.join(SECONDS)
        assert self.process.exitcode is not None, f"hangs: {self.words}"
        return int(self.process.exitcode)

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else f"{self.words}: killed"


class Campaign:
    """One source that shards write in one format, again and again."""

    def __init__(
        self,
        server: StoreServer,
        killer: Killer,
        processes: BaseContext,
        folder: Path,
        name: str,
        roles: Sequence[str] = ROLES,
    ) -> None:
        self.server, self.killer, self.processes = server, killer, processes
        self.folder, self.name = folder, name
        self.counts = Counter[str]()
        self.killed_at = Counter[str]()
        self._numbers = iter(range(sys.maxsize))
        self.expected = files(_local(folder, name))
        self.requests: dict[str, list[str]] = {}
        for role in roles:
            self.renew()
            killer = self.killer
            self._before(role, [0, 1, 2])
            killer.expect()
            assert self.start(self._words(role, [0, 1, 2]), killer).code() == 0
            self.requests[role] = list(killer.seen)
        self.check_end()

    # Processes

    def start(self, words: Sequence[str], killer: Killer | None = None, lease_seconds: float = 60.0) -> Run:
        output = self.folder / f"output-{next(self._numbers)}"
        given = (tuple(words), str(output), lease_seconds)
        return Run(start(self.processes, self.server, command, *given, killer=killer), words, output)

    def do(self, *words: str, codes: Iterable[int] = (0,)) -> int:
        """Run a command to its end."""
        run = self.start(words)
        code = run.code()
        assert code in codes, f"{code}: {run.text()}"
        return code

    def shard(self, number: int) -> tuple[str, ...]:
        return ("convert", str(SOURCE), URL, *FORMATS[self.name], "--shard", f"{number}/{COUNT}")

    def _words(self, role: str, order: Sequence[int]) -> tuple[str, ...]:
        """The command of the process that is killed."""
        return ("commit", URL) if role == "commit" else self.shard(order[ROLES.index(role)])

    def _before(self, role: str, order: Sequence[int]) -> None:
        """What has been done when that command starts."""
        for number in order[: ROLES.index(role)]:
            if role == "commit" and number == order[-1]:
                # It has written its files, and was killed before it took the lease.
                lease = [one.startswith("PUT") and one.endswith("/lease") for one in self.requests["last"]]
                self.killer.expect(lease.index(True))
                run = self.start(self.shard(number), self.killer)
                assert run.code() == KILLED, run.text()
            else:
                self.do(*self.shard(number))

    # What is in the store

    def objects(self) -> dict[str, bytes]:
        """All objects, by their keys below the folder of the target."""
        keys = [meta["path"] for page in obstore.list(self.server.client, f"{FOLDER}/") for meta in page]
        return {key[len(FOLDER) + 1 :]: bytes(obstore.get(self.server.client, key).bytes()) for key in keys}

    def renew(self) -> None:
        """Remove everything."""
        for page in obstore.list(self.server.client, f"{FOLDER}/"):
            obstore.delete(self.server.client, [meta["path"] for meta in page])

    def is_whole(self, objects: dict[str, bytes]) -> bool:
        return {key: data for key, data in objects.items() if not _is_note(key)} == {
            f"{NAME}/{key}": data for key, data in self.expected.items()
        }

    def check(self) -> None:
        """Absent or whole."""
        objects = self.objects()
        data = {key[len(NAME) + 1 :] for key in objects if not _is_note(key)}
        assert data <= self.expected.keys(), data - self.expected.keys()
        if MARKS[self.name] in data:
            assert self.is_whole(objects), f"a mark is there, and not {sorted(self.expected.keys() - data)}"
        run = self.start(("inspect", URL))
        code = run.code()
        if code == 0:
            assert self.is_whole(self.objects()), f"an unfinished target can be read: {sorted(objects)}"
            self.counts["whole"] += 1
            return
        assert not self.is_whole(objects) or f"{NAME}/.ckpt/job" in objects, f"a whole target is refused: {run.text()}"
        if not data and f"{NAME}/.ckpt/job" not in objects:
            assert code == 10, run.text()
            self.counts["nothing"] += 1
        else:
            assert code == 20, run.text()
            assert "not complete: a job is writing here, or was interrupted" in run.text()
            self.counts["unfinished"] += 1

    def check_end(self, marks: int = 1) -> None:
        """Whole, and nothing else but the mark."""
        objects = self.objects()
        assert self.is_whole(objects), sorted(objects)
        left = [key for key in objects if _is_note(key)]
        assert len(left) <= marks, left
        assert all(key.startswith(f".{NAME}.shards.ckpt-partial/") for key in left), left

    # Rounds

    def kill(self, role: str, at: int, generator: random.Random) -> None:
        """Kill one process at a request, look, and go on as a user does."""
        self.renew()
        order = generator.sample(range(COUNT), COUNT)
        self._before(role, order)
        killer = self.killer
        killer.expect(at, generator.random() < 0.5)
        victim = self.start(self._words(role, order), killer)
        companions = self._companions(role, order, generator)
        code = victim.code()
        assert code in (0, KILLED), victim.text()
        for one in companions:
            # A killed one may have left the lease or half of the files to them: they say so, and are run again.
            assert one.code() in ((0, 10, 11, 20) if "commit" in one.words else (0, 11)), one.text()
        if code == KILLED:
            self.counts["killed"] += 1
            self.killed_at[role] += 1
            self.counts["carried out"] += killer.is_carried_out
        else:
            self.counts["ended before"] += 1
        self.check()
        self.go_on(generator)

    def go_on(self, generator: random.Random) -> None:
        """Run all commands again, some of which are killed again, until the target is there."""
        if generator.random() < 0.2:
            while self._perhaps_killed(("clean", URL), 30, generator):
                self.check()
            self.counts["cleaned"] += 1
            if objects := self.objects():  # `clean` leaves a complete target, but not the mark
                assert self.is_whole(objects)
                self.do("commit", URL)
                self.check_end(marks=0)
                return
        for number in generator.sample(range(COUNT), COUNT):
            while self._perhaps_killed(self.shard(number), len(self.requests["last"]), generator):
                self.check()
        for _ in range(2):
            self.do("commit", URL)
            self.check_end()
        self.do(*self.shard(generator.randrange(COUNT)))
        self.check_end()

    def _companions(self, role: str, order: Sequence[int], generator: random.Random) -> list[Run]:
        """Processes that run at the same time: the same command, or others."""
        chance = generator.random()
        if chance < 0.5:
            return []
        self.counts["at the same time"] += 1
        others = order[ROLES.index(role) + 1 :] if role != "commit" else order[:1]
        words = [self._words(role, order)] if chance < 0.75 else [self.shard(one) for one in others]
        return [self.start(one) for one in (*words, *([("commit", URL)] if chance > 0.9 else []))]

    def _perhaps_killed(self, words: Sequence[str], requests: int, generator: random.Random) -> bool:
        """Run a command; whether it was killed, as every fourth is."""
        killer = self.killer
        killer.expect(generator.randrange(requests) if generator.random() < 0.25 else -1, generator.random() < 0.5)
        run = self.start(words, killer)
        code = run.code()
        assert code in (0, KILLED), run.text()
        self.counts["killed again"] += code == KILLED
        return code == KILLED

    def hold(self, role: str, at: int, generator: random.Random, late: float = LATE) -> None:
        """One process waits at a request, until the others have done everything; then it goes on, or is killed."""
        self.renew()
        order = generator.sample(range(COUNT), COUNT)
        self._before(role, order)
        killer = self.killer
        is_killed = generator.random() < 0.5
        killer.expect(at + generator.randrange(1, 8) if is_killed else -1, generator.random() < 0.5, pause_at=at)
        held = self.start(self._words(role, order), killer, LEASE_SECONDS)
        while not killer.paused.wait(0.02) and held.process.is_alive():
            pass
        try:
            for number in generator.sample(range(COUNT), COUNT):
                self.do(*self.shard(number))
            self.do("commit", URL)
            time.sleep(late)
            if killer.paused.is_set():
                assert self.is_whole(self.objects())
        finally:
            killer.go_on.set()
        code = held.code()
        assert code in (0, KILLED, 11), held.text()  # one that has lost its lease says so
        self.counts["held"] += 1
        self.counts["held, then killed"] += code == KILLED
        self.counts["held, then locked out"] += code == 11
        self.check()
        if code:
            self.do(*held.words)
        self.check_end()

    # A cluster

    def count_in_cluster(self, cluster: DaskProcesses) -> None:
        """The requests of the command that coordinates, and of its only worker."""
        self.renew()
        killer = self.killer
        killer.expect()
        assert self.start(self._on(cluster), killer).code() == 0
        self.requests["coordinator"] = list(killer.seen)
        # One of two workers looks for the lease in each of its tasks, and puts the files.
        puts = [f"PUT {file}" for file in self.expected]
        self.requests["worker"] = [one for put in puts for one in ("GET .ckpt/lease", put)]

    def _on(self, cluster: DaskProcesses) -> tuple[str, ...]:
        return ("convert", str(SOURCE), URL, *FORMATS[self.name], "--executor", cluster.url)

    def kill_in_cluster(self, role: str, at: int, cluster: DaskProcesses, generator: random.Random) -> None:
        """Kill a worker at one of its requests, or the command; look, and go on as a user does."""
        self.renew()
        killer = self.killer
        words = self._on(cluster)
        killer.expect(at, generator.random() < 0.5)
        if role == "worker":
            worker = cluster.start_worker(AWS_ENDPOINT_URL=killer.endpoint)
            killer.pid = worker.pid
            cluster.workers.append(worker)
            cluster.wait_for(len(cluster.workers))
            run = self.start(words)
            code = run.code()
            assert code == 0, run.text()
            is_killed = worker.poll() is not None
            worker.kill()
            cluster.workers.remove(worker)
            worker.wait()
            cluster.wait_for(len(cluster.workers))
        else:
            run = self.start(words, killer)
            code = run.code()
            assert code in (0, KILLED), run.text()
            is_killed = code == KILLED
            self.check()
            if generator.random() < 0.2:
                while self._perhaps_killed(("clean", URL), 30, generator):
                    self.check()
                self.counts["cleaned"] += 1
            if not self.is_whole(self.objects()):
                self.do(*(words if generator.random() < 0.6 else words[:-2]))
            elif any(map(_is_note, self.objects())):
                self.do(*words, codes=(0, 30))  # if it is there already, what was left is removed
        self.counts["killed" if is_killed else "ended before"] += 1
        self.killed_at[role] += is_killed
        self.check_end(marks=0)


def _is_note(key: str) -> bool:
    """Whether an object is what ckpt knows of a job."""
    return key.startswith((f"{NAME}/.ckpt/", f".{NAME}."))


def _local(folder: Path, name: str) -> Path:
    return folder / f"local-{name}"


@contextmanager
def campaigns(folder: Path, names: Iterable[str] = FORMATS, roles: Sequence[str] = ROLES) -> Iterator[list[Campaign]]:
    names = tuple(names)
    for name in names:
        assert ckpt("convert", SOURCE, _local(folder, name), *FORMATS[name]).code == 0
    processes = forking("shard_store_kills", "ckpt.pipeline.bucket_target")
    with moto() as server, killing(server) as killer, reached(server):
        yield [Campaign(server, killer, processes, folder, name, roles) for name in names]


def points(
    campaign: Campaign, roles: Iterable[str], kill: Callable[[str, int], None], generator: random.Random
) -> Iterator[Round]:
    """Yield each request of each role, in a random order, again and again."""

    def at(role: str, number: int) -> None:
        try:
            kill(role, number)
        except BaseException as error:
            request = campaign.requests[role][number]
            raise AssertionError(f"{campaign.name}, {role} at request {number}, {request}: {error}") from error

    while True:
        requests = [(role, number) for role in roles for number in range(len(campaign.requests[role]))]
        for role, number in generator.sample(requests, len(requests)):
            yield Round(f"{campaign.name}, {role}", counted(campaign.counts, partial(at, role, number)))


def _in_turn(iterators: Sequence[Iterator[Round]]) -> Iterator[Round]:
    while True:
        yield from map(next, iterators)


def kills(folder: Path, seed: int, waits: bool = False) -> Iterator[Round]:
    generator = random.Random(seed)
    with campaigns(folder) as ones:
        acts = [partial(one.hold if waits else one.kill, generator=generator) for one in ones]
        yield from _in_turn([points(one, ROLES, act, generator) for one, act in zip(ones, acts, strict=True)])


def waits(folder: Path, seed: int) -> Iterator[Round]:
    yield from kills(folder, seed, waits=True)


def cluster_kills(folder: Path, seed: int) -> Iterator[Round]:
    generator = random.Random(seed)
    with campaigns(folder, roles=("last",)) as ones, dask_processes(1, folder) as cluster:
        acts = []
        for one in ones:
            one.count_in_cluster(cluster)
            acts.append(partial(one.kill_in_cluster, cluster=cluster, generator=generator))
        yield from _in_turn([points(one, CLUSTER_ROLES, act, generator) for one, act in zip(ones, acts, strict=True)])
