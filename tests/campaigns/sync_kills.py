"""Kill the publisher of a chain, and those that follow it.

A trainer whose states are known publishes them, of two ranks, into a folder or a bucket. It is killed in front of a
change to the file system, or at one of its requests, which the store carries out or not: at each once, in a random
order. Then a follower that holds an earlier step updates. The trainer starts again, from the last step that it
published or from an earlier one and then on another way, and publishes to its end. A state that is followed must be one
that the trainer had at that step of that epoch, bit for bit; a follower never goes back within an epoch, and ends with
the trainer's last state.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import obstore
import xxhash

from ckpt.following.follower import Follower
from ckpt.publishing.publication import Publication, open_publication, put_object
from ckpt.publishing.rank_buffers import RankBuffers
from ckpt_formats.core.errors import LockedError
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal.published.model import PublishedModel
from killing import killed, points
from object_stores import BUCKET, Killer, StoreServer, killing, moto, reached, start
from published import Weights, model_of
from run import Round, alternated

RANKS = 2
SECONDS = 120
KILLED, REFUSED = -9, 11
CHAIN = f"s3://{BUCKET}/policy.chain"
FIRST, KILLED_FROM, LAST = 1, 4, 8
"""The first step, the last one before the publisher is killed, and the last one."""


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

    def publish(self, publication: Publication, ranks: list[RankBuffers], step: int, weights: Weights) -> None:
        parent = None if publication.needs_base() else publication.parent
        coded = [rank.encode(parent is None) for rank in ranks]
        for one in coded:
            put_object(publication.place, one.share.object, one.object)
        self.diary.note(publication.epoch, step, weights)
        publication.commit(step, parent, [one.share for one in coded])

    def weights(self, step: int) -> Weights:
        return weights_at(step, self.way)


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

    def __init__(self, folder: Path, chain: str) -> None:
        self.chain, self.diary = chain, Diary(folder / "diary")
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
            self.points = self.all_points(Trainer(self.chain, self.diary, KILLED_FROM, LAST))
            generator.shuffle(self.points)
            self.renew()
        watch = Watch(self.chain, self.diary)
        assert watch.update() == (1, KILLED_FROM)
        trainer = Trainer(self.chain, self.diary, KILLED_FROM, LAST)
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

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, str(folder / "policy.chain"))
        self.folder = folder

    def renew(self) -> None:
        shutil.rmtree(self.chain, ignore_errors=True)
        self.diary.path.unlink(missing_ok=True)
        Trainer(self.chain, self.diary, FIRST, KILLED_FROM).run()

    def all_points(self, trainer: Trainer) -> list[Any]:
        return [*range(points(trainer.run, Path(self.chain)))]

    def kill(self, trainer: Trainer, point: Any) -> bool:
        return killed(trainer.run, Path(self.chain), point)


class StoreKills(PublisherKills):
    """At each request to a bucket, which is carried out or not."""

    def __init__(self, folder: Path, server: StoreServer, killer: Killer, processes: Any) -> None:
        super().__init__(folder, CHAIN)
        self.server, self.killer, self.processes = server, killer, processes

    def renew(self) -> None:
        keys = [meta["path"] for page in obstore.list(self.server.client, "policy.chain/") for meta in page]
        if keys:
            obstore.delete(self.server.client, keys)
        self.diary.path.unlink(missing_ok=True)
        Trainer(self.chain, self.diary, FIRST, KILLED_FROM).run()

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


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    """Yield kills in a folder and in a bucket, in turn."""
    generator = random.Random(seed)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["sync_kills"])
    with ExitStack() as stack:
        server = stack.enter_context(moto())
        killer = stack.enter_context(killing(server))
        stack.enter_context(reached(server))
        for name in ("folder", "store"):
            (folder / name).mkdir()
        works = {
            "publisher, folder": FolderKills(folder / "folder"),
            "publisher, store": StoreKills(folder / "store", server, killer, processes),
        }
        yield from alternated({name: partial(work.round, generator) for name, work in works.items()})
