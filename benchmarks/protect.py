"""How fast parity is computed and files are repaired: `python benchmarks/protect.py [--folder FOLDER] [--mib 64]`.

First the kernel on blocks in memory, one core, beside ISA-L as `pyeclib` has it (if it is installed); then `protect`
and `repair` of files in FOLDER, by CPU seconds and by the clock; with `--convert CHECKPOINT`, also `convert` with
`--protect 2` and without, in turn. Rates are of data, of 8 blocks or files with 2 parities.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

import ckpt
from ckpt_codecs.base import Array
from ckpt_codecs.native.parity import add_products, has_gfni
from ckpt_formats.parity.code import parity_matrix, recovery_matrix

DATA, PARITIES, ROUNDS = 8, 2, 7
CKPT = str(Path(sys.executable).with_name("ckpt"))


def fastest(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest of some rounds."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def add_each(matrix: Array, stripes: list[Array], sums: Array, gfni: bool) -> None:
    """Call the kernel for each stripe."""
    for one in stripes:
        add_products(matrix, one, sums, gfni)


def kernels(mib: int) -> None:
    """Encode, and compute two blocks of data that are lost, in memory."""
    nbytes = mib << 20
    blocks = np.random.default_rng(0).integers(0, 256, (DATA, nbytes // DATA), np.uint8)
    encode, repair = parity_matrix(DATA, PARITIES), recovery_matrix(DATA, PARITIES, range(2, DATA + 2), (0, 1))
    sums = np.zeros((PARITIES, 1 << 20), np.uint8)
    stripes = [np.ascontiguousarray(blocks[:, at : at + (1 << 20)]) for at in range(0, blocks.shape[1], 1 << 20)]
    for name, matrix in (("encode", encode), ("repair", repair)):
        for gfni in (False, True) if has_gfni() else (False,):
            seconds = fastest(partial(add_each, matrix, stripes, sums, gfni))
            print(f"{name}, kernel{', GFNI' if gfni else ''}: {nbytes / seconds / 1e9:.1f} GB/s")
    try:
        from pyeclib.ec_iface import ECDriver
    except ImportError:
        return
    isa_l, data = ECDriver(k=DATA, m=PARITIES, ec_type="isa_l_rs_cauchy"), blocks.tobytes()
    fragments = isa_l.encode(data)
    print(f"encode, pyeclib: {nbytes / fastest(lambda: isa_l.encode(data)) / 1e9:.1f} GB/s")
    print(f"repair, pyeclib: {nbytes / fastest(lambda: isa_l.decode(fragments[2:])) / 1e9:.1f} GB/s")


def files(folder: Path, mib: int) -> None:
    """Protect 8 files, compare them with their hashes, and repair two that are lost; one thread, then two."""
    root = folder / "files"
    root.mkdir()
    for number in range(DATA):
        (root / f"rank-{number}").write_bytes(np.random.default_rng(number).bytes((mib << 20) // DATA))
    for workers in (1, 2):
        resources = ckpt.Resources(workers=workers)

        def timed(name: str, work: Callable[[], object], workers: int = workers) -> None:
            cpu, clock = time.process_time(), time.monotonic()
            work()
            cpu, clock = time.process_time() - cpu, time.monotonic() - clock
            rates = f"{(mib << 20) / cpu / 1e9:.1f} GB/s a core, {(mib << 20) / clock / 1e9:.1f} by the clock"
            print(f"{name}, {mib} MiB, threads: {workers}: {rates}")

        def protect(resources: ckpt.Resources = resources) -> None:
            shutil.rmtree(root / ".ckpt-parity", ignore_errors=True)
            ckpt.protect(root, PARITIES, resources=resources)

        timed("protect", protect)
        timed("compare", lambda resources=resources: ckpt.repair(root, dry_run=True, resources=resources))
        for number in (0, 1):
            (root / f"rank-{number}").unlink()
        timed("repair of 2 of 8", lambda resources=resources: ckpt.repair(root, resources=resources))
    done = ckpt.protect(root, PARITIES, overwrite=True)
    share = done.manifest_nbytes / done.nbytes
    print(f"parity: {done.parity_nbytes / done.nbytes:.4f} of the data; all copies of the manifest: {share:.6%}")


def converting(source: Path, folder: Path, rounds: int = 3) -> None:
    """Convert a checkpoint with parity and without, in turn: CPU and clock."""
    seconds: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    for _ in range(rounds):
        for name, more in (("without", []), ("with", ["--protect", "2"])):
            target = folder / "converted"
            shutil.rmtree(target, ignore_errors=True)
            before, clock = os.times(), time.monotonic()
            subprocess.run([CKPT, "convert", source, target, *more], check=True, capture_output=True)
            after, clock = os.times(), time.monotonic() - clock
            cpu = after.children_user + after.children_system - before.children_user - before.children_system
            seconds[name].append((cpu, clock))
    for name, own in seconds.items():
        cpu, clock = (median(column) for column in zip(*own, strict=True))
        print(f"convert {name} parity: {cpu:.2f} CPU seconds, {clock:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where files are written")
    parser.add_argument("--mib", type=int, default=64, help="data of the kernels, and a quarter of that of the files")
    parser.add_argument("--convert", type=Path, metavar="CHECKPOINT", help="convert this one, with parity and without")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        kernels(given.mib)
        files(Path(name), 4 * given.mib)
        if given.convert:
            converting(given.convert, Path(name))


if __name__ == "__main__":
    main()
