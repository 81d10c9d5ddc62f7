"""One run of ckpt beside what people use otherwise: `python benchmarks/peers.py --rounds 3 --peers PYTHON`.

Tasks, each of which all programs do in turn:

    state      compress a training state of torch.save, and decompress it: zstd, ZipNN; again with all matrices of
               equal width as one, as large as those of a model of billions
    weights    compress bfloat16 weights: zstd, ZipNN, DFloat11 (whose decoder needs a GPU; its encoder is Python)
    zero       a checkpoint of ZeRO-1 (by DeepSpeed, two ranks) to one file for each parameter: ds_to_universal
    fp32       its weights in fp32 in one file: zero_to_fp32
    dcp        a checkpoint of FSDP2 (by torch, four ranks) to one file of torch.save: dcp_to_torch
    save       bf16 weights from memory to the disk: torch.save, safetensors, tensorizer
    load       them from the page cache into memory: torch.load, safetensors, tensorizer

All read through a warm page cache. Whole commands are measured, with their start, except for `save` and `load`, where
the call alone is, in a process that has imported its libraries; there, what is saved is flushed by all. Figures are
medians of user + system seconds, of wall seconds and of the largest process. ckpt checks what it reads and has flushed
what it writes when it returns; `cp` with an fsync of each file is given beside it.

`--peers` is a Python that has psutil, zipnn, tensorizer, and the files of dfloat11 with dahuffman; what it lacks is
left out, by name. The tables are Markdown, as docs/compare.md has them. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import compress
import convert
import dcp
from measure import Failed, Run, measure, measured_in_turn, medians, size, warm
from states import default_folder, state_path

CKPT = [sys.executable, "-m", "ckpt_cli"]
TIMED = """
import json, os, resource, sys, time
import psutil
{imports}
{before}
def used():
    times = [one.cpu_times() for one in psutil.Process().children(recursive=True)]
    ended = sum(one.ru_utime + one.ru_stime for one in map(resource.getrusage, (0, -1)))
    return ended + sum(one.user + one.system for one in times)
wall, cpu = time.monotonic(), used()
{call}
for path in {flushed}:
    with open(path, "rb") as file:
        os.fsync(file)
wall, cpu = time.monotonic() - wall, used() - cpu
print(json.dumps([wall, cpu, resource.getrusage(0).ru_maxrss * 1024]))
"""
"""A program that measures a call of its own, with that of its processes."""
DFLOAT11 = """
import importlib.util, pathlib, sys, torch
folder = pathlib.Path(next(p for p in sys.path if (pathlib.Path(p) / "dfloat11").is_dir())) / "dfloat11"
spec = importlib.util.spec_from_file_location("utils", folder / "dfloat11_utils.py")
utils = importlib.util.module_from_spec(spec)
spec.loader.exec_module(utils)
weights = [tensor.flatten() for tensor in torch.load(sys.argv[1], weights_only=True).values()]
codec, _, table = utils.get_32bit_codec(utils.get_codec(torch.cat(weights))[1])
parts = utils.encode_weights(weights, codec, 8, 512)
torch.save([*parts, utils.get_luts(table)], sys.argv[2])
"""
BF16 = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=True)["model"]
torch.save({name: value.to(torch.bfloat16).clone() for name, value in model.items()}, sys.argv[2])
"""
"""The weights of a state alone, which are rounded already."""


@dataclass(frozen=True)
class Program:
    command: list[str]
    measures_itself: bool = False
    """Whether it prints its figures, as of `TIMED`."""
    env: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> Run:
        if not self.measures_itself:
            return measure(self.command, {**convert.QUIET, **self.env})
        os.sync()
        done = subprocess.run(self.command, capture_output=True, text=True, env={**os.environ, **self.env})
        if done.returncode:
            raise Failed(done.stderr[-2000:])
        wall, cpu, peak = json.loads(done.stdout.splitlines()[-1])
        return Run(wall, cpu, peak, peak, 0)


@dataclass(frozen=True)
class Task:
    """What programs do in turn."""

    title: str
    nbytes: int
    """Of the input."""
    programs: Mapping[str, Program]
    shows_ratio: bool = False
    """Whether the outputs are meant to be smaller."""


def timed(python: str, imports: str, call: str, before: str = "", flushed: str = "()") -> Program:
    return Program([python, "-c", TIMED.format(imports=imports, before=before, call=call, flushed=flushed)], True)


