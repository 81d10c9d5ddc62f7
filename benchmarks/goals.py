"""All goals of speed in one run: `python benchmarks/goals.py --rounds 5`, on a quiet machine.

Each line is a command of ours, what it is held against (in the same rounds, in turn), and its goal. All programs read
through a warm page cache; outputs are removed, and what the last program left is flushed, outside the timed part.
Figures are medians of user + system seconds and of wall seconds of whole commands, start included. Sources:

    start     a sample, and a chain of two of its states
    convert   a Llama with Adam's states in the format of each engine, --gigabytes each (`resharding.py`), into a
              folder and into one file; from the universal format also to DCP, and from `.ucp` to `.pt`
    reshard   ZeRO to four tensor-parallel ranks, --reshard-gigabytes
    compress  a state of real training: `trajectory.py` makes it, or --state FILE
    many      20,000 parameters, 80,000 tensors, from `torch.save` (`many_tensors.py`)
    chain     the trained state, moved a little at each step, 6 and 31 members, with a tip
    plan      ZeRO-3 of 10,240 parameters for 1,024 ranks (`planning.py`)

`--only compress` runs one section. Each line has what was measured, the limits, and whether they hold. Nothing is
asserted: misses are written down in benchmarks/results, with the stage that holds them back.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import compress
import many_tensors
from measure import Run, in_turn, measure, medians, size, warm
from resharding import INSTALLED
from states import default_folder, state_path

HERE = Path(__file__).resolve().parent
SAMPLE = next((HERE.parent / "sample_checkpoints").glob("deepspeed-*-zero1-bf16-dp2"))
CKPT = (sys.executable, "-m", "ckpt_cli")
FORMATS = ("deepspeed", "megatron-legacy", "megatron", "dcp", "hf", "torch", "universal")
SECTIONS = ("start", "convert", "reshard", "compress", "many", "chain", "plan")
_COPY = 'cp -r "$1" "$2" && find "$2" -type f -exec sync {} +'


@dataclass(frozen=True)
class Goal:
    """What a command may take."""

    name: str
    command: tuple[str, ...]
    text: str
    """The goal, in words."""
    limit: Callable[[Mapping[str, Run]], float]
    """The most wall seconds, given the medians of all programs of the section."""
    cpu: Callable[[Mapping[str, Run]], float] = field(default=lambda runs: float("inf"))
    """The most CPU seconds, likewise."""


@dataclass(frozen=True)
class Section:
    """Programs that are run in turn, and the goals of some of them."""

    goals: tuple[Goal, ...]
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What the goals are held against, by name."""


def ckpt(*arguments: object) -> tuple[str, ...]:
    return (*CKPT, *map(str, arguments))


def seconds(limit: float) -> Callable[[Mapping[str, Run]], float]:
    return lambda runs: limit


def times(factor: float, other: str) -> Callable[[Mapping[str, Run]], float]:
    return lambda runs: factor * runs[other].wall


def copy(source: Path, out: Path, flushed: bool = True) -> tuple[str, ...]:
    return ("bash", "-c", _COPY, "-", str(source), str(out)) if flushed else ("cp", "-r", str(source), str(out))


def start(inputs: Path, out: Path) -> Iterator[Section]:
    chain = inputs / "start.chain"
    for step in (1, 2):
        measure(ckpt("append", chain, SAMPLE, "--step", step))
    measure(ckpt("convert", SAMPLE, inputs / "tiny"))
    yield Section(
        (
            Goal("--help", ckpt("--help"), "0.1 s", seconds(0.1)),
            Goal("inspect, tiny", ckpt("inspect", inputs / "tiny"), "0.12 s", seconds(0.12)),
            Goal("log", ckpt("log", chain), "0.25 s", seconds(0.25)),
        )
    )


def convert(inputs: Path, out: Path, gigabytes: float) -> Iterator[Section]:
    for form in FORMATS:
        source = _written(inputs, form, gigabytes)
        name, copied = f"convert {form} to universal", f"cp + fsync, {form}"
        goals = [
            Goal(name, ckpt("convert", source, f"{out}/"), "1.5 x cp + fsync", times(1.5, copied)),
            Goal(f"{name}, .ucp", ckpt("convert", source, f"{out}.ucp"), "1.15 x the folder", times(1.15, name)),
        ]
        if form == "universal":
            dcp = ckpt("convert", source, out, "--to", "dcp")
            goals.append(Goal("convert universal to dcp", dcp, "1.8 x cp + fsync", times(1.8, copied)))
        yield Section(tuple(goals), {copied: copy(source, out)})
        if form == "universal":
            yield _file_to_file(source, inputs / "state.ucp", out)
            _remove(inputs / "state.ucp")
        _remove(source)


