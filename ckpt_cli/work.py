"""From what the user typed to what the library takes."""

import os
from pathlib import Path

from ckpt_cli.pipeline import Effort
from ckpt_formats.base import Checkpoint, Options
from ckpt_formats.registry import open_checkpoint
from ckpt_formats.rules import read_rules


def open_source(path: str, rules_file: str | None) -> Checkpoint:
    """The checkpoint at a path, with the user's rules before its own."""
    return open_checkpoint(Path(path), Options(read_rules(Path(rules_file)) if rules_file else ()))


def effort_of(workers: int | None, memory: int) -> Effort:
    """How much of the machine to use."""
    return Effort(
        workers or min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        memory,
    )
