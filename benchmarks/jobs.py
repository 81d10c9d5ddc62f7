"""Loads into live jobs, beside the engines' own: `jobs.py [PART ...] [--rounds 5] [--json FILE]`.

    ranks      a load of 16,384 ranks and 1,000 parameters, simulated: seconds, and bytes that a rank receives
    inference  a Llama in bf16 into CPU memory, beside other readers: CPU seconds, memory
    loads      FSDP2, ZeRO 3 and a plain model with Adam, 40 M parameters: CPU seconds, memory and bytes of a rank
    plans      what a rank learns and computes when a Saver is constructed, simulated with `--plan-ranks` ranks

All ways of `inference` and `loads` run in turn, in random order, on one thread for each rank, from the page cache;
figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import job_loads
import job_plans
import job_ranks
import job_weights
from forked import ENVIRONMENT

PARTS = ("inference", "loads", "plans", "ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=10, help="pairs of linear layers")
    parser.add_argument("--width", type=int, default=1024, help="a pair has 4 * width ** 2 numbers")
    parser.add_argument("--ranks", type=int, default=1 << 14, help="of the part `ranks`")
    parser.add_argument("--plan-ranks", type=int, default=64, help="of the part `plans`, whose cost grows with them")
    parser.add_argument("--parameters", type=int, default=1000, help="of the parts `ranks` and `plans`")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="ways whose names have TEXT")
    parser.add_argument("--scratch", type=Path, help="where inputs are written, and used again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all rounds, for programs")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-") as temporary:
        folder = options.scratch or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for part in options.parts or PARTS:
            if part == "loads":
                rows = job_loads.run(folder, options.rounds, options.layers, options.width, options.only)
                print(f"{4 * options.layers * options.width**2 / 1e6:.0f} M parameters")
                print(f"{job_loads.table(rows)}\n", flush=True)
                results[part] = rows
            elif part == "inference":
                below = folder / "inference"
                below.mkdir(exist_ok=True)
                results[part] = job_weights.run(below, options.rounds, options.layers, options.width, options.only)
                print(f"{job_weights.table(results[part])}\n", flush=True)
            elif part == "plans":
                results[part] = job_plans.run(options.plan_ranks, options.parameters)
                print(f"{job_ranks.table(results[part])}\n", flush=True)
            else:
                results[part] = job_ranks.run(folder, options.ranks, options.parameters)
                print(f"{job_ranks.table(results[part])}\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
