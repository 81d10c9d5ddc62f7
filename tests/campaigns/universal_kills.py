"""Kill what writes checkpoints and chains into folders.

Universal folders with several packs, single files, encoded and plain; folders of Orbax with several data files;
appending to a chain, and compacting one; adding a model
to a family, and removing one that others are stored against. Half of the
kills are in front of a random change to the file system, half are SIGKILL at a random time. One work in three is
killed twice. Then it is run to its end, each time with another number of workers. Afterwards each file must have the
bytes that it has without a kill, and nothing else may be left. Before that, a target is absent or whole, and a chain
is as it was before or as it is afterwards.
"""

from __future__ import annotations

import random
import shutil
import time
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ckpt.chains.append import append
from ckpt.chains.compact import Retention, compact
from ckpt.chains.family import append_model
from ckpt.chains.write import DeltaPolicy
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.errors import NotFoundError
from ckpt_formats.core.format import WritableFormat
from ckpt_formats.engines.orbax import Orbax
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from clusters import files
from held import states
from killing import killed, killed_after, points
from kills import Campaign, Work, is_changed, sweep_chain, without_times
from run import Round, alternated

WORKERS = (1, 2, 7)
PACK_NBYTES = 60_000
STEPS = 5
"""States of the chain that is compacted; all but the last of them are in the chain that is appended to."""
KEPT = (2, 4, 5)


class FolderWork(Work):
    """A work in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def do(self, workers: int) -> None: ...

    def renew(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()

    def run(self, generator: random.Random | None = None) -> None:
        self.do(2 if generator is None else generator.choice(WORKERS))

    def measure(self) -> None:
        contents = []
        for workers in WORKERS:
            self.renew()
            began = time.monotonic()
            self.do(workers)
            self.seconds = time.monotonic() - began
            contents.append(self.content())
            assert contents[-1] == contents[0], f"{workers} workers show in the bytes"
        self.renew()
        self.points = points(partial(self.do, 2), self.folder)

    def kill(self, generator: random.Random) -> bool:
        work = partial(self.do, generator.choice(WORKERS))
        if generator.random() < 0.5:
            return killed(work, self.folder, generator.randrange(self.points))
        return killed_after(work, generator.random() * self.seconds)

    def content(self) -> dict[str, object]:
        return without_times(files(self.folder))


class Written(FolderWork):
    """A checkpoint that is written."""

    def __init__(self, source: Path, folder: Path, target: str, format: WritableFormat) -> None:
        super().__init__(folder)
        self.source, self.target, self.format = source, folder / target, format

    def do(self, workers: int) -> None:
        save(open_checkpoint(self.source), self.target, self.format, resources=Execution(workers, 1 << 20))

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
        following = self.folder / "following.ucp"
        save(open_checkpoint(self.source), following, Universal())
        following.unlink()


class Chained(FolderWork):
    """A chain that is changed."""

    def __init__(self, chain: Path, folder: Path, before: list[int], after: list[int]) -> None:
        super().__init__(folder)
        self.chain, self.chain_run = chain, folder / "run"
        self.before, self.after = before, after

    def renew(self) -> None:
        super().renew()
        shutil.copytree(self.chain, self.chain_run)

    def is_done(self) -> bool:
        return is_changed(self.chain_run, self.before, self.after)

    def sweep(self) -> None:
        sweep_chain(self.chain_run)


class Appended(Chained):
    """A state is appended to a chain, with a tip."""

    def __init__(self, chain: Path, folder: Path, state: Path) -> None:
        super().__init__(chain, folder, [*range(1, STEPS)], [*range(1, STEPS + 1)])
        self.state = state

    def do(self, workers: int) -> None:
        append(self.chain_run, open_checkpoint(self.state), None, DeltaPolicy(tip=True), Execution(workers, 1 << 20))


class Compacted(Chained):
    """Three of five states stay, so that two deltas are replayed to be written again."""

    def __init__(self, chain: Path, folder: Path) -> None:
        super().__init__(chain, folder, [*range(1, STEPS + 1)], [*KEPT])

    def do(self, workers: int) -> None:
        keep = Retention((",".join(map(str, KEPT)),))
        compact(self.chain_run, keep, DeltaPolicy(), Execution(workers, 1 << 20))


class ModelAdded(Chained):
    """A model is added to a family of four, of which it finds its parent."""

    def __init__(self, chain: Path, folder: Path, state: Path) -> None:
        super().__init__(chain, folder, [*range(1, STEPS)], [*range(1, STEPS + 1)])
        self.state = state

    def do(self, workers: int) -> None:
        source, resources = open_checkpoint(self.state), Execution(workers, 1 << 20)
        append_model(self.chain_run, source, "added", "auto", DeltaPolicy(), resources)


class ModelsRemoved(Chained):
    """The base and a model go, so that one model becomes a base and others are written against it."""

    def __init__(self, chain: Path, folder: Path) -> None:
        super().__init__(chain, folder, [*range(1, STEPS + 1)], [2, 4, 5])

    def do(self, workers: int) -> None:
        remove = Retention(remove=("m1", "m3"))
        compact(self.chain_run, remove, DeltaPolicy(), Execution(workers, 1 << 20))


def works(folder: Path) -> dict[str, Work]:
    """Return one work of each kind."""
    saved = []
    for state in states(STEPS):
        saved.append(folder / f"saved{state.step}")
        save(state, saved[-1], Universal())
    chain, longer = folder / "chain", folder / "longer"
    for path in saved[:-1]:
        append(chain, open_checkpoint(path), None, DeltaPolicy(tip=True), Execution())
    shutil.copytree(chain, longer)
    append(longer, open_checkpoint(saved[-1]), None, DeltaPolicy(tip=True), Execution())
    (targets := folder / "targets").mkdir()
    plain, encoded = (Universal(pack_nbytes=PACK_NBYTES, codec=codec) for codec in (None, "auto"))
    orbax = Orbax(chunk_nbytes=PACK_NBYTES // 4, file_nbytes=PACK_NBYTES)
    return {
        "folder": Written(saved[0], targets / "folder", "out", plain),
        "one file": Written(saved[0], targets / "file", "out.ucp", plain),
        "folder, encoded": Written(saved[0], targets / "encoded", "out", encoded),
        "one file, encoded": Written(saved[0], targets / "encoded-file", "out.ucp", encoded),
        "orbax": Written(saved[0], targets / "orbax", "out", orbax),
        "append": Appended(chain, targets / "append", saved[-1]),
        "compact": Compacted(longer, targets / "compact"),
    }


def works_on_families(folder: Path) -> dict[str, Work]:
    """Return one work of each kind that changes a family of models, which are the states of `works` in this folder."""
    saved = [folder / f"saved{number}" for number in range(1, STEPS + 1)]
    family, larger = folder / "family", folder / "larger"
    for number, path in enumerate(saved[:-1], 1):
        parent = "none" if number == 1 else "m1" if number < 4 else "m3"
        append_model(family, open_checkpoint(path), f"m{number}", parent, DeltaPolicy(), Execution())
    shutil.copytree(family, larger)
    append_model(larger, open_checkpoint(saved[-1]), f"m{STEPS}", "m1", DeltaPolicy(), Execution())
    return {
        "model added": ModelAdded(family, folder / "targets/added", saved[-1]),
        "models removed": ModelsRemoved(larger, folder / "targets/removed"),
    }


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    generator = random.Random(seed)
    every = {**works(folder), **works_on_families(folder)}
    campaigns = {name: Campaign(work) for name, work in every.items()}
    yield from alternated({name: partial(one.round, generator) for name, one in campaigns.items()})
