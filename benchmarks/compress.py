"""Compress whole files by several programs in turn: `python benchmarks/compress.py --gb 1 4 --rounds 3`.

The file is a training state as torch.save has it, of the size asked for: the state that `trajectory.py` made (or
--state), again and again under other names. All programs read through a warm page cache, in turn; outputs are
removed, and what the last one left is flushed, outside the timed part. Figures are medians; `ckpt` returns when its
output is on the disk, so `cp` is also given with an fsync. Needs the program zstd, and zipnn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from measure import Failed, Run, measure, medians, warm
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
COMPRESS, UNCHECKED, DECOMPRESS = "ckpt compress", "ckpt compress --no-check", "ckpt decompress"


def commands(source: Path, out: Path, small: dict[str, Path], threads: int) -> dict[str, list[str]]:
    """Every program by name; each writes something at `out`. `small` is what the compressors made."""
    work = ["--workers", str(threads)]
    return {
        "cp": ["cp", str(source), str(out)],
        "cp and fsync": ["bash", "-c", 'cp "$1" "$2" && sync "$2"', "-", str(source), str(out)],
        COMPRESS: [*CKPT, "compress", str(source), str(out), *work],
        UNCHECKED: [*CKPT, "compress", str(source), str(out), "--no-check", *work],
        f"zstd -T{threads} -3": ["zstd", "-q", f"-T{threads}", "-3", str(source), "-o", str(out)],
        "ZipNN": [sys.executable, "-c", ZIPNN, str(source), str(out), "float32", str(threads)],
        DECOMPRESS: [*CKPT, "decompress", str(small[COMPRESS]), f"{out}.pt", *work],
        "zstd -d": ["zstd", "-q", "-d", str(small[f"zstd -T{threads} -3"]), "-o", str(out)],
        "ZipNN, back": [sys.executable, "-c", UNZIPNN, str(small["ZipNN"]), str(out), str(threads)],
    }


def compare(source: Path, rounds: int, scratch: Path, threads: int, only: list[str]) -> dict[str, tuple[Run, int]]:
    """The median run of every program, and the bytes that it wrote."""
    makers = (COMPRESS, f"zstd -T{threads} -3", "ZipNN")
    small = {name: scratch / f"small{i}" for i, name in enumerate(makers)}
    for name, path in small.items():
        if not path.exists():
            subprocess.run(commands(source, path, small, threads)[name], check=True, capture_output=True)
    out = scratch / "out"
    todo = {n: c for n, c in commands(source, out, small, threads).items() if not only or n in only}
    runs: dict[str, list[Run]] = {name: [] for name in todo}
    sizes: dict[str, int] = {}
    for turn in range(rounds):
        names = list(todo)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            warm_file(source)
            for path in small.values():
                warm(path) if path.is_dir() else warm_file(path)
            try:
                runs[name].append(measure(todo[name]))
            except Failed as error:
                print(error, file=sys.stderr)
                continue
            made = [path for path in (out, out.with_name("out.pt")) if path.exists()]
            sizes[name] = sum(total(path) for path in made)
            for path in made:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {name: (medians(done), sizes[name]) for name, done in runs.items() if done}


def make(state: Path, nbytes: int, target: Path) -> Path:
    """A file of about so many bytes. By another process, which may be as large as it likes."""
    subprocess.run([sys.executable, str(HERE / "big_state.py"), str(state), str(nbytes), str(target)], check=True)
    return target


def total(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def warm_file(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 22):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, default=state_path(default_folder()))
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = []
    for gb in given.gb:
        with tempfile.TemporaryDirectory(dir=given.scratch) as made:
            source = make(given.state, round(gb * 1e9), Path(made) / "state.pt")
            size = source.stat().st_size
            print(f"\n{size / 1e9:.2f} GB, {given.threads} threads, {given.rounds} rounds\n")
            print("| program | wall s | MB/s | CPU s | peak MB | ratio |\n| --- | --- | --- | --- | --- | --- |")
            for name, (run, nbytes) in compare(source, given.rounds, Path(made), given.threads, given.only).items():
                cells = [
                    f"{run.wall:.2f}",
                    f"{size / run.wall / 1e6:,.0f}",
                    f"{run.cpu:.2f}",
                    f"{run.process / 1e6:,.0f}",
                ]
                print(f"| {name} | " + " | ".join([*cells, f"{size / nbytes:.3f}"]) + " |", flush=True)
                results.append({"program": name, "size": size, "nbytes": nbytes, **asdict(run)})
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
