"""How much of a machine a piece of work may use, and which other machines."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpt.pipeline.shard import Shard
from ckpt_formats.core.arguments import Checked, LocalPath, Positive, Workers
from ckpt_formats.core.bands import BAND
from ckpt_formats.core.files import files_each, max_workers
from ckpt_formats.core.transfer import SLAB

_MAX_GROUP = 64
"""Files written in step: each has a thread and a slab of its own, which must not become too short."""


@dataclass(frozen=True)
class Resources(Checked):
    """How much of a machine to use."""

    workers: Workers = field(default_factory=lambda: _workers(None))
    """Threads that read, encode and write; by default one for each core, up to 8."""
    memory: Positive = 256 << 20
    """Bytes of tensor data that all workers together hold in memory. Of what is read from stores, half of it is for
    ranges that were requested before they are read, and a quarter for blocks that small reads share."""
    scratch: LocalPath | None = None
    """The folder for files on their way to a store; None: where the system has temporary files."""

    @classmethod
    def of_machine(
        cls, workers: int | None = None, memory: int = 256 << 20, scratch: LocalPath | None = None
    ) -> "Resources":
        """Resources limited to the cores and open files of this process; `workers` None: one for each core, up to 8."""
        return Resources(_workers(workers), memory, scratch)

    @property
    def files(self) -> int:
        """Files that one worker may keep open to read, while it writes one."""
        return max(1, files_each(self.workers) - 1)

    @property
    def slab(self) -> int:
        # A worker holds up to four slabs: values, a copy, a replica, and a band or what is computed.
        # With the help of a spare worker, it holds as many as both.
        return max(1 << 16, min(SLAB, self.memory // (4 * self.workers)))

    @property
    def cache(self) -> int:
        """Bytes of decoded blocks that one worker may cache, if a format asks for many."""
        return self.memory // (2 * self.workers)

    @property
    def prefetch(self) -> int:
        """Bytes of objects in stores that are requested before they are read."""
        return self.memory // 2

    @property
    def block_cache(self) -> int:
        """Bytes of objects in stores that small reads share."""
        return self.memory // 4

    def with_prefetch(self) -> "Resources":
        """The resources, with the memory that is left for values beside what is read from stores."""
        return replace(self, memory=self.memory - self.prefetch - self.block_cache)

    def shared(self, files: int, ranks: int) -> "Resources":
        """The resources of one worker, shared by so many files of so many ranks that are written in step.

        If the memory suffices, one file of each rank together hold as much as four files that are written alone.
        """
        most = 16 * self.workers * self.slab * files // ranks
        return replace(self, workers=self.workers * files, memory=min(self.memory, most))

    @property
    def band(self) -> int:
        """Bytes of rows that files in step share."""
        return min(BAND, 4 * self.slab)

    @property
    def group(self) -> int:
        """Files that may be written in step."""
        return max(1, min(_MAX_GROUP, max_workers() // self.workers))


@dataclass(frozen=True)
class Execution(Resources):
    """The resources of a piece of work, who does it, and how it writes: what users state one by one."""

    scratch: Path | None = None
    locks: bool = True
    """True: refuse a target on a file system that cannot lock files. False: assume that no other process writes it."""
    executor: str | None = None
    """Who writes the files of a job: None, threads of this process; `dask://HOST:PORT` or `ray://HOST:PORT`, workers of
    a cluster, each with one thread and `memory` for itself."""
    shard: Shard | None = None
    """Which files of a job this process writes, if several processes of a job array share them; None: all."""
    read_back: bool = False
    """Whether all that is written into a store is read back; False: only where the store does not state an MD5."""

    @staticmethod
    def of(
        resources: Resources | None,
        *,
        locks: bool = True,
        executor: str | None = None,
        shard: Shard | None = None,
        read_back: bool = False,
    ) -> "Execution":
        """With these resources; None: those of the machine. What `resources` states of an execution holds, too."""
        base = resources or Resources.of_machine()
        if isinstance(base, Execution):
            locks, executor = locks and base.locks, executor or base.executor
            shard, read_back = shard or base.shard, read_back or base.read_back
        scratch = None if base.scratch is None else Path(base.scratch)
        return Execution(base.workers, base.memory, scratch, locks, executor, shard, read_back)


def _workers(most: int | None) -> int:
    """So many workers as this process has cores, up to 8, or `most`; no more than it may open files for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(most or min(8, cores), max_workers())
