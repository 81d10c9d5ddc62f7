"""Kill what writes checkpoints into a bucket, changes chains there, or copies them.

A process is sent SIGKILL at one of its requests, which the store carries out or not: at each request once, in a random
order, those that change the store first. One work in three is killed twice, and one in five of those that write gives
up with `clean`. Before the work is run to its end, a target is absent or whole: ckpt refuses it, and no object by which
a format is known is there before all others are. A chain is as it was, or as it is afterwards, and can be verified.
Afterwards each object must have the bytes that it has without a kill, those of a local file, and nothing else may be
there.

In rounds named `pair`, two processes work at once. Of two that write one target, one is refused. Of two that append,
one may be locked out, or be too late. The server is moto's, which keeps conditions; a killed process holds its lease
no longer, because it is known to have ended on this machine.
"""

from __future__ import annotations

import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Generator
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import obstore

import ckpt as library
from ckpt.chains.append import append
from ckpt.chains.compact import Retention, compact
from ckpt.chains.write import DeltaPolicy
from ckpt.copying.copy import copy
from ckpt.pipeline import Execution
from ckpt_formats.core.errors import (
    CkptError,
    IncompleteError,
    LockedError,
    NotFoundError,
    OutputError,
    UnsupportedError,
)
from ckpt_formats.core.format import WritableFormat
from ckpt_formats.registry.listed import is_mark
from ckpt_formats.stores.location import source_path
from clusters import files
from damage import SAMPLES
from forking import forking
from held import states
from kills import Campaign, Work, is_changed, sweep_chain, without_times
from object_stores import BUCKET, Killer, StoreServer, killing, moto, reached, small_parts, start
from run import Round, alternated

SECONDS = 120
ELEMENTS = 3_000
STEPS = 4
"""States of the chain that is compacted and copied; all but the last of them are in the chain that is appended to."""
KEPT = (2, 4)
CHAIN, COPY = f"s3://{BUCKET}/work/run.chain", f"s3://{BUCKET}/work/copy.chain"
ZERO1 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
WRITTEN: dict[str, tuple[Path, WritableFormat, str]] = {
    "universal": (ZERO1, library.Universal(pack_nbytes=60_000), "out"),
    "deepspeed": (ZERO1, library.DeepSpeed(dp=3), "out"),
    "dcp": (SAMPLES / "megatron-0.16-tp2-pp2-dist", library.DCP(dp=3), "out"),
    "orbax": (ZERO1, library.Orbax(chunk_nbytes=20_000, file_nbytes=60_000), "out"),
    "hf": (SAMPLES / "transformers-5.23-trainer", library.HuggingFace(), "out"),
    "one file": (ZERO1, library.Universal(), "out.ucp"),
}
CHAINED = ("delta", "base", "tip", "compact", "copy")
KILLED, REFUSED, LATE = -9, 11, 22
"""How a process ends: by SIGKILL, refused by what another one has done, or behind a later step."""


# In a process of its own


def write(name: str, target: str) -> None:
    source, format, _ = WRITTEN[name]
    library.save(library.open(source), target, format, resources=library.Resources(workers=2))


def change_chain(name: str, folder: str) -> None:
    """Append to the chain, compact it, or copy it."""
    small_parts()
    run = source_path(CHAIN)
    if name == "compact":
        compact(run, Retention((",".join(map(str, KEPT)),)), DeltaPolicy(), Execution(workers=1))
    elif name == "copy":
        copy(run, COPY, resources=Execution(workers=2))
    else:
        policy = DeltaPolicy(tip=name == "tip", base_every=1 if name == "base" else None)
        append(run, library.open(f"{folder}/state{STEPS}"), None, policy, Execution(workers=1))


def append_as(step: int, folder: str) -> None:
    state = library.open(f"{folder}/state{STEPS}")
    append(source_path(CHAIN), state, step, DeltaPolicy(), Execution(workers=1))


def ended(pause: float, do: Any, *arguments: Any) -> None:
    """Do something after a pause, and end with a code that tells refusals from failures."""
    time.sleep(pause)
    try:
        do(*arguments)
    except (LockedError, OutputError, IncompleteError, NotFoundError):
        os._exit(REFUSED)
    except UnsupportedError:  # another process has appended a later step
        os._exit(LATE)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


