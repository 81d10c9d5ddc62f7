"""Run to a point, kill, look, finish, compare: what each campaign of kills does, over the table of its works."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import replace
from pathlib import Path

from ckpt.chains.compact import Retention, compact
from ckpt.chains.verify import verify_chain
from ckpt.chains.write import DeltaPolicy
from ckpt.pipeline import Execution
from ckpt_formats.universal.chain import chain_file


class Work(ABC):
    """What a process does in a place, as often as need be."""

    @abstractmethod
    def renew(self) -> None:
        """Bring the place to its state before the work."""

    @abstractmethod
    def run(self, generator: random.Random | None = None) -> None:
        """Do the work to its end. A generator chooses what must not show in the result, such as workers."""

    @abstractmethod
    def measure(self) -> None:
        """Do the work once, and note at how many points a kill can hit it."""

    @abstractmethod
    def kill(self, generator: random.Random) -> bool:
        """Do the work and kill it at a random point; False if it ended before."""

    @abstractmethod
    def is_done(self) -> bool:
        """Raise `AssertionError` if the place is neither as before nor as afterwards."""

    @abstractmethod
    def sweep(self) -> None:
        """Remove what a kill after the end left, as the next command does."""

    @abstractmethod
    def content(self) -> dict[str, object]:
        """Return all files of the place, without what differs from run to run."""

    def give_up(self) -> bool:
        """Remove what an interrupted work left; False if this work is always brought to its end."""
        return False


class Campaign:
    """Kills of one work, each compared with what the work comes to without a kill."""

    def __init__(self, work: Work) -> None:
        self.work = work
        work.renew()
        work.measure()
        self.expected = work.content()

    def round(self, generator: random.Random) -> Counter[str]:
        """Kill the work once or twice, look, and let it come to its end. Return what was seen."""
        work, seen = self.work, Counter[str]()
        work.renew()
        done = False
        for _ in range(generator.choice((1, 1, 2))):
            if not done:
                seen["killed" if work.kill(generator) else "ended before"] += 1
                done = work.is_done()
                seen["afterwards done" if done else "afterwards as it was"] += 1
        if generator.random() < 0.2 and work.give_up():
            seen["given up"] += 1
        if done:
            work.sweep()
        else:
            work.run(generator)
        actual = work.content()
        assert actual.keys() == self.expected.keys(), sorted(actual.keys() ^ self.expected.keys())
        different = [name for name, data in self.expected.items() if actual[name] != data]
        assert not different, f"other bytes: {different}"
        return seen


# Chains, in a folder or a bucket


def is_changed(run: Path, before: list[int], after: list[int]) -> bool:
    """Return whether a chain has the steps after a work. Either way it is whole, and everything in it can be read.

    One state has a copy that is not its master rounded, which `verify` names.
    """
    findings = [one for one in verify_chain(run, Execution()).findings if one.kind != "copy"]
    assert not findings, findings
    steps = [member.step for member in chain_file.read(run).members]
    assert steps in (before, after), steps
    return steps == after


def sweep_chain(run: Path) -> None:
    """Run a command that changes nothing in a chain, and so only removes what is left beside it."""
    chain = chain_file.read(run)
    assert compact(run, Retention(), DeltaPolicy(), Execution()).after == chain


def without_times(files: dict[str, bytes]) -> dict[str, object]:
    """Parse the lists of chains among files, and empty the times in them."""
    return {name: _untimed(name, data) if Path(name).name == chain_file.NAME else data for name, data in files.items()}


def _untimed(name: str, data: bytes) -> chain_file.ChainIndex:
    chain = chain_file.parse(data, Path(name))
    return replace(chain, members=tuple(replace(member, time="") for member in chain.members))
