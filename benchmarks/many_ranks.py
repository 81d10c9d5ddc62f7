"""The index of a ZeRO-3 checkpoint of many ranks: `python benchmarks/many_ranks.py --ranks 64 --parameters 10000`.

Two indexes, each in a fresh process. "files": small tensors in real files, which ckpt writes before (a minute for each
64 ranks of 10,000 parameters). "slices": only the slices, in files that do not exist; `--only-slices` where there are
too many ranks to write. Printed are CPU seconds (user and system) to open, to check that nothing is missing, and to
pickle; memory beyond that of the interpreter; and the bytes of the pickle, which is what a worker gets once.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATES = ("master", "exp_avg", "exp_avg_sq")
SHAPE = (16, 8)


def write(folder: Path, ranks: int, parameters: int) -> Path:
    """A checkpoint that ckpt writes, of tensors of `SHAPE`."""
    import numpy as np

    from ckpt.job import save
    from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin, Parameter
    from ckpt_formats.core.tensor import ArrayBlob, Tensor
    from ckpt_formats.registry import format_named

    index = {}
    for number in range(parameters):
        name = f"layers.{number}.weight"
        states = {state: Tensor.of(ArrayBlob(np.full(SHAPE, number, np.float32))) for state in STATES}
        index[name] = Parameter(name, "parameter", states, {"step": 7})
    group = Group({"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}, tuple(index))
    source = Checkpoint(
        path=Path("/nowhere"),
        origin=Origin("deepspeed", "0.19.8", 7, {"zero_stage": 3}),
        parameters=index,
        groups=(group,),
    )
    save(source, folder / "zero3", type(format_named("deepspeed"))(dp=ranks, zero=3))  # type: ignore[call-arg]
    return folder / "zero3"


def slices(ranks: int, parameters: int) -> Any:
    """The index of a checkpoint of which there are no files: tensors of (4096, 1024), as the reader makes them."""
    from ckpt_formats.core.checkpoint import Checkpoint, Origin, Parameter
    from ckpt_formats.core.dtypes import DTYPES
    from ckpt_formats.core.seals import Seal
    from ckpt_formats.core.tensor import FileBlob
    from ckpt_formats.engines.deepspeed.flat_partitions import chunk
    from ckpt_formats.engines.deepspeed.zero3 import even_tensor

    shape, float32 = (4096, 1024), DTYPES["float32"]
    size = chunk(shape[0] * shape[1], ranks)
    vectors = {}
    for at, state in enumerate(STATES):
        files = [Path(f"/nowhere/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in range(ranks)]
        nbytes = 4 * size * parameters
        seals = [Seal(file, 4096 + at * nbytes, nbytes, "crc32", 1, f"archive/data/{at}") for file in files]
        vectors[state] = tuple(
            FileBlob.packed(seal.path, seal.offset, (size * parameters,), float32, seal) for seal in seals
        )
    index = {}
    for number in range(parameters):
        states = {state: even_tensor(shape, vectors[state], number * size, size) for state in STATES}
        index[f"layers.{number}.weight"] = Parameter(f"layers.{number}.weight", "parameter", states, {"step": 7})
    return Checkpoint(path=Path("/nowhere"), origin=Origin("deepspeed"), parameters=index)


def measure(make: Callable[[], Any]) -> None:
    """Print the figures of an index as JSON."""
    from ckpt.pipeline import check_complete

    before, seconds = memory(), cpu()
    source = make()
    figures = {"open": cpu() - seconds}
    gc.collect()
    figures["MB"] = memory() - before
    seconds = cpu()
    check_complete(source)
    figures["check"], seconds = cpu() - seconds, cpu()
    figures["pickle"] = len(pickle.dumps(source, 5)) / 1e6
    figures["pickling"] = cpu() - seconds
    print(json.dumps(figures))


def memory() -> float:
    """MB that the process has now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--parameters", type=int, default=10000)
    parser.add_argument("--only-slices", action="store_true")
    parser.add_argument("--one", metavar="CHECKPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        import ckpt

        in_memory = options.one == "-"
        measure(lambda: slices(options.ranks, options.parameters) if in_memory else ckpt.open(options.one))
        return
    with tempfile.TemporaryDirectory() as folder:
        cases = {"slices": "-"}
        if not options.only_slices:
            cases["files"] = str(write(Path(folder), options.ranks, options.parameters))
        print(f"{options.ranks} ranks, {options.parameters:,} parameters of {len(STATES)} states; CPU seconds")
        for name, place in cases.items():
            arguments = ["--ranks", str(options.ranks), "--parameters", str(options.parameters), "--one", place]
            done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
            print(name, ", ".join(f"{key} {value:.2f}" for key, value in json.loads(done.stdout).items()), flush=True)


if __name__ == "__main__":
    main()
