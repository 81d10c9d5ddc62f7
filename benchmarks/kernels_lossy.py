"""Lossy deltas by this version and by an older one, in turn, in one process: `kernels_lossy.py --against FOLDER`.

FOLDER holds the older package: `git worktree add /tmp/older COMMIT` and `--against /tmp/older/codecs`. It is imported
under another name. Versions before the kernels in C need Numba, and compile for a minute before the first chunk.

Each round codes a chunk of 2^18 values with one version, then with the other, the one first that was second in the
round before. A ratio is the median of the rounds' ratios: above 1 this version is faster. Times are CPU times of the
thread, since others may be at work on this machine. Before, both versions must write the same bytes and read the same
states.
"""

import argparse
import importlib
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from lossy import flat, moved

from ckpt_codecs.delta import StatePair

OLDER = "older_codecs"
SHAPE = (1024, 256)


def import_older(folder: Path, room: Path) -> ModuleType:
    """The lossy codecs of the package `ckpt_codecs` in a folder, copied to another and named OLDER."""
    shutil.copytree(folder / "ckpt_codecs", room / OLDER, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (room / OLDER).rglob("*.py"):
        path.write_text(path.read_text().replace("ckpt_codecs", OLDER))
    sys.path.insert(0, str(room))
    return importlib.import_module(f"{OLDER}.lossy")


def cases() -> Iterator[tuple[str, StatePair, dict[str, Any]]]:
    """What is coded, by name, with the settings of the codec."""
    usual = moved(SHAPE)
    for step in (1.0, 2.0, 4.0):
        yield f"step {step:g}", usual, {"step_size": step}
    yield "no basis", usual, {"rank": 0}
    yield "anchor", StatePair({}, usual.after), {}
    yield "flat", flat(usual), {}
    yield "512 x 512", moved((512, 512)), {}
    yield "256 x 1024", moved((256, 1024)), {}


def spent(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def rounds_of(new: Callable[[], object], old: Callable[[], object], rounds: int) -> np.ndarray[Any, Any]:
    """Seconds of the new and of the old, round by round."""
    measurements = np.empty((rounds, 2))
    for i in range(rounds):
        for which in (0, 1) if i % 2 else (1, 0):
            measurements[i, which] = spent((new, old)[which])
    return measurements


def lines(new: ModuleType, old: ModuleType, rounds: int) -> Iterator[str]:
    sums = np.zeros((2, rounds, 2))
    for name, change, settings in cases():
        shape, form = change.after["fp32"].shape, {n: a.dtype for n, a in change.after.items()}
        size = sum(a.nbytes for a in change.after.values()) / 1e6
        codecs = [module.Subspace(**settings) for module in (new, old)]
        data = [codec.encode(change) for codec in codecs]
        assert data[0] == data[1], "the versions write other bytes"
        states = [codec.decode(data[0], change.before, shape, form) for codec in codecs]
        assert all(states[0][n].tobytes() == states[1][n].tobytes() for n in form), "other states came back"

        def encoder(codec: Any, change: StatePair = change) -> Callable[[], object]:
            return lambda: codec.encode(change)

        def decoder(codec: Any, data: bytes = data[0], change: StatePair = change) -> Callable[[], object]:
            shape, form = change.after["fp32"].shape, {n: a.dtype for n, a in change.after.items()}
            return lambda: codec.decode(data, change.before, shape, form)

        cells = [f"{name:12}"]
        for way, (what, make) in enumerate((("encode", encoder), ("decode", decoder))):
            measured = rounds_of(make(codecs[0]), make(codecs[1]), rounds)
            sums[way] += measured
            speed = size / np.median(measured[:, 0])
            cells.append(f"{what} x{np.median(measured[:, 1] / measured[:, 0]):.2f} ({speed:.0f} MB/s)")
        yield "  ".join(cells)
    totals = np.median(sums[:, :, 1] / sums[:, :, 0], axis=1)
    yield f"{'all':12}  encode x{totals[0]:.2f}  decode x{totals[1]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, required=True, help="the folder with the older package")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    print(f"{platform.platform()}, {platform.processor() or platform.machine()}, Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory() as room:
        old = import_older(given.against, Path(room))
        for line in lines(importlib.import_module("ckpt_codecs.lossy"), old, given.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
