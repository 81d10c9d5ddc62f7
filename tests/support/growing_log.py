"""A chain whose log grows as if a run recorded into it: prefixes of the files of a log that is complete."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.tensor import read
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex
from gradient_logs import Log, fingerprint, small_log

State = dict[tuple[str, str], bytes]
"""The bytes of all tensors, by parameter and state."""


def bits(checkpoint: Checkpoint) -> State:
    """The values of all states but torch's own counts, which are compared as numbers."""
    return {
        (name, state): read(tensor).tobytes()
        for name, parameter in checkpoint.parameters.items()
        for state, tensor in parameter.states.items()
        if state != "step"
    }


def log_with_fingerprints(steps: int, every: int) -> Log:
    """A run of two ranks with a fingerprint of each `every`th step."""
    log = small_log(steps)
    for rank, entries in enumerate(log.ranks):
        for step in range(every, steps, every):
            at = next(i for i, one in enumerate(entries) if one.step > step)
            entries.insert(at, fingerprint(log.layout, rank, step, log.truth[step]))
    return log


def grow(finished: Path, run: Path, seed: int, pieces: int = 40) -> Iterator[None]:
    """Copy a chain to `run`, piece by piece: its segments one after another, ranks in random order.

    Gives after each piece. The list is written when a segment begins.
    """
    draw = random.Random(seed)
    chain = chain_file.load(finished / chain_file.NAME)
    run.mkdir()
    for member in chain.members:
        shutil.copytree(finished / member.folder, run / member.folder)
    for number, logged in enumerate(chain.segments):
        there, here = finished / logged.folder, run / logged.folder
        here.mkdir()
        shutil.copy(there / "layout.json", here)
        before = [*chain.segments[:number], replace(logged, step=None)]
        members = tuple(member for member in chain.members if member.step <= logged.first)
        (run / "draft").write_bytes(chain_file.dump(ChainIndex(members, tuple(before))))
        (run / "draft").rename(run / chain_file.NAME)  # as the recorder does: nobody sees half of it
        contents = {path.name: path.read_bytes() for path in sorted(there.glob("rank-*.ckg"))}
        for name in contents:
            (here / name).touch()
        yield
        ends = dict.fromkeys(contents, 0)
        while remaining := [name for name, end in ends.items() if end < len(contents[name])]:
            name = draw.choice(remaining)
            size = draw.randrange(1, 2 * len(contents[name]) // pieces + 2)
            with (here / name).open("ab") as file:
                file.write(contents[name][ends[name] : ends[name] + size])
            ends[name] = min(ends[name] + size, len(contents[name]))
            yield
