"""Calls every C kernel with hostile bytes under sanitizers: `python tests/fuzz_kernels.py --reads 1000000`.

gcc has sanitizers of addresses and of undefined behaviour. Without gcc, zig has the second, and buffers end at
pages that nobody may touch. Ends with a status other than zero after a finding, or if a kernel was never called.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernel_headers

FLAGS = ["-g", "-O1", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-sanitize-recover=all"]
FLAGS += ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
SLICE = 50_000
"""Hostile reads by one seed."""


def find_compiler() -> tuple[str, list[str]]:
    """What the sanitizers are called, and the command."""
    if gcc := shutil.which("gcc"):
        return "gcc, addresses and undefined behaviour", [gcc, "-fsanitize=address,undefined"]
    try:
        import ziglang
    except ImportError:
        raise SystemExit("the fuzzer needs gcc, or `pip install ziglang`") from None
    zig = Path(ziglang.__file__).with_name("zig")
    return "zig, undefined behaviour, pages that nobody may touch", [str(zig), "cc", "-fsanitize=undefined"]


def build(program: Path, compiler: list[str]) -> None:
    source = kernel_headers.SOURCES / "fuzz.c"
    subprocess.run([*compiler, *FLAGS, str(source), "-o", str(program), "-lm"], check=True)


def run(program: Path, seed: int, reads: int, family: str | None = None) -> tuple[Counter[str], Counter[str]]:
    """How often each kernel was called: with hostile bytes, and in all.

    Raises:
        SystemExit: There is a finding.
    """
    command = [str(program), str(seed), str(reads), *([family] if family else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"a finding: {' '.join(command)} ended with status {done.returncode}\n{done.stdout}")
    hostile, calls = Counter[str](), Counter[str]()
    for line in done.stdout.splitlines():
        match line.split():
            case ["read", name, count]:
                hostile[name] += int(count)
                calls[name] += int(count)
            case ["call", name, count]:
                calls[name] += int(count)
    return hostile, calls


def find_uncalled(calls: Counter[str]) -> list[str]:
    """Kernels that a header declares and that were never called."""
    names = [name for family in kernel_headers.FAMILIES for name in kernel_headers.read_prototypes(family)]
    return [name for name in names if not calls[name]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reads", type=int, default=1_000_000, help="how many hostile reads")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--seed", type=int, default=1, help="the first seed; each slice of reads takes the next")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--family", choices=kernel_headers.FAMILIES)
    arguments = parser.parse_args()

    begun, seed = time.monotonic(), arguments.seed
    hostile, calls = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        name, compiler = find_compiler()
        build(program := Path(folder) / "fuzz", compiler)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            while hostile.total() < arguments.reads and time.monotonic() - begun < arguments.seconds:
                size = min(SLICE, arguments.reads - hostile.total())
                runs = [
                    pool.submit(run, program, seed, size, arguments.family)
                    for seed in range(seed, seed + arguments.jobs)
                ]
                for part in (run.result() for run in runs):
                    hostile += part[0]
                    calls += part[1]
                seed += arguments.jobs
    for kernel, count in sorted(calls.items()):
        print(f"{kernel:32} {count:12,} calls {hostile[kernel]:12,} hostile")
    print(f"{hostile.total():,} hostile reads, 0 findings; {name}; seeds {arguments.seed} to {seed - 1}")
    if not arguments.family and (uncalled := find_uncalled(calls)):
        sys.exit(f"never called: {', '.join(uncalled)}")


if __name__ == "__main__":
    main()