# The works


class StoreWork(Work):
    """A work in a bucket, done in processes through a proxy that can kill them."""

    before: dict[str, bytes]
    """The objects before the work."""

    def __init__(self, server: StoreServer, killer: Killer, processes: BaseContext) -> None:
        self.server, self.killer, self.processes = server, killer, processes
        self.points: list[tuple[int, bool]] = []
        """The requests at which nothing was killed yet, in reverse order."""

    def command(self) -> tuple[Any, ...]:
        """Return a function and its arguments."""
        raise NotImplementedError

    def process(self, killer: Killer | None = None, pause: float = 0.0, command: tuple[Any, ...] = ()) -> Any:
        given = command or self.command()
        return start(self.processes, self.server, ended, pause, *given, killer=killer)

    def code(self, killer: Killer | None = None) -> int | None:
        process = self.process(killer)
        process.join(SECONDS)
        code: int | None = process.exitcode
        return code

    def objects(self) -> dict[str, bytes]:
        return objects_of(self.server)

    def renew(self) -> None:
        if there := list(self.objects()):
            obstore.delete(self.server.client, [f"work/{key}" for key in there])
        for key, data in self.before.items():
            obstore.put(self.server.client, f"work/{key}", data)

    def run(self, generator: random.Random | None = None) -> None:
        assert self.code() == 0, f"after the kill at request {self.killer.at}"

    def measure(self) -> None:
        self.killer.expect()
        assert self.code(self.killer) == 0
        self.requests = list(self.killer.seen)

    def next_point(self, generator: random.Random) -> tuple[int, bool]:
        """Return a request, and whether the store carries it out: each once, those that change the store first."""
        if not self.points:
            self.points = [(at, carried) for at in range(len(self.requests)) for carried in (False, True)]
            generator.shuffle(self.points)
            self.points.sort(key=self.changes_store)
        return self.points.pop()

    def changes_store(self, point: tuple[int, bool]) -> bool:
        return self.requests[point[0]].startswith(("PUT", "POST", "DELETE"))

    def kill(self, generator: random.Random) -> bool:
        self.killer.expect(*self.next_point(generator))
        code = self.code(self.killer)
        assert code in (0, REFUSED, KILLED), code
        return code == KILLED

    def content(self) -> dict[str, object]:
        return without_times(self.objects())


class Written(StoreWork):
    """A checkpoint that is written."""

    def __init__(self, name: str, folder: Path, *servers: Any) -> None:
        super().__init__(*servers)
        target = WRITTEN[name][2]
        self.name, self.url, self.before = name, f"s3://{BUCKET}/work/{target}", {}
        self.local = files(folder / name)

    def command(self) -> tuple[Any, ...]:
        return write, self.name, self.url

    def measure(self) -> None:
        super().measure()
        assert self.objects() == self.local

    def is_done(self) -> bool:
        try:
            library.open(self.url)
            is_open = True
        except (IncompleteError, NotFoundError, OutputError):
            is_open = False
        # Read after that: the server may yet put an object that the killed process has sent.
        data = {key: value for key, value in self.objects().items() if key in self.local}
        if self.url.endswith("/out") and any(map(is_mark, data)):
            missing = {key for key in self.local if not is_mark(key)} - data.keys()
            assert not missing, f"a mark is there, and not {sorted(missing)}"
        assert data == self.local or not is_open, "an unfinished target can be opened"
        return is_open

    def sweep(self) -> None:
        """Write the target again: a whole one is refused, and what is left beside it is removed."""
        if self.objects() != self.local:
            assert self.code() in (0, REFUSED)

    def run(self, generator: random.Random | None = None) -> None:
        # A process that was killed at its very end left a whole target, of which only the notes are removed.
        assert self.code() in (0, REFUSED), f"after the kill at request {self.killer.at}"

    def give_up(self) -> bool:
        library.clean(self.url)
        left = self.objects()
        assert left in ({}, self.local), sorted(left)
        return True

    def pair(self, generator: random.Random) -> Counter[str]:
        """Two processes write the target at once: one of them does, and the other says why not."""
        self.renew()
        pair = [self.process(pause=pause) for pause in (0.0, generator.choice((0.0, 0.0, generator.random() * 0.5)))]
        for process in pair:
            process.join(SECONDS)
        codes = sorted(process.exitcode for process in pair)
        assert codes == [0, REFUSED], codes
        assert self.objects() == self.local
        return Counter({"one was refused": 1})


