"""Kill the publisher of a chain, and those that follow it.

A trainer whose states are known publishes them, of two ranks, into a folder or a bucket. It is killed in front of a
change to the file system, or at one of its requests, which the store carries out or not: at each once, in a random
order. Then a follower that holds an earlier step updates. The trainer starts again, from the last step that it
published or from an earlier one and then on another way, and publishes to its end. A state that is followed must be one
that the trainer had at that step of that epoch, bit for bit; a follower never goes back within an epoch, and ends with
the trainer's last state.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import obstore
import safetensors.numpy
import xxhash

from ckpt.following.follow import follow_into
from ckpt.following.follower import Follower
from ckpt.following.served import CURRENT, RECORD, ServedFolder
from ckpt.following.source import PublishedSource
from ckpt.publishing.publication import Publication, open_publication
from ckpt.publishing.published_objects import put_object
from ckpt.publishing.rank_buffers import RankBuffers
from ckpt.publishing.retention import remove_unneeded
from ckpt_cli.main import cli
from ckpt_formats.core.errors import CkptError, LockedError, NotFoundError, OutputError
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal.published.model import PublishedModel
from ckpt_formats.universal.published.records import RankShare, RecordRef, StepName, StepRecord
from forking import forking
from killing import killed, killed_after, points
from object_stores import BUCKET, Killer, StoreServer, faulty, killing, moto, reached, start
from published import Weights, model_of
from run import Round, alternated
from sync_damage import LAST as LAST_STEP
from sync_damage import PATIENCE, PublishedHistory, same

RANKS = 2
SECONDS = 120
KILLED, REFUSED = -9, 11
CHAIN = f"s3://{BUCKET}/policy.chain"
RANDOM_LAST = 40
FIRST, KILLED_FROM, LAST = 1, 4, 8
"""The first step, the last one before the publisher is killed, and the last one."""


_MAX_EPOCHS = 20
"""Above the last epoch of a chain here."""
Way = tuple[tuple[int, int], ...]
"""Where a trainer went another way: after which step, and the number of that way."""


def weights_at(step: int, way: Way = ()) -> Weights:
    """Weights that change a little with each step."""
    random_ = np.random.default_rng(1)
    weights = {
        "embed": random_.normal(0, 0.02, (96, 64)).astype(ml_dtypes.bfloat16),
        "norm": random_.normal(1, 0.1, 33).astype(np.float32),
        "head": random_.normal(0, 0.02, (3, 700)).astype(ml_dtypes.bfloat16),
    }
    for one in range(1, step + 1):
        changes = np.random.default_rng([one, max((number for since, number in way if since < one), default=0)])
        for values in weights.values():
            bits = values.reshape(-1).view(f"u{values.dtype.itemsize}")
            bits[changes.integers(0, bits.size, 1 + bits.size // 50)] += 1
    return weights


def digest(weights: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Return a hash of names, dtypes, shapes and all bits."""
    hashed = xxhash.xxh3_128()
    for name in sorted(weights):
        values = weights[name]
        hashed.update(f"{name} {values.dtype} {values.shape} ".encode())
        hashed.update(np.ascontiguousarray(values).view(np.uint8))
    return hashed.hexdigest()