def state(inputs: Path, out: Path, options: argparse.Namespace) -> Iterator[Task]:
    source = compress.make(options.state, int(options.gigabytes * 1e9), inputs / "state.pt")
    yield from _compression("a training state, torch.save", source, out, options, "float32", inputs)
    inputs_joined = inputs / "joined"
    inputs_joined.mkdir()
    source = compress.make(options.state, int(options.gigabytes * 1e9), inputs_joined / "state.pt", "joined")
    yield from _compression("it in large tensors, torch.save", source, out, options, "float32", inputs_joined)


def weights(inputs: Path, out: Path, options: argparse.Namespace) -> Iterator[Task]:
    whole = compress.make(options.state, int(0.2 * 1e9), inputs / "whole.pt")
    source = inputs / "weights.pt"
    subprocess.run([sys.executable, "-c", BF16, str(whole), str(source)], check=True)
    whole.unlink()
    yield from _compression("bf16 weights, torch.save", source, out, options, "bfloat16", inputs)


def _compression(
    what: str, source: Path, out: Path, options: argparse.Namespace, dtype: str, inputs: Path
) -> Iterator[Task]:
    threads, file = options.threads, str(out / "out")
    named = compress.programs(source, out / "out", inputs, threads)
    zstd = f"zstd -T{threads} -3"
    encode = {
        "cp and fsync": Program(named["cp and fsync"].command),
        "ckpt compress": Program([*CKPT, "compress", str(source), f"{file}/", "--workers", str(threads)]),
        zstd: Program(named[zstd].command),
    }
    if has(options.peers, "zipnn"):
        encode["ZipNN"] = Program([options.peers, "-c", compress.ZIPNN, str(source), file, dtype, str(threads)])
    if dtype == "bfloat16" and has(options.peers, "dahuffman"):
        encode["DFloat11, encoder"] = Program([options.peers, "-c", DFLOAT11, str(source), file])
    yield Task(f"Compress {what}", source.stat().st_size, encode, shows_ratio=True)
    if dtype == "bfloat16":
        return
    decode = {}
    for name in ("ckpt compress", zstd, "ZipNN"):
        if name in encode:
            encode[name].run()
            (out / "out").rename(inputs / name)
    decode["ckpt decompress"] = [*CKPT, "decompress", str(inputs / "ckpt compress"), file, "--to", "torch"]
    decode["zstd -d"] = named["zstd -d"].command
    if (inputs / "ZipNN").exists():
        decode["ZipNN, back"] = [options.peers, "-c", compress.UNZIPNN, str(inputs / "ZipNN"), file, str(threads)]
    yield Task(f"Decompress {what}", source.stat().st_size, {name: Program(one) for name, one in decode.items()})


def zero(inputs: Path, out: Path, options: argparse.Namespace) -> Iterator[Task]:
    source = convert.make(max(1, round(options.gigabytes)), 1, inputs)
    listed = convert.commands(source, out / "out")
    names = ("cp -r and fsync", convert.OURS, "ds_to_universal, 1 worker", "ds_to_universal, 2 workers")
    warm(source)
    yield Task("ZeRO-1, two ranks, to universal", size(source), {name: Program(listed[name]) for name in names})
    yield Task(
        "ZeRO-1, two ranks, to fp32 weights",
        size(source),
        {name: Program(listed[name]) for name in (convert.OUR_WEIGHTS, "zero_to_fp32")},
    )


def from_dcp(inputs: Path, out: Path, options: argparse.Namespace) -> Iterator[Task]:
    source = inputs / "dcp"
    measure([*dcp.BIG, "make", str(source), f"--millions={options.gigabytes * 1e3 / 12}"], dcp.QUIET)
    listed = dcp.programs(source, source, source, out / "out", 0)
    names = (f"{dcp.WHOLE}, fsync", "ckpt: DCP to torch", "dcp_to_torch")
    warm(source)
    yield Task(
        "DCP of FSDP2, four ranks, to one torch file",
        size(source),
        {name: Program(listed[name].command, env=dcp.QUIET) for name in names},
    )


