"""Start the filled runs from a test, in a process of their own; one process serves any number of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engines.launch import run_script

HERE = Path(__file__).parent


def fill(kinds: Iterable[str], out: Path) -> None:
    """Do what `fill.py` says of kinds into `out`. Raises `EngineError` that names those which failed."""
    names = list(kinds)
    run_script(HERE / "fill.py", [str(out), *names], len(names))
