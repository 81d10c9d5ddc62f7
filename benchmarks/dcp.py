"""Handle a checkpoint of PyTorch's FSDP2 by several programs in turn: `python benchmarks/dcp.py --size 300 --rounds 3`.

Real FSDP2 at world 4 saves a model of `--size` million parameters with Adam (`big_dcp.py`), 12 bytes each. All programs
read through a warm page cache, in turn; outputs are removed, and what the last one left is flushed, outside the timed
part. Figures are medians; each ratio is to `cp` of the same input, or, of the weights alone, to `cp` of as many bytes.
Ours checks every checksum of what it reads, and returns when its output is on the disk: so `cp` is also given with an
fsync of every file. Nothing is asserted.

A second table opens a `.metadata` of 250,000 chunks, by ours and by pickle.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median

from beside import Program, copying, table
from measure import in_turn, measure, size, warm
from opening import OPEN

HERE = Path(__file__).resolve().parent
CKPT = [sys.executable, "-m", "ckpt_cli"]
BIG = [sys.executable, str(HERE / "big_dcp.py")]
BY_TORCH = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils"]
ONLINE = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(HERE / "big_dcp.py")]
QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
WHOLE, FILE, WEIGHTS = "cp, DCP", "cp, torch file", "cp, weights"
METADATA = {
    "ckpt, read_metadata": OPEN.format(
        imports="from ckpt_formats.engines.dcp.metadata import read_metadata", call="read_metadata(Path(sys.argv[1]))"
    ),
    "pickle.load": OPEN.format(
        imports="import pickle, torch.distributed.checkpoint", call="pickle.load(open(sys.argv[1], 'rb'))"
    ),
}


def programs(source: Path, file: Path, weights: Path, out: Path, millions: float) -> dict[str, Program]:
    """Every program by name; each writes something at `out`, given without an end."""

    def ours(command: str, read: Path, suffix: str, *options: str) -> list[str]:
        return [*CKPT, command, str(read), f"{out}{suffix}", *options]

    rank_by_rank = [*ONLINE, "reshard", str(source), str(out), f"--millions={millions}"]
    copies: dict[str, Program] = {}
    for name, path, suffix in ((WHOLE, source, ""), (FILE, file, ".pt"), (WEIGHTS, weights, ".safetensors")):
        copies |= copying(name, path, f"{out}{suffix}")
    return {
        **copies,
        "ckpt: DCP to torch": Program(ours("convert", source, ".pt", "--to", "torch"), WHOLE),
        "dcp_to_torch": Program([*BY_TORCH, "dcp_to_torch", str(source), f"{out}.pt"], WHOLE),
        "ckpt: DCP to universal": Program(ours("convert", source, ""), WHOLE),
        "ckpt: DCP 4 to 2": Program(ours("reshard", source, "", "--dp", "2"), WHOLE),
        "torchrun: DCP 4 to 2": Program(rank_by_rank, WHOLE),
        "ckpt: torch to DCP": Program(ours("convert", file, "", "--to", "dcp"), FILE),
        "torch_to_dcp": Program([*BY_TORCH, "torch_to_dcp", str(file), str(out)], FILE),
        "ckpt: weights to HF": Program(ours("convert", source, "", "--to", "hf", "--model-only"), WEIGHTS),
        "torch: weights to HF": Program([*BIG, "weights", str(source), str(out)], WEIGHTS),
        "import of torch's DCP alone": Program([sys.executable, "-c", "import torch.distributed.checkpoint"], WHOLE),
    }


def opening(folder: Path, rounds: int) -> dict[str, list[list[float]]]:
    """Milliseconds, growth and peak in megabytes of each reader of a large `.metadata`, in fresh processes."""
    measure([*BIG, "metadata", str(folder / "metadata")], QUIET)
    path = folder / "metadata" / ".metadata"
    measurements: dict[str, list[list[float]]] = {name: [] for name in METADATA}
    for _ in range(rounds):
        for name, program in METADATA.items():
            done = subprocess.run(
                [sys.executable, "-c", program, str(path)], check=True, capture_output=True, text=True
            )
            measurements[name].append(json.loads(done.stdout))
    print(f"a .metadata of 250,000 chunks, {path.stat().st_size:,} bytes, {rounds} rounds")
    print(f"{'':28}{'s':>8}{'grew by MB':>12}{'peak MB, imports and all':>26}")
    for name, runs in measurements.items():
        milliseconds, grew, peak = (median(column) for column in zip(*runs, strict=True))
        print(f"{name:28}{milliseconds / 1e3:8.2f}{grew:12.0f}{peak:26.0f}")
    return measurements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=20, metavar="MILLIONS", help="parameters; 300 makes 3.6 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="programs whose names hold TEXT")
    parser.add_argument(
        "--scratch", type=Path, help="where everything goes; the default for temporary files if not given"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all runs, for programs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=options.scratch) as temporary:
        folder = Path(temporary)
        source, file, weights = folder / "dcp", folder / "all.pt", folder / "weights.safetensors"
        scratch = folder / "scratch"
        scratch.mkdir()
        trained = measure([*BIG, "make", str(source), f"--millions={options.size}"], QUIET)
        print(f"FSDP2 at world 4 made it in {trained.wall:.0f} s", file=sys.stderr)
        measure([*CKPT, "convert", str(source), str(file), "--to", "torch"])
        measure([*CKPT, "convert", str(source), str(folder / "hf"), "--to", "hf", "--model-only"])
        next((folder / "hf").rglob("*.safetensors")).rename(weights)
        listed = programs(source, file, weights, scratch / "out", options.size)
        wanted = {
            name: program.command
            for name, program in listed.items()
            if name.startswith("cp") or not options.only or any(text in name for text in options.only)
        }
        warm(folder)
        measurements, sizes = in_turn(wanted, options.rounds, scratch, QUIET)
        print(f"{options.size:g} M parameters, {size(source) / 1e6:.0f} MB, {options.rounds} rounds")
        print(f"{table(listed, measurements, sizes)}\n", flush=True)
        opened = opening(folder, options.rounds)
    if options.json:
        machine = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
        runs = {name: {"output": sizes[name], "runs": list(map(asdict, done))} for name, done in measurements.items()}
        report = {"machine": machine, "millions": options.size, "programs": runs, "metadata": opened}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
