"""Call every C kernel with hostile bytes under sanitizers.

gcc has sanitizers of addresses and of undefined behaviour. Without gcc, zig has the second, and buffers end at
pages that nobody may touch. Every level of kernels that this CPU runs has its turn.
"""

import itertools
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import kernel_headers
from ckpt_codecs.native import library
from run import Round

FLAGS = ["-g1", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-sanitize-recover=all"]
FLAGS += ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
SLICE = 20_000
"""Hostile reads of one process, after which it gives an account."""
ROUND = 200_000
"""Hostile reads of a round of the campaign."""


def find_zig() -> list[str]:
    """The command that compiles with zig's sanitizer.

    Raises:
        SystemExit: zig is not installed.
    """
    package = find_spec("ziglang")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the fuzzer needs gcc, or `pip install ziglang`")
    return [str(Path(package.submodule_search_locations[0]) / "zig"), "cc", "-fsanitize=undefined"]


def find_compiler() -> tuple[list[str], str]:
    """The command, and what it finds."""
    if gcc := shutil.which("gcc"):
        return [gcc, "-fsanitize=address,undefined"], "sanitizers of gcc: addresses and undefined behaviour"
    return find_zig(), "sanitizer of zig: undefined behaviour, and pages that nobody may touch"


def build(program: Path, compiler: Sequence[str], optimisation: str = "-O1") -> None:
    source = kernel_headers.SOURCES / "fuzz.c"
    subprocess.run([*compiler, *FLAGS, optimisation, str(source), "-o", str(program), "-lm"], check=True)


def build_levels(folder: Path, compiler: Sequence[str], optimisation: str = "-O1") -> list[list[str]]:
    """The fuzzer for each level of kernels that this CPU runs: some loops exist for AVX2 alone.

    By gcc, -O0 compiles in a third of the time of -O1, and runs half as fast.
    """
    programs = []
    for level in library.levels():
        program = folder / f"fuzz-v{level}"
        # zig and gcc name the same CPU differently.
        cpu = [] if level == 1 else [f"-mcpu=x86_64_v{level}" if "cc" in compiler else f"-march=x86-64-v{level}"]
        build(program, [*compiler, *cpu], optimisation)
        programs.append([str(program)])
    return programs


def run(program: Sequence[str], seed: int, reads: int, family: str | None) -> tuple[Counter[str], Counter[str]]:
    """How often each kernel was called: with hostile bytes, and in all.

    Raises:
        SystemExit: There is a finding.
    """
    command = [*program, str(seed), str(reads), *([family] if family else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"a finding: {' '.join(command)} ended with status {done.returncode}\n{done.stdout}")
    hostile, calls = Counter[str](), Counter[str]()
    for line in done.stdout.splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("read", "call"):
            name, count = rest.split()
            calls[name] += int(count)
            hostile[name] += int(count) if kind == "read" else 0
    return hostile, calls


def fuzz(
    programs: Sequence[Sequence[str]],
    reads: int,
    seconds: float = float("inf"),
    seed: int = 1,
    jobs: int = os.cpu_count() or 1,
    family: str | None = None,
    slice: int = SLICE,
) -> int:
    """Run built fuzzers in turn until there are so many hostile reads, or so many seconds are over; prints and returns
    how many.

    Raises:
        SystemExit: There is a finding, or a kernel was never called.
    """
    begun, first = time.monotonic(), seed
    hostile, calls = Counter[str](), Counter[str]()
    with ThreadPoolExecutor(jobs) as pool:
        while hostile.total() < reads and time.monotonic() - begun < seconds:
            size = min(slice, -(-(reads - hostile.total()) // jobs))
            runs = [
                pool.submit(run, programs[(seed + job) % len(programs)], seed + job, size, family)
                for job in range(jobs)
            ]
            before = hostile.total()
            for part in runs:
                hostile += part.result()[0]
                calls += part.result()[1]
            seed += jobs
            if hostile.total() == before:
                raise SystemExit("no kernel was called with hostile bytes")
    for kernel, count in sorted(calls.items()):
        print(f"{kernel:32} {count:12,} calls {hostile[kernel]:12,} hostile")
    print(f"{hostile.total():,} hostile reads by seeds {first} to {seed - 1}, 0 findings")
    families = [family] if family else kernel_headers.READERS
    never = [name for family in families for name in kernel_headers.read_prototypes(family) if not calls[name]]
    if never:
        raise SystemExit(f"never called: {', '.join(never)}")
    return hostile.total()


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    """Fuzz the kernels of each family in turn."""
    compiler, finds = find_compiler()
    print(finds)
    programs = build_levels(folder, compiler)

    def fuzzed(family: str, seed: int) -> dict[str, int]:
        try:
            return {"hostile reads": fuzz(programs, ROUND, seed=seed, family=family)}
        except SystemExit as finding:
            raise AssertionError(finding) from finding

    for number in itertools.count(seed * 1_000_000, ROUND):
        for family in kernel_headers.READERS:
            yield Round(family, partial(fuzzed, family, number))
