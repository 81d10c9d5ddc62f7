"""Kill shards that write one target together.

Three shards run at once, on two formats. Some are killed: half of them in front of a random change to the file system,
half by SIGKILL at a random time; some run twice at once. Those that were killed run again, in a random order, sometimes
killed again; then `ckpt commit` runs, twice. Afterwards the target has the bytes of a local run, and nothing is left
but what remembers that the job is done. Before that, it is absent or whole.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import ckpt as library
from ckpt.pipeline import Execution
from ckpt.pipeline.shard import COMMIT, Shard
from ckpt_formats.core.format import WritableFormat
from clusters import files
from killing import killed, killed_after
from run import Round, alternated, counted

SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"
COUNT = 3
FORMATS: dict[str, WritableFormat] = {
    "universal": library.Universal(pack_nbytes=1),
    "dcp": library.DCP(dp=6),
}


class Campaign:
    """One source, written in one format."""

    def __init__(self, folder: Path, name: str) -> None:
        self.source = SAMPLES / "deepspeed-0.19-zero3-bf16-dp4-tied-frozen"
        self.format, self.folder = FORMATS[name], folder / name
        self.target = self.folder / "out"
        self.counts = Counter[str]()
        self.folder.mkdir()
        started = time.monotonic()
        library.Job(library.open(self.source), folder / f"{name}-local", self.format).run(resources=Execution(1))
        self.seconds = time.monotonic() - started
        self.expected = files(folder / f"{name}-local")
        self.points = 60

    def write(self, shard: Shard) -> None:
        """What a process does."""
        library.Job(library.open(self.source), self.target, self.format).run(resources=Execution(1, shard=shard))

    def round(self, generator: random.Random) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        shards = [Shard(i, COUNT) for i in range(COUNT)]
        again = generator.sample(shards, generator.choice((0, 0, 1)))
        running = [self._start(partial(self._perhaps_killed, shard, generator.random())) for shard in (*shards, *again)]
        left = {shard.number for shard, one in zip((*shards, *again), running, strict=True) if self._ends(one)}
        self._check()
        while left:
            number = generator.choice(sorted(left))
            if self._ends(self._start(partial(self._perhaps_killed, Shard(number, COUNT), generator.random() / 2))):
                self.counts["killed again"] += 1
            else:
                left.remove(number)
            self._check()
        for _ in range(2):
            self.write(COMMIT)
        assert files(self.target) == self.expected
        names = [path.name for one in self.folder.iterdir() if one != self.target for path in one.iterdir()]
        assert sorted(names) == ["job", "published"], names

    def _check(self) -> None:
        """Absent or whole."""
        if self.target.exists():
            assert files(self.target) == self.expected
            self.counts["whole"] += 1
        else:
            self.counts["absent"] += 1

    def _perhaps_killed(self, shard: Shard, chance: float) -> bool:
        """Whether the shard was killed before its end."""
        generator, work = random.Random(chance), partial(self.write, shard)
        if chance < 0.4:
            return killed_after(work, generator.random() * self.seconds * 1.5)
        if chance < 0.8:
            return killed(work, self.folder, generator.randrange(self.points))
        work()
        return False

    def _start(self, work: Callable[[], bool]) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            try:
                os._exit(77 if work() else 0)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        return child

    def _ends(self, child: int) -> bool:
        """Wait for a process; whether what it ran was killed."""
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 77), code
        self.counts["killed" if code else "ended"] += 1
        return bool(code)


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    generator = random.Random(seed)
    campaigns = {name: Campaign(folder, name) for name in FORMATS}
    yield from alternated({name: counted(one.counts, partial(one.round, generator)) for name, one in campaigns.items()})