def memory(inputs: Path, out: Path, options: argparse.Namespace) -> Iterator[Task]:
    """Weights of a model from memory to the disk, and back."""
    count, width = max(1, round(options.gigabytes * 1e9 / 2 / 4096**2)), 4096
    tensor = f"torch.randn({width}, {width}, dtype=torch.bfloat16)"
    tensors = f"tensors = {{f'{{i}}.weight': {tensor} for i in range({count})}}"
    linear = f"torch.nn.Linear({width}, {width}, False, dtype=torch.bfloat16)"
    module = f"module = torch.nn.Sequential(*({linear} for _ in range({count})))"
    file, python = str(out / "out"), sys.executable
    flushed = f"[{file!r}]"
    # The first save starts the process that writes.
    saver = f"{module}\nsaver = Saver(module, None, {file!r}); saver.save(1).wait()"
    by_name = "import torch; from safetensors.torch import save_file"
    saves = {
        "torch.save": timed(python, "import torch", f"torch.save(tensors, {file!r})", tensors, flushed),
        "safetensors": timed(python, by_name, f"save_file(tensors, {file!r})", tensors, flushed),
        "ckpt, Saver": timed(python, "from ckpt_training import Saver; import torch", "saver.save(2).wait()", saver),
    }
    if has(options.peers, "tensorizer"):
        call = "serializer.write_module(module); serializer.close()"
        before = f"{module}\nserializer = TensorSerializer({file!r})"
        saves["tensorizer"] = timed(
            options.peers, "import torch; from tensorizer import TensorSerializer", call, before, flushed
        )
    nbytes = count * width * width * 2
    yield Task("Save bf16 weights", nbytes, saves)
    for name, program in saves.items():
        program.run()
        (out / "out").rename(inputs / name)
    saved = next((inputs / "ckpt, Saver").glob("step-*2"))
    measure([*CKPT, "convert", str(saved), str(inputs / "ucp.ucp")])
    at = {name: str(inputs / name) for name in (*saves, "ucp.ucp")}
    ckpt = "from ckpt_training import load_file"
    loads = {
        "torch.load": timed(python, "import torch", f"torch.load({at['torch.save']!r}, weights_only=True)"),
        "safetensors": timed(
            python,
            "import torch; from safetensors.torch import load_file",
            # It maps the file, and reads nothing before.
            f"[value.clone() for value in load_file({at['safetensors']!r}).values()]",
        ),
        "ckpt, safetensors": timed(python, f"import torch; {ckpt}", f"load_file({at['safetensors']!r})"),
        "ckpt, .ucp, verified": timed(python, f"import torch; {ckpt}", f"load_file({at['ucp.ucp']!r})"),
    }
    if "tensorizer" in saves:
        loads["tensorizer, hashes verified"] = timed(
            options.peers,
            "import torch; from tensorizer import TensorDeserializer",
            f"list(TensorDeserializer({at['tensorizer']!r}, device='cpu', verify_hash=True).values())",
        )
    for name in saves:
        warm(inputs / name)
    yield Task("Load bf16 weights", nbytes, loads)


TASKS: dict[str, Callable[[Path, Path, argparse.Namespace], Iterator[Task]]] = {
    "state": state,
    "weights": weights,
    "zero": zero,
    "dcp": from_dcp,
    "memory": memory,
}


def has(python: str, module: str) -> bool:
    """Whether a Python has a package, which is said if not."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    there = subprocess.run([python, "-c", code]).returncode == 0
    if not there:
        print(f"left out: {python} has no {module}", file=sys.stderr)
    return there


def table(task: Task, rounds: int, out: Path) -> str:
    """Run all programs in turn; a table of medians, each also as a multiple of the first program of ours."""
    runs, sizes = measured_in_turn({name: program.run for name, program in task.programs.items()}, rounds, out)
    middle = {name: medians(of_one) for name, of_one in runs.items()}
    own = middle[next(name for name in middle if name.startswith("ckpt"))]
    last = " times smaller |" if task.shows_ratio else ""
    rows = [
        f"| {task.title}, {task.nbytes / 1e9:.2f} GB | wall | CPU | peak memory | wall to ckpt's |{last}",
        f"|---|---|---|---|---|{'---|' if last else ''}",
    ]
    for name, run in middle.items():
        cells = [f"{run.wall:.2f} s", f"{run.cpu:.2f} s", f"{run.process / 1e6:,.0f} MB", f"{run.wall / own.wall:.2f}"]
        cells += [f"{task.nbytes / sizes[name]:.3f}"] if last else []
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--state", type=Path, default=state_path(default_folder()), help="a state of real training")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="one that has the other packages")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=tuple(TASKS))
    parser.add_argument("--scratch", type=Path, help="where everything goes")
    options = parser.parse_args()
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="ckpt-peers-", dir=options.scratch) as folder:
            inputs, out = Path(folder) / "inputs", Path(folder) / "out"
            inputs.mkdir()
            out.mkdir()
            for task in TASKS[name](inputs, out, options):
                print(f"{table(task, options.rounds, out)}\n", flush=True)


if __name__ == "__main__":
    main()
