"""Convert ZeRO checkpoints by several programs in turn: `python benchmarks/convert.py --rounds 5 --json FILE`.

Without --source, checkpoints of about 1 and 4 GB are made of ZeRO stages 1 and 3 by real DeepSpeed (`big_zero.py`).
All programs read through a warm page cache, in turn (A B C, B C A, C A B, ...); outputs are removed, and what the
last one left is flushed, outside the timed part. Figures are medians; ratios are to `ckpt convert`, which returns
when its output is on the disk: so `cp` is also given with an fsync of every file. Nothing is asserted: see
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from measure import Run, in_turn, medians, size, warm

HERE = Path(__file__).resolve().parent
CKPT = [sys.executable, "-m", "ckpt_cli"]
UNIVERSAL = "deepspeed.checkpoint.ds_to_universal"
COPY_AND_FSYNC = 'cp -r "$1" "$2" && find "$2" -exec sync {} +'
WEIGHTS_BY_DEEPSPEED = (
    "import sys; from pathlib import Path; from deepspeed.utils import zero_to_fp32; step = Path(sys.argv[1]);"
    " zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict("
    "str(step.parent), sys.argv[2], max_shard_size=None, tag=step.name)"
)
OURS = "ckpt convert"
OUR_WEIGHTS = "ckpt convert --model-only"
OUR_RESHARD = "ckpt reshard, ZeRO-3 dp 4"
QUIET = {"DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}


def commands(source: Path, out: Path) -> dict[str, list[str]]:
    """Every program by name; each writes something at `out`."""

    def universal(workers: int) -> list[str]:
        counts = [f"--num_extract_workers={workers}", f"--num_merge_workers={workers}"]
        folders = [f"--input_folder={source}", f"--output_folder={out}"]
        return [sys.executable, "-m", UNIVERSAL, *folders, *counts, "--inject_missing_state"]

    return {
        OURS: [*CKPT, "convert", str(source), str(out)],
        OUR_RESHARD: [*CKPT, "reshard", str(source), str(out), "--dp", "4", "--zero", "3"],
        "cp -r": ["cp", "-r", str(source), str(out)],
        "cp -r and fsync": ["bash", "-c", COPY_AND_FSYNC, "-", str(source), str(out)],
        "ds_to_universal, 1 worker": universal(1),
        "ds_to_universal, 2 workers": universal(2),
        OUR_WEIGHTS: [*CKPT, "convert", str(source), str(out), "--to", "torch", "--model-only", "--dtype", "fp32"],
        "zero_to_fp32": [sys.executable, "-c", WEIGHTS_BY_DEEPSPEED, str(source), str(out)],
        "import of DeepSpeed alone": [sys.executable, "-c", f"import {UNIVERSAL}"],
    }


def compare(source: Path, rounds: int, only: list[str], scratch: Path) -> tuple[dict[str, list[Run]], dict[str, int]]:
    """All runs of every program, and the size of what each wrote."""
    warm(source)
    programs = {name: command for name, command in commands(source, scratch / "out").items() if matches(name, only)}
    return in_turn(programs, rounds, scratch, QUIET)


def matches(name: str, only: list[str]) -> bool:
    return not only or any(part in name for part in only)


def table(runs_by_name: dict[str, list[Run]], sizes: dict[str, int]) -> str:
    """Medians, and ratios to the program of ours that does the same."""
    middle = {name: medians(runs) for name, runs in runs_by_name.items()}
    head = f"{'':28}{'wall s':>8}{'x ours':>7}{'best s':>8}{'CPU s':>8}{'x ours':>7}{'tree MB':>9}{'process MB':>12}"
    rows = [f"{head}{'written MB':>12}{'output MB':>11}"]
    for name, run in middle.items():
        ours = middle.get(OUR_WEIGHTS if name in (OUR_WEIGHTS, "zero_to_fp32") else OURS)
        wall, cpu = (f"{getattr(run, key) / getattr(ours, key):.2f}" if ours else "" for key in ("wall", "cpu"))
        best = min(one.wall for one in runs_by_name[name])
        rows.append(
            f"{name:28}{run.wall:8.2f}{wall:>7}{best:8.2f}{run.cpu:8.2f}{cpu:>7}"
            f"{run.tree / 1e6:9.0f}{run.process / 1e6:12.0f}{run.written / 1e6:12.0f}{sizes[name] / 1e6:11.0f}"
        )
    return "\n".join(rows)


def make(gigabytes: int, stage: int, folder: Path) -> Path:
    """A checkpoint by real DeepSpeed, on two data-parallel ranks."""
    out = folder / f"zero{stage}-{gigabytes}g"
    command = [sys.executable, str(HERE / "big_zero.py"), str(out), f"--gigabytes={gigabytes}", f"--stage={stage}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Path(json.loads(done.stdout[done.stdout.index("{") :])["checkpoint"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, action="append", help="the folder of one step; may be given again")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="programs whose names hold TEXT")
    parser.add_argument("--scratch", type=Path, help="where outputs go; on the disk of the sources by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all runs, for programs")
    options = parser.parse_args()
    report = []
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=options.scratch) as folder:
        inputs = Path(folder)
        wanted = options.source or [(gigabytes, stage) for gigabytes in (1, 4) for stage in (1, 3)]
        for one in wanted:
            source = one.resolve() if isinstance(one, Path) else make(*one, inputs)
            scratch = Path(tempfile.mkdtemp(dir=folder if options.scratch else source.parent.parent, prefix="bench-"))
            try:
                measurements, sizes = compare(source, options.rounds, options.only, scratch)
            finally:
                shutil.rmtree(scratch)
            title = f"{source.parent.name}/{source.name}, {size(source) / 1e6:.0f} MB"
            print(f"{title}, {options.rounds} rounds\n{table(measurements, sizes)}\n", flush=True)
            runs = {
                name: {"output": sizes[name], "runs": list(map(asdict, done))} for name, done in measurements.items()
            }
            report.append({"source": title, "programs": runs})
            if not isinstance(one, Path):
                shutil.rmtree(source.parent)
    if options.json:
        machine = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({"machine": machine, "checkpoints": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
