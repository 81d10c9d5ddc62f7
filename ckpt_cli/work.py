"""From what the user typed to what the library takes."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from ckpt_cli import pipeline, report
from ckpt_cli.options import Reading
from ckpt_cli.pipeline import Effort
from ckpt_cli.progress import progress
from ckpt_formats.base import Checkpoint, Degrees, Goal, Options, WritableFormat
from ckpt_formats.errors import BadRules, Unsupported
from ckpt_formats.files import read_whole
from ckpt_formats.layout import Rule
from ckpt_formats.registry import open_checkpoint
from ckpt_formats.rules import read_rules

_MOST_ORDER = 1 << 28
"""Bytes of a file of names."""


def open_source(path: str, reading: Reading) -> Checkpoint:
    """The checkpoint at a path, read as the user says."""
    shapes = Path(reading.shapes) if reading.shapes else None
    return open_checkpoint(Path(path), Options(rules_of(reading), order_of(reading), shapes))


def rules_of(reading: Reading) -> tuple[Rule, ...]:
    """The rules of the user's file, if there is one."""
    return read_rules(Path(reading.rules)) if reading.rules else ()


def order_of(reading: Reading) -> tuple[str, ...]:
    """The names in the user's file, if there is one: a JSON list, or a name on each line."""
    if not reading.param_order:
        return ()
    path = Path(reading.param_order)
    try:
        text = read_whole(path, _MOST_ORDER).decode("utf-8")
        names = json.loads(text) if text.lstrip().startswith("[") else [name.strip() for name in text.splitlines()]
    except (ValueError, RecursionError) as error:
        raise BadRules(f"not a list of names: {error}", where=path) from None
    if not all(isinstance(name, str) for name in names):
        raise BadRules("not a list of names: it holds other things", where=path)
    return tuple(name for name in names if name)


def effort_of(workers: int | None, memory: int) -> Effort:
    """How much of the machine to use."""
    return Effort(
        workers or min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        memory,
    )


def choices(reading: Reading, *others: object) -> str:
    """What the user chose, as a text: another choice is another piece of work, which cannot go on with this one."""
    files = (file and Path(file).read_text("utf-8") for file in (reading.rules, reading.param_order))
    return json.dumps([*files, reading.shapes, *others])


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
