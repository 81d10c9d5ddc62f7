"""Open a 2 GB file of torch.save without reading its tensors: `python benchmarks/opening.py --rounds 5`.

Compares our `open_file` with `torch.load(mmap=True, weights_only=True)`, each in a fresh process whose imports are
done. The file holds 2,000 tensors of zeros, so that it can be sparse: a reader of headers cannot tell.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

TENSORS = 2000
OPEN = """
import json, sys, time
from pathlib import Path
{imports}

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

before, began = status("VmRSS"), time.perf_counter()
opened = {call}
seconds = time.perf_counter() - began
print(json.dumps([seconds * 1e3, (status("VmHWM") - before) / 1e6, status("VmHWM") / 1e6]))
"""
READERS = {
    "ckpt, open_file": OPEN.format(
        imports="from ckpt_formats.containers.torchfile import open_file", call="open_file(Path(sys.argv[1]))"
    ),
    "ckpt, open_checkpoint": OPEN.format(
        imports="from ckpt_formats.registry import *\n[*map(format_named, FORMATS)]",
        call="open_checkpoint(Path(sys.argv[1]))",
    ),
    "torch.load(mmap=True)": OPEN.format(
        imports="import torch", call="torch.load(sys.argv[1], mmap=True, weights_only=True)"
    ),
}


def write(path: Path, nbytes: int) -> None:
    """A state dict of zeros by our own writer, which streams; runs of zeros are left as holes."""
    import numpy as np

    from ckpt_formats.containers.torchfile import layout_file
    from ckpt_formats.core.tensor import ArrayBlob, Tensor

    zeros = np.zeros(nbytes // TENSORS // 4, np.float32)
    tree = {f"layers.{i // 10}.weight{i % 10}": Tensor.of(ArrayBlob(zeros)) for i in range(TENSORS)}
    data = zeros.view(np.uint8).data
    with path.open("wb") as file:
        for piece in layout_file(tree, "archive").stream(lambda tensor: iter([data])):
            if piece is data:
                file.seek(len(data), 1)
            else:
                file.write(piece)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    measurements: dict[str, list[list[float]]] = {name: [] for name in READERS}
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as folder:
        path = Path(folder) / "big.pt"
        write(path, int(options.gigabytes * 1e9))
        for _ in range(options.rounds):
            for name, program in READERS.items():
                command = [sys.executable, "-c", program, str(path)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                measurements[name].append(json.loads(done.stdout))
        print(f"a file of {path.stat().st_size:,} bytes with {TENSORS:,} tensors, {options.rounds} rounds")
    print(f"{'':28}{'ms':>8}{'grew by MB':>12}{'peak MB, imports and all':>26}")
    for name, runs in measurements.items():
        milliseconds, grew, peak = (median(column) for column in zip(*runs, strict=True))
        print(f"{name:28}{milliseconds:8.1f}{grew:12.1f}{peak:26.1f}")
    if options.json:
        options.json.write_text(json.dumps(measurements, indent=1) + "\n")


if __name__ == "__main__":
    main()
