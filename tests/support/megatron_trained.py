"""Real Megatron core trains on from files of ours and from its own, which it reshards itself while it loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from held import bits
from megatron_jobs.kinds import KINDS
from megatron_jobs.launch import resume
from megatron_resumed import reshard

STEPS = 4


@dataclass(frozen=True)
class Change:
    """Another number of ranks for a kind of run."""

    kind: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def options(self) -> str:
        return f"--tp {self.tp} --pp {self.pp} --ep {self.ep} --dp {self.dp}"

    @property
    def degrees(self) -> dict[str, int]:
        return {"tp": self.tp, "pp": self.pp, "ep": self.ep, "dp": self.dp}

    @property
    def by_megatron(self) -> Change:
        """The one that Megatron can make alone: it has an optimizer of its own for experts only if ranks share them."""
        has_own = KINDS[self.kind].ep > 1
        return self if has_own == (self.ep > 1) else replace(self, ep=2, dp=2) if has_own else replace(self, ep=1)

    @property
    def folder(self) -> str:
        """Of what Megatron made of its own files."""
        return f"own-{self.kind}{self.options.replace(' --', '-').replace(' ', '')}"


def train(changes: Mapping[str, Change], saved: Path, out: Path) -> None:
    """Train on by each change: in `out`/NAME from files of ours, and once for each cut from Megatron's own."""
    jobs: dict[str, Any] = {}
    (out / "written").mkdir()
    for name, change in changes.items():
        source, written = saved / change.kind / "fully", out / "written" / name
        reshard(source, written, change.options)
        job = {"kind": change.kind, "changes": change.degrees, "steps": STEPS}
        jobs[name] = {**job, "run": str(written)}
        own = change.by_megatron
        jobs[own.folder] = {**job, "changes": own.degrees, "run": str(source)}
    resume(jobs, out, "train_dist.py")


def assert_trains_the_same(change: Change, name: str, out: Path) -> None:
    """All losses and then all states have the same bits; the first loss if Megatron cannot make the change alone.

    Experts over more ranks compute the same first loss, and then are summed in another order.
    """
    folders = (name, change.by_megatron.folder)
    actual, expected = (json.loads((out / folder / "losses.json").read_text()) for folder in folders)
    assert len(set(actual)) == len(actual) == STEPS
    if change.by_megatron != change:
        assert actual[0] == expected[0]
        return
    assert actual == expected
    first, second = (states(out / folder / "trained") for folder in folders)
    assert first.keys() == second.keys()
    assert [place for place in first if first[place] != second[place]] == []


def states(run: Path) -> dict[tuple[str, str], object]:
    """Every bit of weights, masters and moments."""
    return {(one.name, state): bits(read(tensor)) for one, state, tensor in open_checkpoint(run).tensors()}