class Chained(StoreWork):
    """A chain that is changed or copied."""

    def __init__(self, name: str, folder: Path, before: dict[str, bytes], *servers: Any) -> None:
        super().__init__(*servers)
        self.name, self.folder, self.before = name, folder, before

    def command(self) -> tuple[Any, ...]:
        return change_chain, self.name, str(self.folder)

    def is_done(self) -> bool:
        if self.name != "copy":
            before, after = [*range(1, STEPS)], [*range(1, STEPS + 1)]
            return is_changed(source_path(CHAIN), *((after, [*KEPT]) if self.name == "compact" else (before, after)))
        assert {key: data for key, data in self.objects().items() if key in self.before} == self.before
        try:
            library.open(COPY)
        except CkptError:
            return False
        return is_changed(source_path(COPY), [], [*range(1, STEPS + 1)])

    def sweep(self) -> None:
        if self.name != "copy":
            sweep_chain(source_path(CHAIN))
        else:  # a whole copy is refused, and the notes of one that was killed at its very end are removed
            assert self.code() in (0, REFUSED)

    def pair(self, generator: random.Random) -> Counter[str]:
        """Two processes append at once, after pauses. Who is late says so, or goes on after the other."""
        self.renew()
        steps = (STEPS, STEPS + 1)
        pair = [self.process(None, generator.uniform(0, 1.2), (append_as, step, str(self.folder))) for step in steps]
        for process in pair:
            process.join(SECONDS)
        codes = [process.exitcode for process in pair]
        done = [step for step, code in zip(steps, codes, strict=True) if code == 0]
        assert done, codes
        assert set(codes) <= {0, REFUSED, LATE}, codes
        assert is_changed(source_path(CHAIN), [], [*range(1, STEPS), *done])
        assert not [key for key in self.objects() if "/.ckpt/" in key]
        return Counter({"both" if len(done) == 2 else "one was locked out" if REFUSED in codes else "one was late": 1})


def objects_of(server: StoreServer) -> dict[str, bytes]:
    client = server.client
    keys = [meta["path"] for page in obstore.list(client, "work/") for meta in page]
    return {key[len("work/") :]: bytes(obstore.get(client, key).bytes()) for key in keys}


def write_locally(name: str, folder: Path) -> None:
    (folder / name).mkdir()
    write(name, str(folder / name / WRITTEN[name][2]))


def make_chains(folder: Path, server: StoreServer) -> dict[int, dict[str, bytes]]:
    """Append states to a chain in the bucket. Return its objects after each."""
    chains = {}
    for state in states(STEPS, ELEMENTS):
        assert state.step is not None
        library.save(state, folder / f"state{state.step}", library.Universal())
        append(source_path(CHAIN), library.open(folder / f"state{state.step}"), None, DeltaPolicy(), Execution())
        chains[state.step] = objects_of(server)
    return chains


def rounds(folder: Path, seed: int) -> Generator[Round, None, None]:
    """Yield kills of each work in turn, and after each five kills a pair."""
    generator = random.Random(seed)
    with moto() as server, killing(server) as killer, reached(server):
        for name in WRITTEN:
            write_locally(name, folder)
        chains = make_chains(folder, server)
        servers = (server, killer, forking("store_kills"))
        written = {name: Written(name, folder, *servers) for name in WRITTEN}
        chained = {}
        for name in CHAINED:
            before = chains[STEPS if name in ("compact", "copy") else STEPS - 1]
            chained[name] = Chained(name, folder, before, *servers)
        works: dict[str, StoreWork] = {**written, **{f"chain, {name}": work for name, work in chained.items()}}
        runs = {name: partial(Campaign(work).round, generator) for name, work in works.items()}
        runs |= {f"pair, {name}": partial(work.pair, generator) for name, work in written.items()}
        runs["pair, append"] = partial(chained["delta"].pair, generator)
        yield from alternated(runs)