def _file_to_file(source: Path, file: Path, out: Path) -> Section:
    """From `.ucp`, which is made, to `.pt`."""
    measure(ckpt("convert", source, file))
    goal = Goal("convert .ucp to .pt", ckpt("convert", file, f"{out}.pt"), "1.8 x cp + fsync", times(1.8, "cp + fsync"))
    return Section((goal,), {"cp + fsync": copy(file, out)})


def reshard(inputs: Path, out: Path, gigabytes: float) -> Iterator[Section]:
    source, rules = _written(inputs, "deepspeed", gigabytes), inputs / "rules.toml"
    from resharding import RULES

    rules.write_text(RULES)
    command = ckpt("convert", source, out, "--to", "deepspeed", "--tp", 4, "--dp", 1, "--rules", rules)
    goal = Goal("zero to tp 4", command, "1.5 x cp", times(1.5, "cp"))
    yield Section((goal,), {"cp": copy(source, out, flushed=False), "cp + fsync": copy(source, out)})
    _remove(source)


def compressed(inputs: Path, out: Path, state: Path, gigabytes: float) -> Iterator[Section]:
    source = compress.make(state, int(gigabytes * 1e9), inputs / "state.pt")
    small = inputs / "small"
    measure(ckpt("compress", source, f"{small}/"))
    ratio = size(source) / size(small)
    print(f"ratio of ckpt compress: {ratio:.3f}  goal 1.42: {_reached(ratio >= 1.42)}", flush=True)
    programs = compress.programs(source, out, inputs, 2)
    zstd = next(name for name in programs if name.startswith("zstd -T"))
    others = {zstd: tuple(programs[zstd].command), "cp + fsync": copy(source, out)}
    goals = [
        Goal(
            "compress, checked",
            ckpt("compress", source, f"{out}/"),
            f"0.9 x {zstd}, CPU 0.7 x",
            times(0.9, zstd),
            lambda runs: 0.7 * runs[zstd].cpu,
        ),
        Goal("decompress", ckpt("decompress", small, out), "1.5 x cp + fsync", times(1.5, "cp + fsync")),
    ]
    if _installed("zipnn"):
        others["ZipNN"] = tuple(programs["ZipNN"].command)
        goals.append(Goal("compress", ckpt("compress", source, f"{out}/"), "half of ZipNN", times(0.5, "ZipNN")))
    yield Section(tuple(goals), others)
    _remove(source)


def many(inputs: Path, out: Path) -> Iterator[Section]:
    folder = inputs / "many"
    folder.mkdir()
    # In a process of its own: a child's peak memory is at least ours.
    code = f"import many_tensors; from pathlib import Path; many_tensors.make(Path({str(folder)!r}), 20_000)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=HERE)
    source, first, second = folder / many_tensors.KINDS["torch"], inputs / "first", inputs / "second"
    for target in (first, second):
        measure(ckpt("convert", source, target))
    yield Section(
        (
            Goal("inspect, 20,000", ckpt("inspect", first), "0.5 s", seconds(0.5)),
            Goal("verify, 20,000", ckpt("verify", first), "1 s", seconds(1.0)),
            Goal("diff, 20,000", ckpt("diff", first, second), "1.5 s", seconds(1.5)),
            Goal("from torch, 20,000", ckpt("convert", source, out), "3 s", seconds(3.0)),
            Goal("to dcp, 20,000", ckpt("convert", first, out, "--to", "dcp"), "3 s", seconds(3.0)),
        )
    )


