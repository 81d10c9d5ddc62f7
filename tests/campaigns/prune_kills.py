"""Kill what removes checkpoints of a run, at each change to the file system or request to a store.

After each kill, the newest whole checkpoint is what it was, every checkpoint that a rule keeps is whole, each other one
is whole or gone, and nothing that is neither can be opened. The next prune, or `clean`, finishes what was begun.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np
import obstore

import ckpt as library
from forking import forking
from killing import killed, points
from object_stores import BUCKET, Killer, StoreServer, killing, moto, reached, start
from run import Round, alternated

STEPS = (10, 20, 30, 40)
KEEP = "last:1,every:20"
KEPT = ("step-20", "step-40")
URL = f"s3://{BUCKET}/run"
OLD = 1_700_000_000


def make_run(folder: Path) -> None:
    """Save some steps, all of them long ago, beside files that are no checkpoints."""
    folder.mkdir()
    for step in STEPS:
        path = folder / f"step-{step}"
        values = {"layer.weight": np.full((4, 8), step, np.float32), "layer.bias": np.full(8, step, np.float32)}
        library.save(_checkpoint(folder.parent, values), path, "universal")
    (folder / "notes.txt").write_text("mine")
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events").write_text("mine")
    for path in folder.rglob("*"):
        os.utime(path, (OLD, OLD))


def _checkpoint(folder: Path, values: dict[str, np.ndarray]) -> library.Checkpoint:
    from safetensors.numpy import save_file

    save_file(values, folder / "values.safetensors")
    return library.open(folder / "values.safetensors")


def look(run: str, whole: dict[str, float]) -> Counter[str]:
    """Assert what must hold at every moment; return how many of the others are whole, gone, or remainders."""
    newest = library.runs.latest(run)
    assert newest.path.name == "step-40", newest
    seen: Counter[str] = Counter()
    for name, value in whole.items():
        try:
            checkpoint = library.open(f"{run}/{name}")
        except library.NotFoundError:
            seen["gone"] += 1
        except library.errors.IncompleteError:
            seen["a remainder"] += 1
        else:
            assert checkpoint["layer.weight"].weight[:].tolist() == [[value] * 8] * 4
            assert checkpoint["layer.bias"].weight[:].tolist() == [value] * 8
            seen["whole"] += 1
            continue
        assert name not in KEPT, f"{name} is lost"
    return seen


VALUES = {f"step-{step}": float(step) for step in STEPS}


def prune(run: str) -> None:
    library.runs.prune(run, KEEP, unchanged_for=0.0)


def folder_round(original: Path, work: Path, generator: random.Random) -> Counter[str]:
    """Kill a prune of a folder at one point, perhaps again, then finish it."""
    if work.exists():
        shutil.rmtree(work)
    shutil.copytree(original, work)
    count = points(partial(prune, str(work)), work)
    shutil.rmtree(work)
    shutil.copytree(original, work)
    for _ in range(generator.choice((1, 1, 2))):
        killed(partial(prune, str(work)), work, generator.randrange(count))
        seen = look(str(work), VALUES)
    if generator.random() < 0.2:
        for name in VALUES.keys() - set(KEPT):
            library.clean(work / name)
        assert not [path for path in work.iterdir() if path.name.startswith(".")]
    prune(str(work))
    assert sorted(path.name for path in work.iterdir()) == ["notes.txt", *KEPT, "tensorboard"]
    assert (work / "tensorboard" / "events").read_text() == "mine"
    return seen


@dataclass
class Bucket:
    """A run in a bucket, and the requests of a prune that change it."""

    original: Path
    server: StoreServer
    killer: Killer
    processes: BaseContext
    generator: random.Random
    changes: list[int] = field(default_factory=list)

    def keys(self) -> list[str]:
        return [meta["path"] for page in obstore.list(self.server.client, "run") for meta in page]

    def renew(self) -> set[str]:
        """Put the run as it was. Return its keys."""
        if keys := self.keys():
            obstore.delete(self.server.client, keys)
        self.server.put("run", self.original)
        return set(self.keys())

    def measure(self) -> None:
        self.renew()
        self.killer.expect()
        self.prune(0)
        requests = enumerate(self.killer.seen)
        self.changes = [at for at, request in requests if request.startswith(("PUT", "POST", "DELETE"))]

    def prune(self, *codes: int) -> None:
        process = start(self.processes, self.server, prune, URL, killer=self.killer)
        process.join(120)
        assert process.exitcode in codes, process.exitcode

    def round(self) -> Counter[str]:
        """Kill a prune at one of its requests that change the store, carried out or not, then finish it."""
        if not self.changes:
            self.measure()
        before = self.renew()
        self.killer.expect(self.generator.choice(self.changes), self.generator.random() < 0.5)
        self.prune(0, -signal.SIGKILL)
        seen = look(URL, VALUES)
        prune(URL)
        kept = tuple(f"run/{name}/" for name in (*KEPT, "tensorboard"))
        assert set(self.keys()) == {key for key in before if key.startswith(kept) or key == "run/notes.txt"}
        return seen


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    """Yield kills in a folder and in a bucket, in turn."""
    generator = random.Random(seed)
    original = folder / "original"
    make_run(original)
    processes = forking("prune_kills")
    with moto() as server, killing(server) as killer, reached(server):
        yield from alternated(
            {
                "folder": partial(folder_round, original, folder / "work", generator),
                "bucket": Bucket(original, server, killer, processes, generator).round,
            }
        )
