"""Kill what writes universal checkpoints and chains: `python tests/campaigns/universal_kills.py --kills 200`.

Folders with several packs, single files, encoded and plain; appending to a chain, and compacting one. Half of the
kills are in front of a random change to the file system, half are SIGKILL at a random time. One work in three is
killed twice. Then it is run to its end, each time with another number of workers. Afterwards each file must have the
bytes that it has without a kill, and nothing else may be left. Before that, a target is absent or whole, and a chain
is as it was before or as it is afterwards. The check runs a small sample.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np

from ckpt.chains.append import append
from ckpt.chains.change import change
from ckpt.chains.compact import Retention, compact
from ckpt.chains.verify import verify_chain
from ckpt.chains.write import DeltaPolicy
from ckpt.job import save
from ckpt.pipeline import Execution, folder_target
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin
from ckpt_formats.core.chunking import DEFAULT_ELEMENTS as CHUNK
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import NotFoundError
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from ckpt_formats.universal.chain import file as index
from held import checkpoint, parameter
from killing import killed, killed_after, points

WORKERS = (1, 2, 7)
PACK_NBYTES = 60_000
STEPS = 5
"""States of the chain that is compacted; all but the last of them are in the chain that is appended to."""
KEPT = (2, 4, 5)


def states(steps: int, elements: int = CHUNK + 9) -> Iterator[Checkpoint]:
    """A run: a matrix of two chunks, one whose copy is not its master rounded, small ones, and odd lengths."""
    generator = np.random.default_rng(3)
    shapes = {"large": (elements,), "differs": (90, 70), **{f"small{i}": (60 + i, 33) for i in range(8)}}
    held = {name: [generator.standard_normal(shape).astype(np.float32) for _ in "wm"] for name, shape in shapes.items()}
    for step in range(1, steps + 1):
        parameters = []
        for name, (w, m) in held.items():
            m = m * np.float32(0.9) + generator.standard_normal(w.shape).astype(np.float32)
            w = w - np.float32(1e-4) * m
            held[name] = [w, m]
            copy = w.astype(DTYPES["bfloat16"])
            if name == "differs":
                copy[0, 0] = 77
            parameters.append(parameter(name, {"master": w, "model": copy, "exp_avg": m}, step=step))
        parameters.append(parameter("odd", {"model": np.arange(7, dtype=np.int8)}, "buffer"))
        yield checkpoint(parameters, (Group({"lr": 1e-4}, tuple(shapes)),), origin=Origin("held", None, step))


def files(path: Path) -> dict[str, bytes]:
    """Every file at a path, by its path in there."""
    paths = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return {str(one.relative_to(path)): one.read_bytes() for one in paths}


class Work(ABC):
    """Something to do in a folder of its own, as often as need be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.resumed = 0
        """Files that runs after a kill did not write again."""

    @abstractmethod
    def renew(self) -> None:
        """The folder as it was before."""

    @abstractmethod
    def do(self, workers: int) -> None:
        """In this process."""

    @abstractmethod
    def is_done(self) -> bool:
        """Raises `AssertionError` if what is there is neither as before nor as afterwards."""

    @abstractmethod
    def sweep(self) -> None:
        """Remove what a kill after the end left, as the next command does."""

    @abstractmethod
    def content(self) -> object:
        """Everything in the folder that may not depend on workers, kills and the time."""


