"""Load a whole model into the memory of the CPU: `weights.py FOLDER [ROUNDS] [WAY ...]`, each way in a new process.

The model has 519 MB of bfloat16 in 97 tensors, as safetensors, as a plain and as a coded universal file. Reports wall
and CPU seconds from the call until all values are in memory, opening included, and the memory that was added.
"""

import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = {"safetensors": "a.safetensors", "plain": "plain.ucp", "coded": "coded.ucp"}


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5
    if len(sys.argv) == 5 and sys.argv[3] == "--one":
        measure(sys.argv[4], folder)
        return
    make(folder)
    ways = sys.argv[3:] or ["safetensors mapped", "safetensors copied", "readinto"]
    ways += [] if sys.argv[3:] else [f"ckpt {kind} {n}" for kind in FILES for n in (1, 2)] + ["ckpt mapped"]
    results: dict[str, list[list[float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in random.sample(ways, len(ways)):  # what ran before decides which pages the host has at hand
            command = [sys.executable, __file__, str(folder), "1", "--one", way]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results[way].append([float(number) for number in done.stdout.split()])
    print(f"{'':24}{'wall s':>8}{'best':>8}{'CPU s':>8}{'best':>8}{'MB added':>10}")
    for way, rows in results.items():
        wall, cpu, memory = zip(*rows, strict=True)
        middle = statistics.median
        print(f"{way:24}{middle(wall):8.3f}{min(wall):8.3f}{middle(cpu):8.3f}{min(cpu):8.3f}{middle(memory):10.0f}")


def make(folder: Path) -> None:
    """Write the model in all formats, once."""
    if all((folder / name).exists() for name in FILES.values()):
        return
    import torch
    from safetensors.torch import save_file

    import ckpt

    shapes = {"q": (1024, 1024), "up": (4096, 1024), "down": (1024, 4096), "norm": (1024,)}
    layers = {f"layers.{i}.{name}": shape for i in range(24) for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            name: (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
            for name, shape in (layers | {"embed": (32000, 1024)}).items()
        },
        folder / FILES["safetensors"],
    )
    source = ckpt.open(folder / FILES["safetensors"])
    ckpt.save(source, folder / FILES["plain"], ckpt.Universal())
    ckpt.save(source, folder / FILES["coded"], ckpt.Universal(codec="auto"))


def measure(way: str, folder: Path) -> None:
    """Print wall seconds, CPU seconds and the megabytes added by one way."""
    load = way_of(way, folder)
    before, wall, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter(), time.process_time()
    values = load()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(wall, cpu, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000)
    del values


def way_of(way: str, folder: Path) -> Callable[[], Any]:
    """What loads all values; what it needs is imported."""
    path = folder / FILES["safetensors"]
    if way.startswith("safetensors"):
        import torch
        from safetensors.torch import load_file

        torch.set_num_threads(1)
        if way == "safetensors mapped":
            return lambda: load_file(path)
        return lambda: {name: tensor.clone() for name, tensor in load_file(path).items()}
    import numpy as np

    if way == "readinto":
        return lambda: np.fromfile(path, np.uint8)
    import ckpt
    import ckpt.reading

    _, kind, *workers = way.split()

    def weights() -> Any:
        run = ckpt.open(folder / FILES.get(kind, FILES["safetensors"]))
        with ckpt.Reading(run, resources=ckpt.Resources(workers=int(workers[0]) if workers else 1)) as reading:
            values = reading.weights(mmap=kind == "mapped")
            reading.verify()
        return values

    return weights


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
