"""Commands on a universal checkpoint of very many small states: `python benchmarks/many_states.py`.

The checkpoint is made here, of zeros in a file without blocks on disk, so that making it takes a second. Printed are
CPU seconds (user and system) and peak memory of each command, start included, and the goal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

GOALS = {(80_000, "inspect"): 0.5, (80_000, "verify"): 1.0, (80_000, "diff"): 1.5, (1_000_000, "inspect"): 3.0}
PEAK_MB = {(1_000_000, "inspect"): 300}
SIDE, HEADER = 8, 16 << 20
EACH = 20_000
"""Parameters in a pack: all of them are in its header."""
STATES = ("model", "exp_avg", "exp_avg_sq", "step")


def make(folder: Path, states: int) -> None:
    """Write a checkpoint of `states` / 4 parameters: a weight and two moments of 8 x 8, and a counter."""
    import numpy as np
    import xxhash

    from ckpt_formats.containers.sealed_json import hash_text
    from ckpt_formats.core.checkpoint import Group, Origin
    from ckpt_formats.universal import manifest
    from ckpt_formats.universal.check_index import Pack
    from ckpt_formats.universal.index import TYPES, Index
    from ckpt_formats.universal.tables import Tables

    count = states // 4
    names = [f"layers.{i // 10}.block{i % 10}.weight" for i in range(count)]
    nbytes = np.tile([SIDE * SIDE * 4] * 3 + [4], count)
    zeros = [xxhash.xxh3_128_digest(bytes(n)) for n in (SIDE * SIDE * 4,) * 3 + (4,)]
    columns = {
        "parameter.names": np.frombuffer("".join(names).encode(), "u1"),
        "parameter.ends": np.cumsum([len(name) for name in names]),
        "parameter.role": np.zeros(count),
        "parameter.values": np.zeros(count),
        "state.parameter": np.repeat(np.arange(count), 4),
        "state.name": np.tile(np.arange(4), count),
        "state.pack": np.repeat(np.arange(count) // EACH, 4),
        "state.offset": HEADER + (np.cumsum(nbytes) - nbytes) % (EACH * int(nbytes[:4].sum())),
        "state.nbytes": nbytes,
        "state.rank": np.tile([2, 2, 2, 0], count),
        "state.dims": np.full(6 * count, SIDE),
        "chunk.values": np.tile(np.frombuffer(b"".join(zeros), "u1").reshape(-1, 16), (count, 1)),
    }
    for name in TYPES:
        if name not in columns:
            columns[name] = np.zeros(4 * count if name.startswith("state.") else 0)
    index = Index(
        {name: columns[name].astype(TYPES[name]) for name in TYPES},
        Tables(STATES, ("float32",)),
    )
    group = Group({"lr": 0.001}, tuple(names))
    (folder / "packs").mkdir(parents=True)
    packs = []
    for number, first in enumerate(range(0, count, EACH)):
        own = names[first : first + EACH]
        header, total = _header(own), HEADER + len(own) * int(nbytes[:4].sum())
        packs.append(Pack(total, HEADER, hash_text(xxhash.xxh3_128_intdigest(header))))
        with open(folder / manifest.pack_file(number), "wb") as pack:
            pack.write(header)
            pack.truncate(total)
    document = manifest.Manifest(Origin("torch"), index, tuple(packs), (group,))
    data = index.dump()
    (folder / manifest.INDEX).write_bytes(data)
    (folder / manifest.NAME).write_bytes(manifest.dump(document, data, None))


def _header(names: list[str]) -> bytes:
    """The header of a pack with the states of these parameters."""
    import numpy as np

    from ckpt_formats.containers.safetensors import TensorSlot, header_bytes
    from ckpt_formats.core.state_names import to_stored

    slots, at = [], 0
    for name in names:
        for state in STATES:
            shape = () if state == "step" else (SIDE, SIDE)
            slots.append(TensorSlot(f"{name}/{to_stored(state)}", np.dtype("<f4"), shape, at))
            at += slots[-1].nbytes
    return header_bytes(slots, {"ckpt": "universal 1"}, HEADER)


def measure(*arguments: object) -> tuple[float, float]:
    """The CPU seconds and the peak memory in MB of a command."""
    child = subprocess.Popen(
        [sys.executable, "-m", "ckpt_cli", *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{arguments}: status {status}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, nargs="+", default=[80_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{'states':>9} {'command':<14} {'CPU s':>7} {'goal':>5} {'peak MB':>8} {'goal':>5}")
    for states in options.states:
        folder = Path(tempfile.mkdtemp())
        try:
            child = os.fork()  # the peak memory of a command is at least that of the process that starts it
            if not child:
                make(folder / "first", states)
                make(folder / "second", states)
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                raise SystemExit("the checkpoint could not be made")
            first, second = folder / "first", folder / "second"
            for command in (
                ("inspect", first),
                ("inspect", first, "--json"),
                ("verify", first),
                ("diff", first, second),
            ):
                runs = [measure(*command) for _ in range(options.rounds)]
                label = " ".join(str(part) for part in command if not isinstance(part, Path))
                seconds, peak = sorted(run[0] for run in runs)[len(runs) // 2], max(run[1] for run in runs)
                goal, limit = GOALS.get((states, label), ""), PEAK_MB.get((states, label), "")
                print(f"{states:>9} {label:<14} {seconds:>7.2f} {goal:>5} {peak:>8.0f} {limit:>5}")
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