class Written(Work):
    """A checkpoint that is written."""

    def __init__(self, source: Path, folder: Path, target: str, codec: str | None) -> None:
        super().__init__(folder)
        self.source, self.target = source, folder / target
        self.format = Universal(pack_nbytes=PACK_NBYTES, codec=codec)

    def renew(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()

    def do(self, workers: int) -> None:
        result = save(open_checkpoint(self.source), self.target, self.format, resources=Execution(workers, 1 << 20))
        self.resumed += result.resumed

    def is_done(self) -> bool:
        for part in (stage := self.folder / f".{self.target.name}.ckpt-partial", stage / "data", *stage.glob("data/*")):
            if part.exists() and part.name != "checkpoint.ucp":
                try:
                    detected = detect(part)
                except NotFoundError:
                    continue
                raise AssertionError(f"{part} looks like a checkpoint: {detected}")
        return self.target.exists()

    def sweep(self) -> None:
        folder_target.sweep(self.folder)

    def content(self) -> object:
        return files(self.folder)


class Chained(Work):
    """A chain that is changed."""

    def __init__(self, chain: Path, folder: Path) -> None:
        super().__init__(folder)
        self.chain, self.run = chain, folder / "run"
        self.before = index.read(chain)

    def renew(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        shutil.copytree(self.chain, self.run)

    def steps(self) -> list[int]:
        return [member.step for member in index.read(self.run).members]

    def is_done(self) -> bool:
        """The chain is whole, whether old or new, and everything in it can be read."""
        report = verify_chain(self.run, Execution())
        assert {finding.kind for finding in report.findings} <= {"copy"}, report.findings
        steps, old = self.steps(), [member.step for member in self.before.members]
        assert steps in (old, self.after()), steps
        return steps == self.after()

    def sweep(self) -> None:
        with change(self.run, Execution()) as changed:
            changed.remove_leftovers()

    @abstractmethod
    def after(self) -> list[int]: ...

    def content(self) -> object:
        chain = index.read(self.run)
        untimed = replace(chain, members=tuple(replace(member, time="") for member in chain.members))
        return untimed, {path: data for path, data in files(self.run).items() if path != index.NAME}


class Appended(Chained):
    """A state is appended to a chain, with a tip."""

    def __init__(self, chain: Path, folder: Path, state: Path) -> None:
        super().__init__(chain, folder)
        self.state = state

    def do(self, workers: int) -> None:
        append(self.run, open_checkpoint(self.state), None, DeltaPolicy(tip=True), Execution(workers, 1 << 20))

    def after(self) -> list[int]:
        return list(range(1, STEPS + 1))


class Compacted(Chained):
    """Three of five states stay, so that two deltas are replayed to be written again."""

    def do(self, workers: int) -> None:
        keep = Retention((",".join(map(str, KEPT)),))
        compact(self.run, keep, DeltaPolicy(), Execution(workers, 1 << 20))

    def after(self) -> list[int]:
        return list(KEPT)


def works(folder: Path) -> dict[str, Work]:
    """One of each kind."""
    saved = []
    for state in states(STEPS):
        saved.append(folder / f"saved{state.step}")
        save(state, saved[-1], Universal())
    chain, longer = folder / "chain", folder / "longer"
    for path in saved[:-1]:
        append(chain, open_checkpoint(path), None, DeltaPolicy(tip=True), Execution())
    shutil.copytree(chain, longer)
    append(longer, open_checkpoint(saved[-1]), None, DeltaPolicy(tip=True), Execution())
    (targets := folder / "made").mkdir()
    return {
        "folder": Written(saved[0], targets / "folder", "out", None),
        "one file": Written(saved[0], targets / "file", "out.ucp", None),
        "folder, encoded": Written(saved[0], targets / "encoded", "out", "auto"),
        "one file, encoded": Written(saved[0], targets / "encoded-file", "out.ucp", "auto"),
        "append": Appended(chain, targets / "append", saved[-1]),
        "compact": Compacted(longer, targets / "compact"),
    }


class Campaign:
    """A work, and what it comes to without a kill."""

    def __init__(self, work: Work) -> None:
        self.work, self.counts = work, Counter[str]()
        self.good: object = None
        for workers in WORKERS:
            work.renew()
            began = time.monotonic()
            work.do(workers)
            self.seconds = time.monotonic() - began
            assert self.good in (None, work.content()), f"{workers} workers show in the bytes"
            self.good = work.content()
        work.renew()
        self.points = points(partial(work.do, 2), work.folder)

    def files(self) -> list[str]:
        """What there is in the folder of the work."""
        return list(files(self.work.folder))

    def kill(self, generator: random.Random) -> None:
        """Kill the work once or twice, look at what there is, and let it come to its end."""
        self.work.renew()
        done = False
        for _ in range(generator.choice((1, 1, 2))):
            if not done:
                done = self._kill(generator)
        if done:
            self.work.sweep()
        else:
            self.work.do(generator.choice(WORKERS))
        assert self.work.content() == self.good

    def _kill(self, generator: random.Random) -> bool:
        work = partial(self.work.do, generator.choice(WORKERS))
        if generator.random() < 0.5:
            was_killed = killed(work, self.work.folder, generator.randrange(self.points))
        else:
            was_killed = killed_after(work, generator.random() * self.seconds)
        done = self.work.is_done()
        self.counts["killed" if was_killed else "at its end before"] += 1
        self.counts["afterwards as it was" if not done else "afterwards done"] += 1
        return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="of all works together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        campaigns = {name: Campaign(work) for name, work in works(Path(folder)).items()}
        while sum(one.counts["killed"] for one in campaigns.values()) < options.kills:
            for one in campaigns.values():
                one.kill(generator)
        for name, one in campaigns.items():
            print(f"{name}: {one.points} changes, {dict(sorted(one.counts.items()))}, {one.work.resumed} files kept")


if __name__ == "__main__":
    sys.exit(main())
