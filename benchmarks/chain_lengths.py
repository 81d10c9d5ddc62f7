"""`verify` and `compact` of chains of several lengths: `python benchmarks/chain_lengths.py --keep FOLDER`.

One run of PyTorch's AdamW (see `chain.py`) is stored as a chain, in FOLDER, where a later run finds it again. Shorter
chains are its first members. For each length: CPU seconds of `verify` and of `compact --keep every:5`, medians of some
rounds in turn; then a straight line through them, and by how much each measured value differs from it.
"""

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from chain import BYTES_EACH, CKPT, states
from measure import measure

from ckpt.chains.append import folder_name
from ckpt.chains.write import DeltaPolicy, write_base, write_delta
from ckpt.pipeline import Execution
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member

COMMANDS = {"verify": ["verify"], "compact": ["compact", "--keep", "every:5"]}


def grow(run: Path, gb: float, length: int) -> None:
    """Write a chain. Each state is encoded against the one before it, which is still in memory."""
    from ckpt_formats.core.checkpoint import Checkpoint

    run.mkdir(parents=True)
    members: list[Member] = []
    earlier: Checkpoint | None = None
    policy, resources = DeltaPolicy(), Execution()
    for step, state in enumerate(states(gb, length), 1):
        held = _copied(state)
        target = run / folder_name(step)
        if earlier is None:
            written = write_base(held, target, step, policy, resources)
        else:
            written = write_delta(held, target, step, earlier, run / members[-1].folder, policy, resources)
        members.append(written.member)
        earlier = held
    (run / chain_file.NAME).write_bytes(chain_file.dump(ChainIndex(tuple(members))))


def _copied(state):
    """The same state in memory of its own, since the optimizer changes that of the run in its place."""
    from ckpt_formats.core.tensor import ArrayBlob, Tensor

    parameters = {
        name: replace(
            parameter,
            states={
                s: Tensor.of(ArrayBlob(tensor.fragments[0].blob.array.copy()))  # type: ignore[attr-defined]
                for s, tensor in parameter.states.items()
            },
        )
        for name, parameter in state.parameters.items()
    }
    return replace(state, parameters=parameters)


def shortened(run: Path, length: int, to: Path) -> Path:
    """The first members of a chain as a chain of their own. Files are linked: none is ever changed in its place."""
    members = chain_file.read(run).members[:length]
    to.mkdir()
    for member in members:
        shutil.copytree(run / member.folder, to / member.folder, copy_function=os.link)
    (to / chain_file.NAME).write_bytes(chain_file.dump(ChainIndex(members)))
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4 * BYTES_EACH / 1e9)
    parser.add_argument("--lengths", type=lambda text: [int(one) for one in text.split(",")], default=[10, 20, 40, 80])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, required=True, help="Where the chain is made, and found by a later run.")
    given = parser.parse_args()
    run = given.keep / "run"
    if not (run / chain_file.NAME).exists():
        shutil.rmtree(run, ignore_errors=True)
        grow(run, given.gb, max(given.lengths))
    cpu: dict[tuple[str, int], list[float]] = {}
    for _ in range(given.rounds):
        for length in given.lengths:
            for name, command in COMMANDS.items():
                with tempfile.TemporaryDirectory(dir=given.keep) as scratch:
                    chain = shortened(run, length, Path(scratch) / "run")
                    took = measure([*CKPT, command[0], str(chain), *command[1:]])
                cpu.setdefault((name, length), []).append(took.cpu)
                print(f"{name} {length}: {took.cpu:.2f} CPU s, {took.process / 1e6:.0f} MB", file=sys.stderr)
    print("| command | members | CPU s | by the line | twice the members |\n| --- | --- | --- | --- | --- |")
    for name in COMMANDS:
        of_length = {length: median(cpu[name, length]) for length in given.lengths}
        slope, start = np.polyfit(given.lengths, [of_length[length] for length in given.lengths], 1)
        for length, seconds in of_length.items():
            half = of_length.get(length // 2)
            ratio = "" if half is None else f"{seconds / half:.2f}"
            print(f"| {name} | {length} | {seconds:.2f} | {start + slope * length:.2f} | {ratio} |")
        print(f"{name}: {start:.2f} s and {slope * 1e3:.0f} ms for each member", file=sys.stderr)


if __name__ == "__main__":
    main()
