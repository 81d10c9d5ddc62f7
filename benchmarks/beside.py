"""Programs held against a plain copy of what they read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from measure import Run, medians

_COPY_AND_FSYNC = 'cp -r "$1" "$2" && find "$2" -type f -exec sync {} +'
_SYNCED = ", fsync"


@dataclass(frozen=True)
class Program:
    command: list[str]
    beside: str
    """The `cp` that it is held against."""


def copying(name: str, source: Path, out: str) -> dict[str, Program]:
    """`cp` under this name, and `cp` with an fsync of every file."""
    return {
        name: Program(["cp", "-r", str(source), out], name),
        f"{name}{_SYNCED}": Program(["bash", "-c", _COPY_AND_FSYNC, "-", str(source), out], name),
    }


def table(listed: dict[str, Program], runs_by_name: dict[str, list[Run]], sizes: dict[str, int]) -> str:
    """Medians, and ratios to the `cp` beside, also to that with an fsync of every file."""
    middle = {name: medians(runs) for name, runs in runs_by_name.items()}
    rows = [
        f"{'':28}{'wall s':>8}{'x cp':>7}{'x fsync':>9}{'best s':>8}{'CPU s':>8}{'x cp':>7}"
        f"{'tree MB':>9}{'process MB':>12}{'output MB':>11}"
    ]
    for name, run in middle.items():
        copied, synced = (middle[f"{listed[name].beside}{end}"] for end in ("", _SYNCED))
        best = min(one.wall for one in runs_by_name[name])
        rows.append(
            f"{name:28}{run.wall:8.2f}{run.wall / copied.wall:7.2f}{run.wall / synced.wall:9.2f}{best:8.2f}"
            f"{run.cpu:8.2f}{run.cpu / copied.cpu:7.2f}"
            f"{run.tree / 1e6:9.0f}{run.process / 1e6:12.0f}{sizes[name] / 1e6:11.0f}"
        )
    return "\n".join(rows)
