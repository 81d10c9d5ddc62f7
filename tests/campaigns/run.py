"""Run a campaign for so many rounds, or for so many seconds.

    python tests/campaigns/run.py WORK [--rounds 200] [--seed 1] [--seconds 3600] [--only TEXT]... [--json FILE]

A work kills processes, flips bits or damages inputs, in one round after another, and compares what it sees with a run
that nothing disturbed. `--only` takes the rounds whose name contains a text, or one of several. After a failed round
the campaign goes on; it prints counts of what was seen, and ends with exit code 1 if a round failed. The check runs
samples.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from itertools import cycle
from pathlib import Path

CAMPAIGNS = Path(__file__).resolve().parent
sys.path.extend(str(folder) for folder in (CAMPAIGNS.parent / "support", CAMPAIGNS.parent / "jobs"))


@dataclass(frozen=True)
class Round:
    """One round of a work: `run` returns counts of what was seen, and raises `AssertionError` for a finding."""

    name: str
    run: Callable[[], Mapping[str, int]]


@dataclass(frozen=True)
class Work:
    """A function `(folder, seed)` that yields rounds without end, in a module of this folder, and what it does."""

    place: str
    summary: str

    def rounds(self, folder: Path, seed: int) -> Generator[Round, None, None]:
        module, _, name = self.place.partition(":")
        rounds: Generator[Round, None, None] = getattr(import_module(module), name)(folder, seed)
        return rounds


WORKS = {
    "universal_kills": Work("universal_kills:rounds", "what writes universal checkpoints and chains is killed"),
    "store_kills": Work("store_kills:rounds", "what writes checkpoints and chains into a bucket is killed"),
    "prune_kills": Work("prune_kills:rounds", "what removes checkpoints of a run is killed"),
    "parity_patterns": Work("protect_campaign:all_patterns", "all sets of blocks that small codes replace are lost"),
    "parity_damage": Work("protect_campaign:damage", "files of protected folders are damaged, and repaired"),
    "parity_store_damage": Work(
        "protect_campaign:store_damage", "objects of protected folders in a bucket are damaged"
    ),
    "parity_store_kills": Work("protect_campaign:store_kills", "what writes parity of a chain in a bucket is killed"),
    "peers_drill": Work("peers_campaign:rounds", "two hosts of a run are lost with what they hold"),
    "peers_parity": Work("peers_parity:rounds", "hosts that hold parity of each other are lost, restarted, flipped"),
    "parity_kills": Work("protect_campaign:kills", "what writes parity and what repairs is killed"),
    "watch_kills": Work("watch_kills:rounds", "what stores the checkpoints of a run elsewhere is killed"),
    "shard_kills": Work("shard_kills:rounds", "shards that write one folder are killed"),
    "shard_store_kills": Work("shard_store_kills:kills", "shards and commits that write into a bucket are killed"),
    "shard_store_waits": Work("shard_store_kills:waits", "shards wait in a bucket until others have published"),
    "cluster_kills": Work("shard_store_kills:cluster_kills", "a worker or the coordinator of a cluster is killed"),
    "recording_kills": Work("recording_kills:rounds", "recorded trainers and their writers are killed"),
    "bases_kills": Work("bases_kills:rounds", "processes are killed while bases are copied"),
    "bases": Work("bases_campaign:rounds", "bases are compared with the checkpoints of engines"),
    "saves_kills": Work("saves_kills:rounds", "processes are killed while live runs are saved"),
    "shadow_kills": Work("shadow_campaign:kills", "shadows of a growing log are killed"),
    "shadow_peers": Work("shadow_campaign:peers", "hostile peers connect to a shadow"),
    "log_peers": Work("shadow_campaign:log_peers", "hostile peers connect to a server of a chain"),
    "shadow_trainers": Work("shadow_trainers:rounds", "trainers and their shadows are killed, and go on"),
    "universal_flips": Work("universal_flips:flips", "bits of universal checkpoints are flipped"),
    "orbax_flips": Work("orbax_flips:rounds", "bits of checkpoints of Orbax and Flax are flipped"),
    "hostile_columns": Work("universal_flips:hostile_columns", "numbers of columns are forged"),
    "sync_kills": Work("sync_kills:rounds", "publishers of a chain and its followers are killed"),
    "sync_damage": Work("sync_damage:rounds", "published chains are damaged, read and followed"),
    "sync_cache": Work("sync_cache:rounds", "50 followers read a published chain through nginx"),
    "sync_steps": Work("sync_steps:rounds", "each step of real runs is published, and compared at two followers"),
    "families": Work("families_campaign:rounds", "random models in transformers and in Megatron core are compared"),
    "megatron_training": Work("megatron_training:rounds", "runs of Megatron core go on over other numbers of ranks"),
    "table_mutations": Work("table_mutations:rounds", "lines of the tables of families are changed"),
    "quantised_models": Work("quantised_hostile:models", "hostile quantised models are dequantised"),
    "gguf_files": Work("quantised_hostile:files", "hostile files of llama.cpp are read"),
    "fuzz_kernels": Work("fuzz_kernels:rounds", "C kernels read hostile bytes under sanitizers"),
    "fuzz_readers": Work("fuzz_readers:rounds", "what readers parse is changed, guided by coverage"),
}


@dataclass
class Report:
    """What the rounds of a campaign saw."""

    rounds: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def counted(counts: Counter[str], work: Callable[[], object]) -> Callable[[], Counter[str]]:
    """Return a run that does the work, and returns what it adds to counts."""

    def run() -> Counter[str]:
        before = counts.copy()
        work()
        return counts - before

    return run


def alternated(runs: Mapping[str, Callable[[], Mapping[str, int]]]) -> Iterator[Round]:
    """Yield rounds by name, in turn, without end."""
    return cycle([Round(name, run) for name, run in runs.items()])


def run(
    rounds: Generator[Round, None, None],
    count: int,
    seconds: float = float("inf"),
    only: Sequence[str] = ("",),
) -> Report:
    """Run so many rounds whose name contains one of these texts, and begin none after so many seconds. Print failures.

    The generator is closed. Left to the garbage collector, it would end its servers and take back what it has set in
    the environment at any time, even in the middle of another test.
    """
    report, began, skipped = Report(), time.monotonic(), 0
    with closing(rounds):
        for one in rounds:
            if report.rounds == count or time.monotonic() - began > seconds:
                break
            if not any(text in one.name for text in only):
                skipped += 1
                assert skipped < 10_000 or report.rounds, f"no round has {only} in its name, such as {one.name}"
                continue
            report.rounds += 1
            try:
                report.seen.update({f"{one.name}: {what}": number for what, number in one.run().items() if number})
            except AssertionError:
                report.failures.append(f"{one.name}: {traceback.format_exc()}")
                print(f"FAILED: {report.failures[-1]}", flush=True)
    return report


def main() -> int:
    works = "\n".join(f"  {name:20} {work.summary}" for name, work in WORKS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"works:\n{works}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=WORKS, metavar="WORK")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", action="append", metavar="TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # of the processes that works start
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each would compile all modules anew
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"{given.work}-"))
    report = run(WORKS[given.work].rounds(folder, given.seed), given.rounds, given.seconds, given.only or ("",))
    for what, number in sorted(report.seen.items()):
        print(f"{number:8,}  {what}")
    failed = len(report.failures)
    print(f"{given.work}, seed {given.seed}: {report.rounds} rounds, {failed} failed, {time.monotonic() - began:.0f} s")
    if given.json:
        given.json.write_text(json.dumps(vars(report), indent=1))
    if failed:
        print(f"files are left in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
