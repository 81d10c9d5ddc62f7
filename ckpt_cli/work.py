"""From what the user typed to what the library takes."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from ckpt_cli import pipeline, report
from ckpt_cli.pipeline import Effort
from ckpt_cli.progress import progress
from ckpt_formats.base import Checkpoint, Degrees, Goal, Options, WritableFormat
from ckpt_formats.errors import Unsupported
from ckpt_formats.layout import Rule
from ckpt_formats.registry import open_checkpoint
from ckpt_formats.rules import read_rules


def open_source(path: str, rules_file: str | None) -> Checkpoint:
    """The checkpoint at a path, with the user's rules before its own."""
    return open_checkpoint(Path(path), Options(rules_of(rules_file)))


def rules_of(rules_file: str | None) -> tuple[Rule, ...]:
    """The rules of the user's file, if there is one."""
    return read_rules(Path(rules_file)) if rules_file else ()


def effort_of(workers: int | None, memory: int) -> Effort:
    """How much of the machine to use."""
    return Effort(
        workers or min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        memory,
    )


def choices(rules_file: str | None, *others: object) -> str:
    """What the user chose, as a text: another choice is another piece of work, which cannot go on with this one."""
    return json.dumps([rules_file and Path(rules_file).read_text("utf-8"), *others])


def check_degrees(format: WritableFormat, degrees: Degrees) -> None:
    """Raises `Unsupported` for a degree that the format knows nothing of."""
    asked = [name for name, value in asdict(degrees).items() if value is not None]
    if unknown := [name for name in asked if name not in format.degrees]:
        known = ", ".join(f"--{name}" for name in format.degrees) or "none, since it is not cut over ranks"
        raise Unsupported(f"format {format.name} cannot follow --{unknown[0]}", hint=f"It can follow: {known}.")


def run(
    source: Checkpoint, format: WritableFormat, goal: Goal, choices: str, effort: Effort, what: str, as_json: bool
) -> None:
    """Write, with a bar, and say what was written."""
    parts = pipeline.plan(source, format, goal)
    report.say_losses(format, source, parts)
    began = time.monotonic()
    with progress(what, sum(part.nbytes for part in parts)) as moved:
        outcome = pipeline.copy(source, format, goal, choices, effort, moved, parts)
    report.outcome(outcome, time.monotonic() - began, as_json)