@dataclass(frozen=True)
class Diary:
    """What a trainer has done, in a file that outlives it: before it commits a step, its epoch, number and weights."""

    path: Path

    def note(self, epoch: int, step: int, weights: Weights) -> None:
        with self.path.open("a") as file:
            file.write(f"{epoch} {step} {digest(weights)}\n")

    def states(self) -> set[tuple[int, int, str]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return {(int(epoch), int(step), hashed) for epoch, step, hashed in map(str.split, lines)}


@dataclass(frozen=True)
class Trainer:
    """Publishes all steps from one to another, as a process that starts with the state of the first one."""

    chain: str
    diary: Diary
    first: int
    last: int
    way: Way = ()
    pause: float = 0.0
    """Seconds that a step takes."""
    retain: bool = False
    """Whether it removes what the last three steps do not need, after half a second."""

    def run(self) -> None:
        model = model_of(self.weights(self.first), RANKS)
        ranks = [RankBuffers(model, rank) for rank in range(RANKS)]
        with open_publication(target_path(self.chain), model) as publication:
            fill(ranks, model, self.weights(self.first))
            begin = publication.start(self.first, [rank.state() for rank in ranks])
            for step in range(self.first, self.last + 1):
                weights = self.weights(step)
                fill(ranks, model, weights)
                if step > self.first or not begin.is_published:
                    self.publish(publication, ranks, step, weights)
                for rank in ranks:
                    rank.accept()
                time.sleep(self.pause)

    def publish(self, publication: Publication, ranks: list[RankBuffers], step: int, weights: Weights) -> None:
        parent, bases = publication.parent, None
        deltas = None if parent is None else store(publication, ranks, False)
        if publication.needs_base():
            bases = store(publication, ranks, True)
        self.diary.note(publication.epoch, step, weights)
        if bases is not None:
            publication.commit(step, None, bases, deltas)
        elif deltas is not None:
            publication.commit(step, parent, deltas)
        for before in publication.due_folds():
            self.fold(publication, ranks, before)
        if self.retain:
            remove_unneeded(publication, "last:3", grace=0.5)

    def fold(self, publication: Publication, ranks: list[RankBuffers], before: RecordRef) -> None:
        """Publish the steps since an earlier one as one delta."""
        own = [RankBuffers(publication.model, rank) for rank in range(len(ranks))]
        fill(own, publication.model, self.weights(before.name.step))
        for one in own:
            one.state()
            one.accept()
        assert publication.record is not None
        fill(own, publication.model, self.weights(publication.record.name.step))
        publication.add_fold(before, store(publication, own, False))

    def weights(self, step: int) -> Weights:
        return weights_at(step, self.way)


@dataclass(frozen=True)
class CommandTrainer(Trainer):
    """Saves a checkpoint at each step, which `ckpt publish` publishes."""

    def run(self) -> None:
        for step in range(self.first, self.last + 1):
            weights = self.weights(step)
            for epoch in range(1, _MAX_EPOCHS):  # that which the command chooses is not known here
                self.diary.note(epoch, step, weights)
            checkpoint = self.diary.path.with_name("step.safetensors")
            checkpoint.write_bytes(safetensors.numpy.save(dict(weights)))
            arguments = ["publish", str(checkpoint), self.chain, "--step", str(step), "--names", "as-is"]
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                cli.main(arguments, standalone_mode=False)


def store(publication: Publication, ranks: list[RankBuffers], is_base: bool) -> list[RankShare]:
    """Store what all ranks have of a step."""
    coded = [rank.encode(is_base) for rank in ranks]
    for one in coded:
        put_object(publication.place, one.share.object, one.object)
    return [one.share for one in coded]


def fill(ranks: list[RankBuffers], model: PublishedModel, weights: Weights) -> None:
    for number, rank in enumerate(ranks):
        for index, piece in enumerate(model.pieces[number]):
            place = piece.place
            block = np.ascontiguousarray(weights[model.tensors[piece.tensor].name][place.block.index]).reshape(-1)
            rank.piece(index)[:] = block[place.first : place.first + place.size]


def ended(do: Callable[[], None]) -> None:
    """Do something, and end with a code that tells a refusal from a failure."""
    try:
        do()
    except LockedError:
        os._exit(REFUSED)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


class Watch:
    """A follower, and what it may see."""

    def __init__(self, chain: str, diary: Diary) -> None:
        self.diary = diary
        self.follower = Follower(chain, patience=0.2)
        self.seen: tuple[int, int] = (0, 0)

    def update(self) -> tuple[int, int]:
        """Let the follower update; return epoch and step."""
        step = self.follower.update()
        self.check(step.epoch, step.step, digest(self.follower.tensors()))
        return self.seen

    def check(self, epoch: int, step: int, hashed: str) -> None:
        assert (epoch, step, hashed) in self.diary.states(), f"not a state of the trainer: {epoch}, {step}, {hashed}"
        assert (epoch, step) >= self.seen, f"went back from {self.seen} to {epoch}, {step}"
        self.seen = epoch, step


class PublisherKills:
    """Kills of a publisher at each of its points."""

    def __init__(self, folder: Path, chain: str, trainer: type[Trainer] = Trainer) -> None:
        self.chain, self.diary, self.trainer = chain, Diary(folder / "diary"), trainer
        self.points: list[Any] = []
        self.ways = 0

    def renew(self) -> None:
        """Let the chain have the steps before the kill."""
        raise NotImplementedError

    def all_points(self, trainer: Trainer) -> list[Any]:
        """Do the work to its end, and return all points at which it can be killed."""
        raise NotImplementedError

    def kill(self, trainer: Trainer, point: Any) -> bool:
        """Kill the trainer at a point; False if it ended before."""
        raise NotImplementedError

    def finish(self, trainer: Trainer) -> None:
        trainer.run()

    def round(self, generator: random.Random) -> Counter[str]:
        seen = Counter[str]()
        self.renew()
        if not self.points:
            self.points = self.all_points(self.trainer(self.chain, self.diary, KILLED_FROM, LAST))
            generator.shuffle(self.points)
            self.renew()
        watch = Watch(self.chain, self.diary)
        assert watch.update() == (1, KILLED_FROM)
        trainer = self.trainer(self.chain, self.diary, KILLED_FROM, LAST)
        for _ in range(generator.choice((1, 1, 2))):
            seen["killed" if self.kill(trainer, self.points.pop()) else "ended before"] += 1
            epoch, step = watch.update()
            seen[f"followed {step - trainer.first} steps"] += 1
            self.ways += 1
            if generator.random() < 0.5:  # the same way again, from the last step that is published
                trainer = replace(trainer, first=step)
            else:  # from an earlier checkpoint, and on another way
                first = generator.randint(max(FIRST, step - 2), step)
                trainer = replace(trainer, first=first, way=(*trainer.way, (first, self.ways)))
                seen["rewound" if first < step else "went on another way"] += 1
            if not self.points:
                break
        self.finish(trainer)
        epoch, step = watch.update()
        assert step == LAST, f"ended at {epoch}, {step}"
        assert digest(watch.follower.tensors()) == digest(trainer.weights(LAST))
        late = Watch(self.chain, self.diary)
        assert late.update() == (epoch, step)
        seen[f"epoch {epoch}"] += 1
        return seen


class FolderKills(PublisherKills):
    """In front of each change to the file system."""

    def __init__(self, folder: Path, trainer: type[Trainer] = Trainer) -> None:
        super().__init__(folder, str(folder / "policy.chain"), trainer)
        self.folder = folder

    def renew(self) -> None:
        shutil.rmtree(self.chain, ignore_errors=True)
        self.diary.path.unlink(missing_ok=True)
        self.trainer(self.chain, self.diary, FIRST, KILLED_FROM).run()

    def all_points(self, trainer: Trainer) -> list[Any]:
        return [*range(points(trainer.run, Path(self.chain)))]

    def kill(self, trainer: Trainer, point: Any) -> bool:
        return killed(trainer.run, Path(self.chain), point)


class StoreKills(PublisherKills):
    """At each request to a bucket, which is carried out or not."""

    def __init__(
        self, folder: Path, server: StoreServer, killer: Killer, processes: Any, trainer: type[Trainer] = Trainer
    ) -> None:
        super().__init__(folder, CHAIN, trainer)
        self.server, self.killer, self.processes = server, killer, processes

    def renew(self) -> None:
        keys = [meta["path"] for page in obstore.list(self.server.client, "policy.chain/") for meta in page]
        if keys:
            obstore.delete(self.server.client, keys)
        self.diary.path.unlink(missing_ok=True)
        self.trainer(self.chain, self.diary, FIRST, KILLED_FROM).run()

    def code(self, trainer: Trainer) -> int | None:
        process = start(self.processes, self.server, ended, trainer.run, killer=self.killer)
        process.join(SECONDS)
        code: int | None = process.exitcode
        return code

    def all_points(self, trainer: Trainer) -> list[Any]:
        self.killer.expect()
        assert self.code(trainer) == 0
        return [(at, is_carried_out) for at in range(self.killer.requests) for is_carried_out in (False, True)]

    def kill(self, trainer: Trainer, point: Any) -> bool:
        self.killer.expect(*point)
        code = self.code(trainer)
        assert code in (0, KILLED), code
        return code == KILLED


class ServingKills:
    """Kills of a follower that serves a folder, in front of each change to its file system."""

    def __init__(self, folder: Path) -> None:
        self.history = PublishedHistory(folder)
        self.names = sorted(self.history.files)
        self.target = folder / "served"
        self.points: list[int] = []

    def serve(self, names: Sequence[StepName]) -> None:
        """Serve steps one after another; readers need no longer what was served before."""
        source = PublishedSource(self.history.folder, patience=PATIENCE)
        with ServedFolder(self.target, source, 1) as served:
            assert served.verify() is None
            for name in names:
                self.history.place(self.history.files[name])
                head = source.head()
                assert head is not None
                served.advance(head, head.record)
                assert self.check() == name
                served.release_other()

    def check(self) -> StepName | None:
        """Return the step that the link names, whose weights must be those of that step."""
        current = self.target / CURRENT
        if not current.is_symlink():
            return None
        record = StepRecord.from_bytes((current / RECORD).read_bytes(), current)
        weights = read_safetensors(current / "model.safetensors")
        assert same(weights, self.history.run.states[record.name]), f"other weights are served as {record.name}"
        return record.name

    def round(self, generator: random.Random) -> Counter[str]:
        seen = Counter[str]()
        shutil.rmtree(self.target, ignore_errors=True)
        first = generator.randrange(len(self.names) - 3)
        names = self.names[first : first + 4]
        if not self.points:
            self.points = [*range(points(lambda: self.serve(names), self.target))]
            generator.shuffle(self.points)
            shutil.rmtree(self.target)
        at = first
        for _ in range(generator.choice((1, 1, 2))):
            work = partial(self.serve, self.names[at:])
            if generator.random() < 0.2:
                was_killed = killed_after(work, generator.uniform(0, 0.3))
            else:
                was_killed = killed(work, self.target, self.points.pop())
            seen["killed" if was_killed else "ended before"] += 1
            name = self.check()
            if name is not None:
                assert at == first or name >= self.names[at - 1], f"went back to {name}"
                at = min(self.names.index(name) + 1, len(self.names) - 1)
            seen["nothing is served" if name is None else "a step is served"] += 1
            if not self.points:
                break
        self.serve(self.names[at:])
        assert self.check() == LAST_STEP
        assert {path.name for path in self.target.iterdir()} <= {"a", "b", CURRENT, ".lock"}
        return seen


class RandomKills:
    """A trainer and two followers that serve folders, as processes, of which one after another is killed."""

    def __init__(self, folder: Path, processes: Any) -> None:
        self.folder, self.processes = folder, processes
        self.ways = 0

    def round(self, generator: random.Random) -> Counter[str]:
        seen = Counter[str]()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        chain, diary = str(self.folder / "policy.chain"), Diary(self.folder / "diary")
        trainer = Trainer(chain, diary, FIRST, RANDOM_LAST, pause=0.03, retain=generator.random() < 0.5)
        targets = [ServedWatch(self.folder / name, diary) for name in ("one", "two")]
        running = {"trainer": self._start(trainer.run)}
        running |= {target.path.name: self._start(partial(serve, chain, target.path)) for target in targets}
        try:
            for _ in range(generator.randint(2, 6)):
                end = time.monotonic() + generator.uniform(0.05, 0.6)
                while time.monotonic() < end:
                    for target in targets:
                        seen["looks"] += target.look()
                    time.sleep(0.01)
                who = generator.choice(list(running))
                process = running[who]
                seen[f"killed {'a follower' if who != 'trainer' else who}"] += process.is_alive()
                process.kill()
                process.join(SECONDS)
                assert process.exitcode in (0, KILLED), f"{who} ended with {process.exitcode}"
                if who == "trainer":
                    trainer = self._next(trainer, generator, seen)
                    running[who] = self._start(trainer.run)
                else:
                    target = next(one for one in targets if one.path.name == who)
                    target.look()
                    running[who] = self._start(partial(serve, chain, target.path))
            running["trainer"].join(SECONDS)
            assert running["trainer"].exitcode == 0, running["trainer"].exitcode
            self._wait(targets, trainer, running)
        finally:
            for process in running.values():
                process.kill()
                process.join(SECONDS)
        return seen

    def _start(self, work: Callable[[], None]) -> Any:
        process = self.processes.Process(target=ended, args=(work,))
        process.start()
        return process

    def _next(self, trainer: Trainer, generator: random.Random, seen: Counter[str]) -> Trainer:
        """The trainer that starts after a kill: from the last published step, or from an earlier one on another way."""
        watch = Watch(trainer.chain, trainer.diary)
        try:
            _, step = watch.update()
        except NotFoundError:
            return trainer
        if generator.random() < 0.5:
            return replace(trainer, first=step)
        self.ways += 1
        first = generator.randint(max(FIRST, step - 3), step)
        seen["rewound" if first < step else "went on another way"] += 1
        return replace(trainer, first=first, way=(*trainer.way, (first, self.ways)))

    def _wait(self, targets: list[ServedWatch], trainer: Trainer, running: Mapping[str, Any]) -> None:
        end = time.monotonic() + SECONDS
        for target in targets:
            while target.seen is None or target.seen[1:] != (RANDOM_LAST, digest(trainer.weights(RANDOM_LAST))):
                assert running[target.path.name].is_alive(), f"{target.path.name} has ended"
                assert time.monotonic() < end, f"{target.path.name} stays at {target.seen}"
                target.look()
                time.sleep(0.01)


class FaultyStore:
    """A publisher and a follower whose requests fail: errors, resets, half bodies, answers that are lost."""

    def __init__(self, folder: Path, server: StoreServer) -> None:
        self.diary, self.server = Diary(folder / "diary"), server
        self.rounds = 0

    def round(self, generator: random.Random) -> Counter[str]:
        seen = Counter[str]()
        self.rounds += 1
        chain = f"s3://{BUCKET}/faulty{self.rounds}.chain"
        self.diary.path.unlink(missing_ok=True)
        trainer = Trainer(chain, self.diary, FIRST, LAST)
        with faulty(self.server, 0.2, generator.getrandbits(32), writes=True) as (store_, faults), reached(store_):
            watch = Watch(chain, self.diary)
            while trainer.first < LAST or not seen["published to the end"]:
                try:
                    trainer.run()
                    seen["published to the end"] += 1
                except (OutputError, NotFoundError) as error:
                    seen[f"publisher: {type(error).__name__}"] += 1
                try:
                    trainer = replace(trainer, first=watch.update()[1])
                except CkptError as error:
                    seen[f"follower: {type(error).__name__}"] += 1
                    if seen["published to the end"]:
                        break
                assert sum(seen.values()) < 100, seen
            seen.update({f"fault {kind}": number for kind, number in faults.items()})
        watch = Watch(chain, self.diary)
        assert watch.update() == (1, LAST)
        assert digest(watch.follower.tensors()) == digest(trainer.weights(LAST))
        return seen


def serve(chain: str, target: Path) -> None:
    follow_into(chain, target, lambda event: None, every=0.01)


@dataclass
class ServedWatch:
    """Looks at what a folder serves."""

    path: Path
    diary: Diary
    seen: tuple[int, int, str] | None = None
    """The last epoch, step and weights."""

    def look(self) -> bool:
        """Read what is served; False if nothing is, or it changed meanwhile."""
        try:
            folder = self.path / os.readlink(self.path / CURRENT)
            record = (folder / RECORD).read_bytes()
            weights = read_safetensors(folder / "model.safetensors")
            if (folder / RECORD).read_bytes() != record or (self.path / CURRENT).resolve() != folder:
                return False
        except FileNotFoundError:
            return False
        name = StepRecord.from_bytes(record, folder).name
        served = name.epoch, name.step, digest(weights)
        assert served in self.diary.states(), f"serves what the trainer never had: {served}"
        assert self.seen is None or served[:2] >= self.seen[:2], f"went back from {self.seen} to {served}"
        self.seen = served
        return True


def read_safetensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read all tensors of a file by the description of its format alone."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    dtypes = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}
    entries = {name: entry for name, entry in json.loads(data[8:start]).items() if name != "__metadata__"}
    return {
        name: np.frombuffer(data[start:][slice(*entry["data_offsets"])], dtypes[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in entries.items()
    }


def rounds(folder: Path, seed: int) -> Generator[Round, None, None]:
    """Yield kills of publishers in a folder and in a bucket, and of a follower, in turn."""
    generator = random.Random(seed)
    processes = forking("sync_kills")
    with ExitStack() as stack:
        server = stack.enter_context(moto())
        killer = stack.enter_context(killing(server))
        stack.enter_context(reached(server))
        for name in ("folder", "store", "serving", "command folder", "command store"):
            (folder / name).mkdir()
        works: dict[str, PublisherKills | ServingKills | RandomKills | FaultyStore] = {
            "publisher, folder": FolderKills(folder / "folder"),
            "follower, folder": ServingKills(folder / "serving"),
            "all, random": RandomKills(folder / "random", processes),
            "faulty store": FaultyStore(folder, server),
            "publisher, store": StoreKills(folder / "store", server, killer, processes),
            "command, folder": FolderKills(folder / "command folder", CommandTrainer),
            "command, store": StoreKills(folder / "command store", server, killer, processes, CommandTrainer),
        }
        yield from alternated({name: partial(finding, partial(work.round, generator)) for name, work in works.items()})


def finding(round_: Callable[[], Counter[str]]) -> Counter[str]:
    """Let an error of ours be a finding: nothing is damaged here."""
    try:
        return round_()
    except CkptError as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error
