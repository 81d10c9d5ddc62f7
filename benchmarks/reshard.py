"""Reshard Megatron's checkpoints, optimizer and all: `python benchmarks/reshard.py --gigabytes 1 4 --rounds 3`.

Real Megatron core trains and saves a Llama at tp 2 x pp 2 in both layouts (`big_megatron.py`); they are written again
for tp 4 and for pp 4. All programs read through a warm page cache, in turn; outputs are removed, and what the last one
left is flushed, outside the timed part. Figures are medians; ratios are to `cp` of the same input. Ours checks each
checksum of what it reads, and returns when its output is on the disk: so `cp` is also given with an fsync of each file.

Beside it Megatron itself: as many processes as ranks load the `torch_dist` checkpoint at the new degrees and save it.
Its converter drops the optimizer, and its loader for Megatron core has not run since 0.15. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from beside import Program, copying, table
from measure import in_turn, measure, size, warm

HERE = Path(__file__).resolve().parent
CKPT = [sys.executable, "-m", "ckpt_cli"]
BIG = [sys.executable, str(HERE / "big_megatron.py")]
LAYOUTS = {"dist": "torch_dist", "legacy": "legacy"}
INSTALLED = {"PYTHONDONTWRITEBYTECODE": ""}
"""A program that is installed has its byte code: let it be kept."""
DEGREES = {"tp4": ["--tp", "4", "--pp", "1"], "tp1pp4": ["--tp", "1", "--pp", "4"]}


def programs(inputs: Path, out: Path, gigabytes: float) -> dict[str, Program]:
    """Every program by name; each writes something at `out`."""
    listed: dict[str, Program] = {}
    for folder, layout in LAYOUTS.items():
        source = inputs / folder
        listed |= copying(f"cp, {layout}", source, str(out))
        for name, degrees in DEGREES.items():
            ours = [*CKPT, "reshard", str(source), str(out), *degrees]
            listed[f"ckpt: {layout} to {name}"] = Program(ours, f"cp, {layout}")
    for name, degrees in DEGREES.items():
        theirs = [*BIG, "reshard", str(inputs / "dist"), str(out), f"--gigabytes={gigabytes}", *degrees]
        listed[f"Megatron: torch_dist to {name}"] = Program(theirs, "cp, torch_dist")
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="programs whose names hold TEXT")
    parser.add_argument("--scratch", type=Path, help="where everything goes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all runs, for programs")
    options = parser.parse_args()
    report = []
    for gigabytes in options.gigabytes:
        with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=options.scratch) as folder:
            inputs, scratch = Path(folder) / "made", Path(folder) / "scratch"
            scratch.mkdir()
            measure([*BIG, "make", str(inputs), f"--gigabytes={gigabytes}", "--tp=2", "--pp=2"])
            listed = programs(inputs, scratch / "out", gigabytes)
            wanted = {
                name: program.command
                for name, program in listed.items()
                if name.startswith("cp") or not options.only or any(text in name for text in options.only)
            }
            measure([*CKPT, "--help"], INSTALLED)
            warm(inputs)
            measurements, sizes = in_turn(wanted, options.rounds, scratch, INSTALLED)
            title = f"{size(inputs / 'dist') / 1e6:.0f} MB, {options.rounds} rounds"
            print(f"{title}\n{table(listed, measurements, sizes)}\n", flush=True)
            runs = {
                name: {"output": sizes[name], "runs": list(map(asdict, done))} for name, done in measurements.items()
            }
            report.append({"source": title, "programs": runs})
            shutil.rmtree(inputs)
    if options.json:
        machine = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({"machine": machine, "checkpoints": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