def chain(inputs: Path, out: Path, state: Path) -> Iterator[Section]:
    """Members are states of real training, one after another."""
    steps = sorted(state.parent.glob("*.pt"))
    # A base, and 5 or 30 deltas, among them each step from the last state back to the first as often as the others.
    for length in (6, 31):
        run = inputs / f"{length}.chain"
        for number in range(length):
            measure(ckpt("append", run, steps[number % len(steps)], "--step", number, "--tip"))
    short, long, last = inputs / "6.chain", inputs / "31.chain", steps[-1]
    plain = inputs / "last"
    measure(ckpt("restore", long, plain))
    again = ("append", long, last, "--step", 99, "--dry-run")
    yield Section(
        (
            Goal("append --dry-run at 31", ckpt(*again), "as at 6 + 5 %", times(1.05, "at 6")),
            Goal("verify 31", ckpt("verify", long), "6 x verify of 6 + 10 %", times(6.6, "verify 6")),
            Goal("restore the last", ckpt("restore", long, out), "2 x cp + fsync with a tip", times(2.0, "cp + fsync")),
        ),
        {
            "at 6": ckpt("append", short, last, "--step", 99, "--dry-run"),
            "verify 6": ckpt("verify", short),
            "cp + fsync": copy(plain, out),
        },
    )


def plan() -> Iterator[str]:
    command = [sys.executable, str(HERE / "planning.py"), "--one", "zero3", "1024", "10240"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    for name, goal, unit in (("plan", 5.0, "CPU s"), ("reshard", 10.0, "CPU s"), ("peak", 200.0, "MB")):
        reached = _reached(figures[name] <= goal)
        yield f"plan ZeRO-3, 1,024 x 10,240: {name:8} {figures[name]:8.2f} {unit}, goal {goal:g}: {reached}"


def _reached(holds: bool) -> str:
    return "reached" if holds else "MISSED"


def _written(inputs: Path, form: str, gigabytes: float) -> Path:
    """A checkpoint in a format, made in a process of its own, which has the model in memory."""
    target = inputs / form
    if form in ("torch", "dcp"):
        source = _written(inputs, "universal", gigabytes)
        measure(ckpt("convert", source, target, "--to", form))
        _remove(source)
        return target.with_suffix(".pt") if form == "torch" and not target.exists() else target
    code = (
        f"import resharding; from pathlib import Path; resharding.make(Path({str(inputs)!r}), {gigabytes}, [{form!r}])"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE)
    warm(target) if target.is_dir() else None
    return target


def _installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def report(section: Section, rounds: int, scratch: Path) -> Iterator[str]:
    """Run the programs of a section in turn, and compare."""
    commands = {goal.name: goal.command for goal in section.goals} | dict(section.others)
    runs, _ = in_turn(commands, rounds, scratch, INSTALLED)
    middle = {name: medians(of_one) for name, of_one in runs.items()}
    for name in section.others:
        yield f"{name:34} {middle[name].wall:7.2f} s {middle[name].cpu:7.2f} CPU s"
    for goal in section.goals:
        run, limit, cpu = middle[goal.name], goal.limit(middle), goal.cpu(middle)
        cpu_limit = "" if cpu == float("inf") else f" and {cpu:.2f} CPU s"
        yield (
            f"{goal.name:34} {run.wall:7.2f} s {run.cpu:7.2f} CPU s {run.process / 1e6:6.0f} MB"
            f"  goal {goal.text} = {limit:.2f} s{cpu_limit}, ratio {run.wall / limit:.2f}: "
            f"{_reached(run.wall <= limit and run.cpu <= cpu)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=0.8)
    parser.add_argument("--reshard-gigabytes", type=float, default=4.0)
    parser.add_argument("--state", type=Path, default=state_path(default_folder()), help="a state of real training")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--scratch", type=Path, help="where everything goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckpt-goals-", dir=options.scratch) as folder:
        inputs, scratch = Path(folder) / "made", Path(folder) / "scratch"
        inputs.mkdir()
        scratch.mkdir()
        out = scratch / "out"
        makers: dict[str, Callable[[], Iterator[Section]]] = {
            "start": lambda: start(inputs, out),
            "convert": lambda: convert(inputs, out, options.gigabytes),
            "reshard": lambda: reshard(inputs, out, options.reshard_gigabytes),
            "compress": lambda: compressed(inputs, out, options.state, options.gigabytes),
            "many": lambda: many(inputs, out),
            "chain": lambda: chain(inputs, out, options.state),
        }
        for name in options.only:
            print(f"-- {name}", flush=True)
            if name == "plan":
                print("\n".join(plan()), flush=True)
                continue
            for section in makers[name]():
                for line in report(section, options.rounds, scratch):
                    print(line, flush=True)


if __name__ == "__main__":
    main()
