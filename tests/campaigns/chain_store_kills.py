"""Kill what changes chains in a bucket, and copies: `python tests/campaigns/chain_store_kills.py --kills 200`.
Then pairs of processes that append at once: of the two, one may be refused.

A process is sent SIGKILL at one of its requests, which the store carries out or not, one as often as the other. Then
the chain is as it was before, or as it is afterwards, and can be verified; a copy is absent or whole. The same command
is run to its end: each object must have the bytes that it has without a kill, and nothing else may be left. The check
runs a small sample. The server is moto's, which keeps conditions; a killed process holds its lease no longer, because
it is known to have ended on this machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import obstore

from ckpt.chains.append import append
from ckpt.chains.compact import Retention, compact
from ckpt.chains.verify import verify_chain
from ckpt.chains.write import DeltaPolicy
from ckpt.copying.copy import copy
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.errors import CkptError, LockedError, UnsupportedError
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.stores.location import source_path
from ckpt_formats.universal import Universal
from ckpt_formats.universal.chain import file as index
from object_stores import BUCKET, Killer, StoreServer, killing, moto, reached, start
from universal_kills import states

ELEMENTS = 3_000
STEPS = 4
"""States of the chain that is compacted; all but the last of them are in the chain that is appended to."""
KEPT = ("2,4",)
CHAIN, COPY = "work/run.chain", "work/copy.chain"
_SMALL = 40_000
"""Bytes of a file that takes one request here; larger ones are uploaded in parts."""


def work(name: str, folder: str) -> None:
    """One of the works, done in full."""
    from ckpt_formats.stores import bucket

    bucket._SINGLE_REQUEST = _SMALL
    run = source_path(f"s3://{BUCKET}/{CHAIN}")
    at = Path(folder)
    if name == "compact":
        compact(run, Retention(KEPT), DeltaPolicy(), Execution(workers=1))
    elif name == "copy":
        copy(run, f"s3://{BUCKET}/{COPY}", resources=Execution(workers=2))
    else:
        policy = DeltaPolicy(tip=name == "tip", base_every=1 if name == "base" else None)
        append(run, open_checkpoint(at / f"state{STEPS}"), None, policy, Execution(workers=1))


LOCKED, LATE = 11, 22
WORKS = ("delta", "base", "tip", "compact", "copy")


def objects(server: StoreServer) -> dict[str, bytes]:
    """All objects of the work, without what differs each time: the list of the chain has times."""
    metas = [meta["path"] for page in obstore.list(server.client, "work/") for meta in page]
    return {path: bytes(obstore.get(server.client, path).bytes()) for path in metas}


class Campaign:
    """A chain in a bucket, which is put there anew for each kill."""

    def __init__(self, server: StoreServer, killer: Killer, folder: Path) -> None:
        self.server, self.killer, self.folder = server, killer, folder
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(["chain_store_kills"])
        with reached(server):
            for state in states(STEPS, ELEMENTS):
                save(state, folder / f"state{state.step}", Universal())
            run = source_path(f"s3://{BUCKET}/{CHAIN}")
            self.chains = dict[int, dict[str, bytes]]()
            for step in range(1, STEPS + 1):
                append(run, open_checkpoint(folder / f"state{step}"), None, DeltaPolicy(), Execution(workers=1))
                self.chains[step] = objects(server)
        self.expected = {name: self._without_kill(name) for name in WORKS}

    def renew(self, name: str) -> dict[str, bytes]:
        """Put the chain as it is before a work; its objects."""
        client, before = self.server.client, self.chains[STEPS if name in ("compact", "copy") else STEPS - 1]
        there = [meta["path"] for page in obstore.list(client, "work/") for meta in page]
        if there:
            obstore.delete(client, there)
        for key, data in before.items():
            obstore.put(client, key, data)
        return before

    def _without_kill(self, name: str) -> tuple[dict[str, bytes], int]:
        """The objects after a work, and how many requests it makes."""
        self.renew(name)
        self.killer.expect()
        assert self._run(name) == 0
        return objects(self.server), self.killer.requests

    def _run(self, name: str) -> int | None:
        """The exit code of a process that does the work through the proxy."""
        process = start(self.processes, self.server, work, name, str(self.folder), killer=self.killer)
        process.join(120)
        code: int | None = process.exitcode
        return code

    def kill(self, name: str, generator: random.Random) -> str:
        """Kill a work at one of its requests, look, and do it to its end. What was seen after the kill."""
        expected, requests = self.expected[name]
        before = self.renew(name)
        self.killer.expect(generator.randrange(requests), generator.random() < 0.5)
        code = self._run(name)
        assert code in (0, -9), code
        left = objects(self.server)
        with reached(self.server):
            seen = self._look(name, before, left)
            if seen != "done":
                again = start(self.processes, self.server, work, name, str(self.folder))
                again.join(120)
                assert again.exitcode == 0, f"{name}: after the kill at request {self.killer.at}: {sorted(left)}"
                _assert_equal(objects(self.server), expected)
            elif name != "copy":
                self._sweep()
        return seen

    def _look(self, name: str, before: dict[str, bytes], left: dict[str, bytes]) -> str:
        """`absent`, `before` or `done`: the chain or the copy after a kill, which is verified."""
        if name == "copy":
            assert {key: data for key, data in left.items() if key in before} == before
            copied = source_path(f"s3://{BUCKET}/{COPY}")
            try:
                open_checkpoint(copied)
            except CkptError:
                return "absent"
            assert not _damage(copied), (name, self.killer, _damage(copied), sorted(left))
            return "done"
        run = source_path(f"s3://{BUCKET}/{CHAIN}")
        steps = [member.step for member in index.read(run).members]
        old = [*range(1, STEPS + 1)] if name == "compact" else [*range(1, STEPS)]
        new = [2, 4] if name == "compact" else [*range(1, STEPS + 1)]
        assert steps in (old, new), steps
        assert not _damage(run), (name, self.killer, _damage(run), sorted(left))
        return "before" if steps == old else "done"

    def _sweep(self) -> None:
        """What is left beside a chain that has changed already, the next command removes."""
        run = source_path(f"s3://{BUCKET}/{CHAIN}")
        chain = index.read(run)
        result = compact(run, Retention(), DeltaPolicy(), Execution(workers=1))
        assert result.after == chain
        named = {*(one.folder for one in chain.members), index.NAME, *([chain.tip.folder] if chain.tip else [])}
        assert {key[len(CHAIN) + 1 :].partition("/")[0] for key in objects(self.server)} == named

    def pair(self, generator: random.Random) -> str:
        """Two processes append at once, after random pauses. Who is late says so, or goes on after the other."""
        self.renew("pair")
        pauses = [generator.uniform(0, 1.2) for _ in range(2)]
        processes = [
            start(self.processes, self.server, _appending, str(self.folder), pause, STEPS + number)
            for number, pause in enumerate(pauses)
        ]
        for process in processes:
            process.join(120)
        codes = [process.exitcode for process in processes]
        with reached(self.server):
            run = source_path(f"s3://{BUCKET}/{CHAIN}")
            steps = [member.step for member in index.read(run).members]
            done = [STEPS + number for number, code in enumerate(codes) if code == 0]
            assert done, codes
            assert set(codes) <= {0, LOCKED, LATE}, codes
            assert steps == [*range(1, STEPS), *done], (steps, codes)
            assert not _damage(run), (codes, _damage(run))
            assert not [key for key in objects(self.server) if "/.ckpt/" in key]
        return "both" if len(done) == 2 else "one, the other was locked out" if LOCKED in codes else "one was too late"


def _damage(run: Path) -> list[object]:
    """What is wrong with a chain, but for copies that are not their masters rounded: one state has such a copy."""
    return [one for one in verify_chain(run, Execution(workers=1)).findings if one.kind != "copy"]


def _appending(folder: str, pause: float, step: int) -> None:
    """Append a state as that of a step. Ends with `LOCKED` or `LATE`, as the command does with 11 and 22."""
    time.sleep(pause)
    state = open_checkpoint(Path(folder) / f"state{STEPS}")
    try:
        append(source_path(f"s3://{BUCKET}/{CHAIN}"), state, step, DeltaPolicy(), Execution(workers=1))
    except LockedError:
        os._exit(LOCKED)
    except UnsupportedError:  # the other one has appended a later step
        os._exit(LATE)


def _assert_equal(actual: dict[str, bytes], expected: dict[str, bytes]) -> None:
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    lists = {key for key in expected if key.endswith(index.NAME)}
    assert not [key for key in expected.keys() - lists if actual[key] != expected[key]]
    for key in lists:
        members = [_timeless(index.parse(data, Path(key))) for data in (actual[key], expected[key])]
        assert members[0] == members[1], key


def _timeless(chain: index.ChainIndex) -> index.ChainIndex:
    return replace(chain, members=tuple(replace(one, time="") for one in chain.members))


def campaign(
    kills: int, seed: int, folder: Path, pairs: int = 0, say: Callable[[str], None] = lambda text: None
) -> Counter[str]:
    """So many kills, of each work in turn, and pairs of processes that append at once. What was seen."""
    generator, seen = random.Random(seed), Counter[str]()
    with moto() as server, killing(server) as killer:
        one = Campaign(server, killer, folder)
        for number in range(kills):
            name = WORKS[number % len(WORKS)]
            seen[f"{name}: {one.kill(name, generator)}"] += 1
            if number % 20 == 19:
                say(f"{number + 1} kills")
        for _ in range(pairs):
            seen[f"pair: {one.pair(generator)}"] += 1
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        seen = campaign(given.kills, given.seed, Path(folder), given.pairs, lambda text: print(text, flush=True))
    print(
        f"seed {given.seed}: {given.kills} kills, {given.pairs} pairs, "
        f"{time.process_time() - began:.0f} s of this process"
    )
    for what, count in sorted(seen.items()):
        print(f"{count:6}  {what}")


if __name__ == "__main__":
    main()
