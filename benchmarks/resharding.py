"""Other degrees of tensor parallelism, beside `cp`: `python benchmarks/resharding.py --gigabytes 1 4 --rounds 5`.

A Llama with Adam's states is written whole in several formats, then for more tensor-parallel ranks: half of its
matrices are cut by rows, the others by columns. All programs read through a warm page cache, in turn; outputs are
removed, and what the last one left is flushed, outside the timed part. Ours checks every checksum of what it reads, and
returns when its output is on the disk: so `cp` is also given with an fsync of each file. Figures are medians; ratios
are to `cp` of the same input. `--before TREE` runs another checkout of this repository in the same rounds.

The goal is 1.5 x cp at 4 GB. Nothing is asserted: `tests/ckpt/test_reads_once.py` counts what is read.
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
from measure import in_turn, measure, medians, size, warm

GOAL = 1.5
UNIT = 512
"""All cut axes are multiples of it: hidden 1536, ffn 2560, q, k and v 6144, vocabulary 3584."""
LAYER, ROWS = 26e6, 2 * 3584 * 1536
"""Parameters of a layer, and of both tables of the vocabulary."""
BYTES = 14
"""Of a parameter on the disk: bf16 weight, fp32 master and moments."""
INSTALLED = {"PYTHONDONTWRITEBYTECODE": ""}
"""A program that is installed has its byte code: let it be kept."""
RULES = """\
[[rule]]
match = '.*(linear_proj|linear_fc2)\\.weight'
axis = 1
[[rule]]
match = '.*norm.*'
how = "replicated"
[[rule]]
match = '.*'
axis = 0
"""
CASES = {
    "zero to tp2": ("deepspeed", "deepspeed", ["--tp", "2", "--dp", "1", "--rules"]),
    "zero to tp4": ("deepspeed", "deepspeed", ["--tp", "4", "--dp", "1", "--rules"]),
    "zero to tp8": ("deepspeed", "deepspeed", ["--tp", "8", "--dp", "1", "--rules"]),
    "legacy to tp4": ("megatron-legacy", "megatron-legacy", ["--tp", "4"]),
    "torch_dist to tp8": ("megatron", "megatron", ["--tp", "8"]),
    "universal to megatron tp4": ("universal", "megatron-legacy", ["--tp", "4"]),
    "hf to megatron tp4": ("hf", "megatron-legacy", ["--tp", "4"]),
}
"""Source, target and options."""


def make(out: Path, gigabytes: float, forms: list[str]) -> None:
    """The sources, by our own converter, in a process of its own: it has the model in memory."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from ckpt.job import save
    from ckpt_formats.registry import writable
    from megatron_models import args_of, model

    layers = max(1, round((gigabytes * 1e9 / BYTES - ROWS) / LAYER))
    arguments = args_of("llama", layers, UNIT)
    arguments |= {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "rotary_base": 10000,
        "rotary_percent": 1.0,
    }
    arguments |= {"max_position_embeddings": 128, "layernorm_epsilon": 1e-5, "vocab_size": 7 * UNIT}
    source = model("llama", arguments | {"make_vocab_size_divisible_by": 1})
    for form in forms:
        save(source, out / form, writable(form, **({"dp": 2} if form == "deepspeed" else {})))


def programs(inputs: Path, out: Path, cases: list[str], before: Path | None) -> dict[str, Program]:
    """Every program by name; each writes something at `out`."""
    trees = {"": Path(__file__).resolve().parents[1]} | ({", before": before.resolve()} if before else {})
    listed: dict[str, Program] = {}
    for case in cases:
        form, to, options = CASES[case]
        listed |= copying(f"cp, {form}", inputs / form, str(out))
        rules = [str(inputs / "rules.toml")] if options[-1] == "--rules" else []
        for name, tree in trees.items():
            ckpt = [str(tree / ".venv" / "bin" / "python"), "-m", "ckpt_cli", "convert"]
            command = [*ckpt, str(inputs / form), str(out), "--to", to, *options, *rules]
            listed[f"{case}{name}"] = Program(command, f"cp, {form}")
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases whose names hold TEXT")
    parser.add_argument("--before", type=Path, metavar="TREE", help="another checkout, run in the same rounds")
    parser.add_argument("--scratch", type=Path, help="where everything goes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all runs, for programs")
    parser.add_argument("--make", type=Path, metavar="OUT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = [case for case in CASES if not options.only or any(text in case for text in options.only)]
    if options.make:
        make(options.make, options.gigabytes[0], sorted({CASES[case][0] for case in cases}))
        return
    report = []
    for gigabytes in options.gigabytes:
        with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=options.scratch) as folder:
            inputs, scratch = Path(folder) / "made", Path(folder) / "scratch"
            inputs.mkdir()
            scratch.mkdir()
            (inputs / "rules.toml").write_text(RULES)
            only = [f"--only={case}" for case in cases]
            measure([sys.executable, __file__, f"--make={inputs}", f"--gigabytes={gigabytes}", *only])
            listed = programs(inputs, scratch / "out", cases, options.before)
            warm(inputs)
            commands = {name: program.command for name, program in listed.items()}
            measurements, sizes = in_turn(commands, options.rounds, scratch, INSTALLED)
            title = f"{size(inputs / CASES[cases[0]][0]) / 1e6:.0f} MB, {options.rounds} rounds"
            print(f"{title}\n{table(listed, measurements, sizes)}")
            for case in cases:
                ratio = medians(measurements[case]).wall / medians(measurements[listed[case].beside]).wall
                print(f"{case}: {ratio:.2f} x cp, goal {GOAL} at 4 GB: {'reached' if ratio <= GOAL else 'missed'}")
            print(flush=True)
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
