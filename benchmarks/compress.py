"""Compress whole files by several programs in turn: `python benchmarks/compress.py --gb 1 4 --rounds 3 1`.

The file is a training state as torch.save has it, of the size asked for: the state that `trajectory.py` made (or
--state), again and again under other names. All programs read through a warm page cache, in turn; outputs are
removed, and what the last one left is flushed, outside the timed part. Figures are medians. `ckpt` returns when its
output is on the disk, so `cp` is also given with an fsync. What the check costs is told from pairs of runs, one with
it and one without, each first in turn. Needs zipnn, and the program zstd or else its package.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from measure import Failed, Run, measure, medians, size, warm
from states import default_folder, state_path

HERE = Path(__file__).resolve().parent
CKPT = [sys.executable, "-m", "ckpt_cli"]
# ZipNN's file tool takes the file whole and one element type for all of it; here on all threads, too. ZipNN 0.5.4 frees
# memory twice if the size is no multiple of four (979,096,667 bytes, say), so the file is filled up to one.
ZIPNN = (
    "import os, sys, zipnn; size = os.path.getsize(sys.argv[1]); data = bytearray(size + -size % 4);"
    " open(sys.argv[1], 'rb').readinto(data);"
    " coder = zipnn.ZipNN(bytearray_dtype=sys.argv[3], is_streaming=True, threads=int(sys.argv[4]));"
    " open(sys.argv[2], 'wb').write(coder.compress(data))"
)
UNZIPNN = (
    "import sys, zipnn; data = open(sys.argv[1], 'rb').read();"
    " open(sys.argv[2], 'wb').write(zipnn.ZipNN(is_streaming=True, threads=int(sys.argv[3])).decompress(data))"
)
ZSTD = (
    "import sys, zstandard; coder = zstandard.ZstdCompressor(3, threads=int(sys.argv[3]));"
    " coder.copy_stream(open(sys.argv[1], 'rb'), open(sys.argv[2], 'wb'))"
)
UNZSTD = (
    "import sys, zstandard; zstandard.ZstdDecompressor().copy_stream(open(sys.argv[1], 'rb'), open(sys.argv[2], 'wb'))"
)
CHECKED, UNCHECKED, BACK = "ckpt compress", "ckpt compress --no-check", "ckpt decompress"


@dataclass(frozen=True)
class Program:
    """One that writes something at `out`."""

    command: list[str]
    undoes: str | None = None
    """The program whose output it reads."""


def programs(source: Path, out: Path, kept: Path, threads: int) -> dict[str, Program]:
    """All programs by name. What is to be undone lies in the folder `kept`, under the name of its program."""

    def python(code: str, *arguments: object) -> list[str]:
        return [sys.executable, "-c", code, *map(str, arguments)]

    n, zstd = str(threads), f"zstd -T{threads} -3"
    zstd_path = shutil.which("zstd")
    return {
        "cp": Program(["cp", str(source), str(out)]),
        "cp and fsync": Program(["bash", "-c", 'cp "$1" "$2" && sync "$2"', "-", str(source), str(out)]),
        CHECKED: Program([*CKPT, "compress", str(source), f"{out}/", "--workers", n]),
        UNCHECKED: Program([*CKPT, "compress", str(source), f"{out}/", "--workers", n, "--no-check"]),
        zstd: Program(
            [zstd_path, "-q", f"-T{n}", "-3", str(source), "-o", str(out)]
            if zstd_path
            else python(ZSTD, source, out, n)
        ),
        "ZipNN": Program(python(ZIPNN, source, out, "float32", n)),
        BACK: Program([*CKPT, "decompress", str(kept / CHECKED), str(out), "--to", "torch", "--workers", n], CHECKED),
        "zstd -d": Program(
            [zstd_path, "-q", "-d", str(kept / zstd), "-o", str(out)]
            if zstd_path
            else python(UNZSTD, kept / zstd, out),
            zstd,
        ),
        "ZipNN, back": Program(python(UNZIPNN, kept / "ZipNN", out, n), "ZipNN"),
    }


class Bench:
    """Runs programs on one file, and keeps what others are to undo."""

    def __init__(self, source: Path, scratch: Path, threads: int) -> None:
        self.source = source
        self.out = scratch / "out"
        self.kept = scratch / "kept"
        self.kept.mkdir()
        self.programs = programs(source, self.out, self.kept, threads)
        self.sizes: dict[str, int] = {}

    def run(self, name: str) -> Run | None:
        """None if the program failed, which is said."""
        program = self.programs[name]
        undone = None if program.undoes is None else self.kept / program.undoes
        if undone is not None and not undone.exists():
            return None
        warm(self.source if undone is None else undone)
        try:
            run = measure(program.command)
        except Failed as error:
            print(error, file=sys.stderr)
            run = None
        if run is not None:
            self.sizes[name] = size(self.out)
            if any(other.undoes == name for other in self.programs.values()) and not (self.kept / name).exists():
                self.out.rename(self.kept / name)
        _remove(self.out)
        return run

    def rounds(self, count: int, only: list[str]) -> dict[str, list[Run]]:
        """All programs in turn, those that undo others after them."""
        listed = [name for name in self.programs if not only or name in only]
        runs: dict[str, list[Run]] = {name: [] for name in listed}
        for turn in range(count):
            first = turn % len(listed)
            for name in sorted(listed[first:] + listed[:first], key=lambda one: self.programs[one].undoes is not None):
                runs[name].extend(filter(None, [self.run(name)]))
        return {name: done for name, done in runs.items() if done}

    def pairs(self, count: int) -> Iterator[tuple[Run, Run]]:
        """With the check and without, each first in turn."""
        for turn in range(count):
            order = (CHECKED, UNCHECKED) if turn % 2 == 0 else (UNCHECKED, CHECKED)
            pair = {name: self.run(name) for name in order}
            checked, unchecked = pair[CHECKED], pair[UNCHECKED]
            if checked is not None and unchecked is not None:
                yield checked, unchecked


def table(bench: Bench, runs_by_name: dict[str, list[Run]], nbytes: int) -> str:
    """Medians. The last two columns are against `ckpt compress`, or `ckpt decompress`, as the program's work is."""
    middle = {name: medians(runs) for name, runs in runs_by_name.items()}
    rows = [
        "| program | wall s | MB/s | CPU s | peak MB | ratio | wall to ckpt's | CPU to ckpt's |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, run in middle.items():
        back = bench.programs[name].undoes is not None
        ours = middle.get(BACK if back else CHECKED, run)
        cells = [f"{run.wall:.2f}", f"{nbytes / run.wall / 1e6:,.0f}", f"{run.cpu:.2f}", f"{run.process / 1e6:,.0f}"]
        cells += ["" if back else f"{nbytes / bench.sizes[name]:.3f}"]
        cells += [f"{run.wall / ours.wall:.2f}", f"{run.cpu / ours.cpu:.2f}"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def cost_of_check(pairs: list[tuple[Run, Run]]) -> str:
    """What a pair differs by, as the median of all pairs, and the range."""
    texts = []
    for what in ("cpu", "wall"):
        costs = sorted(getattr(a, what) - getattr(b, what) for a, b in pairs)
        part = median((getattr(a, what) - getattr(b, what)) / getattr(a, what) for a, b in pairs)
        texts.append(f"{what} {median(costs):+.2f} s ({costs[0]:+.2f} to {costs[-1]:+.2f}), {100 * part:.0f} % of all")
    return f"the check costs, of {len(pairs)} pairs: {'; '.join(texts)}"


def make(state: Path, nbytes: int, target: Path, *how: str) -> Path:
    """A file of about so many bytes. By another process, which may be as large as it likes. `how`: see big_state.py."""
    command = [sys.executable, str(HERE / "big_state.py"), str(state), str(nbytes), str(target), *how]
    subprocess.run(command, check=True)
    return target


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, default=state_path(default_folder()))
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--rounds", type=int, nargs="+", default=[3, 1], help="of each size; the last for all others")
    parser.add_argument("--pairs", type=int, nargs="+", default=[5, 3], help="to tell the check's cost; likewise")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = []
    for index, gb in enumerate(given.gb):
        rounds, pairs = (counts[min(index, len(counts) - 1)] for counts in (given.rounds, given.pairs))
        with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=given.scratch) as temporary:
            source = make(given.state, round(gb * 1e9), Path(temporary) / "state.pt")
            nbytes, bench = source.stat().st_size, Bench(source, Path(temporary), given.threads)
            runs_by_name = bench.rounds(rounds, given.only)
            print(
                f"\n{nbytes / 1e9:.2f} GB, {given.threads} threads, {rounds} rounds\n\n"
                f"{table(bench, runs_by_name, nbytes)}"
            )
            compared = list(bench.pairs(pairs))
            if compared:
                print(f"\n{cost_of_check(compared)}", flush=True)
            results += [
                {"program": name, "size": nbytes, "nbytes": bench.sizes[name], "runs": [asdict(run) for run in runs]}
                for name, runs in runs_by_name.items()
            ]
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
