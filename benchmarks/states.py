"""Where the states of `trajectory.py` are. Imports nothing that is large: a child's peak memory is at least ours."""

import os
from pathlib import Path

START = 200
"""The step from which the branches part."""


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckpt-trajectory"


def state_path(folder: Path, branch: str = "pretrain", step: int = START) -> Path:
    return folder / branch / f"step{step:06d}.pt"
