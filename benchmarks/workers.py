"""One, two and more worker processes of Dask: `python benchmarks/workers.py --gigabytes 1 --rounds 3`.

DeepSpeed's ZeRO-1 state (`big_zero.py`) is converted to universal packs by the threads of one process, by one worker of
Dask and by two, each with one thread. The workers are on this machine, so they share its cores, its disk and its
memory: there can be no speed-up beyond its cores. `--json FILE` adds the times to the figures that `scale.py --check`
reads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measure import in_turn, medians, size

HERE = Path(__file__).resolve().parent
CKPT = [sys.executable, "-m", "ckpt_cli"]
PORT = 18786


@contextmanager
def dask(workers: int, port: int, folder: Path) -> Iterator[str]:
    """The URL of a scheduler with so many workers of one thread."""
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", str(port), "--no-dashboard"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", f"tcp://127.0.0.1:{port}", "--nthreads", "1"]
    worker += ["--nworkers", str(workers), "--no-dashboard", "--local-directory", str(folder)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen(dask, **quiet)]
    try:
        time.sleep(3)
        processes.append(subprocess.Popen(worker, **quiet))
        time.sleep(5)
        yield f"dask://127.0.0.1:{port}"
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="figures of `stores.py --json`, to which the times are added")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source, out = folder / "zero", folder / "out"
        out.mkdir()
        command = [sys.executable, str(HERE / "big_zero.py"), str(source), "--gigabytes", str(options.gigabytes)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        convert = [*CKPT, "convert", str(source), str(out / "target"), "--pack-size", "16M"]
        with dask(1, PORT, folder) as one, dask(2, PORT + 1, folder) as two:
            programs = {
                "1 thread": [*convert, "--workers", "1"],
                "2 threads": [*convert, "--workers", "2"],
                "1 worker": [*convert, "--executor", one],
                "2 workers": [*convert, "--executor", two],
            }
            runs, _ = in_turn(programs, options.rounds, out, {})
        nbytes, walls = size(source), {name: medians(several).wall for name, several in runs.items()}
        print(f"{nbytes / 1e9:.2f} GB, {options.rounds} rounds; medians")
        for name, wall in walls.items():
            kind = name.split()[1].rstrip("s")
            times = walls[f"1 {kind}"] / wall
            print(f"{name:12}{wall:7.2f} s {nbytes / 1e6 / wall:6.0f} MB/s {times:5.2f} times as fast as 1")
        if options.json is not None:
            figures = json.loads(options.json.read_text())
            figures["workers"] = {"1": walls["1 worker"], "2": walls["2 workers"]}
            options.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
