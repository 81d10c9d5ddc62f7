"""Append to chains of several lengths: `python benchmarks/appending.py --gb 0.06 --lengths 5,50,200`.

The run is that of `benchmarks/chain.py`. At each length, the next state is appended to copies of the chain, the last
state being read in four ways: from a checkpoint that is given, from where the chain states that it was appended from,
from the tip, and by replay. All must write the same files. Beside it stands what no way can save: reading both states,
encoding the change and decoding it again. Medians of CPU seconds of rounds in turn, in one process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from chain import states

from ckpt.chains.append import append
from ckpt.chains.tip import write_tip
from ckpt.chains.write import DeltaPolicy
from ckpt.job import load_kernels, save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.files import Reader
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import AppendedFrom
from ckpt_formats.universal.delta_format import Delta, delta_base
from ckpt_formats.universal.delta_plan import plan_delta

WAYS = ("given", "found", "tip", "replayed")
ALONE = "read two states, encode, decode"


class Counted:
    """Bytes of values that are read, and manifests that are loaded."""

    nbytes = 0
    indexes = 0


@contextmanager
def counting() -> Iterator[Counted]:
    counted, read, load = Counted(), Reader.read_into, manifest.load

    def read_into(reader: Reader, path: Path, offset: int, out: memoryview, *seal: Any) -> None:
        counted.nbytes += len(out)
        read(reader, path, offset, out, *seal)

    def load_one(path: Path) -> manifest.Manifest:
        counted.indexes += 1
        return load(path)

    Reader.read_into, manifest.load = read_into, load_one  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        Reader.read_into, manifest.load = read, load  # type: ignore[method-assign]


def copied(state: Checkpoint) -> Checkpoint:
    """The state in memory of its own: the optimizer changes that of the run in place."""
    held = {}
    for name, parameter in state.parameters.items():
        arrays = {key: Tensor.of(ArrayBlob(tensor[...].copy())) for key, tensor in parameter.states.items()}
        held[name] = replace(parameter, states=arrays)
    return replace(state, parameters=held)


def alone(before: Path, after: Path) -> None:
    """Read both states chunk by chunk, encode each change, and decode it."""
    earlier, source = open_checkpoint(before), open_checkpoint(after)
    codecs = DeltaPolicy().codecs(source)
    draft = Delta(earlier=earlier, delta_codecs=codecs)
    with Reader(check=False) as reader, Transfer(reader) as transfer:
        for parameter in source.parameters.values():
            content = draft.delta(parameter, source)
            assert content is not None
            plan = plan_delta(parameter, delta_base(parameter, content, transfer), EncodingOptions(), transfer)
            assert plan is not None
            for number in range(plan.chunking.count):
                change = plan.change(number, transfer)
                shape = next(iter(change.after.values())).shape
                plan.codec.decode(plan.codec.encode(change), change.before, shape, plan.form)


def prepared(run: Path, way: str, last: Path, scratch: Path) -> Path:
    """A copy of the chain whose last state is found in one way."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(run, scratch, copy_function=os.link)
    chain = replace(chain_file.read(run), appended_from=None, tip=None)
    member = chain.members[-1]
    if way == "found":
        chain = replace(chain, appended_from=AppendedFrom(member.content, os.path.relpath(last, scratch)))
    if way == "tip":
        state = open_checkpoint(last)
        chain = replace(chain, tip=write_tip(scratch, member, state, state, Execution()))
    (scratch / chain_file.NAME).unlink()
    (scratch / chain_file.NAME).write_bytes(chain_file.dump(chain))
    return scratch


def packs(run: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((run / chain_file.read(run).members[-1].folder).rglob("packs/*"))]


def measured(run: Path, last: Path, after: Path, scratch: Path, rounds: int) -> dict[str, tuple[float, int, int]]:
    """CPU seconds, bytes read and indexes loaded, by way."""
    seconds: dict[str, list[float]] = {way: [] for way in (*WAYS, ALONE)}
    work, written = dict[str, tuple[int, int]](), list[list[bytes]]()
    for _ in range(rounds):
        for way in WAYS:
            target = prepared(run, way, last, scratch / "copy")
            source, parent = open_checkpoint(after), open_checkpoint(last) if way == "given" else None
            with counting() as counted:
                began = time.process_time()
                append(target, source, None, DeltaPolicy(), Execution(), None, parent)
                seconds[way].append(time.process_time() - began)
            work[way] = counted.nbytes, counted.indexes
            written.append(packs(target))
        with counting() as counted:
            began = time.process_time()
            alone(last, after)
            seconds[ALONE].append(time.process_time() - began)
        work[ALONE] = counted.nbytes, counted.indexes
    assert all(one == written[0] for one in written), "the files differ"
    return {way: (median(some), *work[way]) for way, some in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=0.06)
    parser.add_argument("--lengths", default="5,50,200")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path)
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    load_kernels()
    print("| length | way | CPU s | relative | MB read | indexes |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(dir=given.scratch) as temporary:
        at = Path(temporary)
        before: Checkpoint | None = None
        for number, state in enumerate(map(copied, states(given.gb, max(lengths) + 1))):
            if number in lengths:
                assert before is not None
                save(before, at / "last", Universal())
                save(state, at / "after", Universal())
                figures = measured(at / "run", at / "last", at / "after", at, given.rounds)
                for way, (cpu, nbytes, indexes) in figures.items():
                    times = cpu / figures[ALONE][0]
                    print(
                        f"| {number} | {way} | {cpu:.2f} | {times:.2f} | {nbytes / 1e6:,.1f} | {indexes} |", flush=True
                    )
                shutil.rmtree(at / "last")
                shutil.rmtree(at / "after")
            append(at / "run", state, None, DeltaPolicy(check=False), Execution(), None, before)
            before = state


if __name__ == "__main__":
    main()
