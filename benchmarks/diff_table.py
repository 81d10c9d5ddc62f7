"""Compare several checkpoints with one: `python benchmarks/diff_table.py --others 4 --mb 200`.

`ckpt diff A B C ... --csv` reads the first once; the same pairs one by one read it each time. Both as commands, with
the processor seconds and the wall time of each.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import ckpt

COMMAND = [sys.executable, "-m", "ckpt_cli", "diff", "-q"]


def measured(commands: list[list[str]]) -> str:
    """Run commands one after another, and say what all of them took. Raises `AssertionError` if one fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    for command in commands:
        assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 1  # they differ
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{seconds:6.2f} CPU s {wall:6.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--others", type=int, default=4)
    parser.add_argument("--mb", type=int, default=200)
    options = parser.parse_args()
    rng, count = np.random.default_rng(0), options.mb // 4
    with tempfile.TemporaryDirectory() as folder:
        weights = {f"layers.{i}.w": rng.standard_normal(1_000_000, np.float32) for i in range(count)}
        paths = [os.fspath(Path(folder) / f"{number}.safetensors") for number in range(options.others + 1)]
        for number, path in enumerate(paths):
            moved = {name: values + np.float32(1e-3 * number) for name, values in weights.items()}
            ckpt.save(ckpt.from_state_dict(moved), path)
        del weights, moved
        table = [*COMMAND, *paths, "--csv", os.fspath(Path(folder) / "table.csv")]
        print("one table    ", measured([table]))
        print("pair by pair ", measured([[*COMMAND, paths[0], other, "--json"] for other in paths[1:]]))


if __name__ == "__main__":
    main()
