"""Checkpoints that real engines wrote: each is made once, by whichever process needs it first, and kept between runs.

They lie in the folder that CKPT_ZOO names, `~/.cache/ckpt-tests` if it names none, which may be emptied at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path

ZOO = Path(os.environ.get("CKPT_ZOO") or "~/.cache/ckpt-tests").expanduser()
ENGINES = ("torch", "numpy", "deepspeed", "megatron-core", "transformers", "accelerate", "peft", "safetensors")
ENGINES += ("jax", "flax", "optax", "orbax-checkpoint", "tensorstore")
JOBS = Path(__file__).parent


@contextmanager
def alone_in(scripts: str) -> Iterator[Path]:
    """The folder of what the scripts in `tests/jobs/SCRIPTS` train, while no other process adds to it."""
    with locked(f"{scripts}-{_state_of(scripts)}") as folder:
        yield folder


@contextmanager
def locked(name: str) -> Iterator[Path]:
    """A folder that is kept between runs, while no other process has it. A lock ends with the process that took it."""
    folder = ZOO / name
    folder.mkdir(parents=True, exist_ok=True)
    with (ZOO / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def once(scripts: str, name: str, make: Callable[[Path], None]) -> Path:
    """A folder which `make` fills whole; one that failed is begun again."""
    with alone_in(scripts) as folder:
        finished, begun = folder / name, folder / f".{name}"
        if not finished.exists():
            shutil.rmtree(begun, ignore_errors=True)
            begun.mkdir()
            make(begun)
            begun.rename(finished)
    return finished


@cache
def _state_of(scripts: str) -> str:
    """A hash of all that what is trained depends on: the scripts and the engines' versions."""
    state = hashlib.sha256(platform.python_version().encode())
    for folder in sorted({"engines", scripts}):
        for script in sorted((JOBS / folder).glob("*.py")):
            state.update(script.read_bytes())
    installed = {one.name: one.version for one in metadata.distributions() if one.name in ENGINES}
    state.update(repr(sorted(installed.items())).encode())
    return state.hexdigest()[:16]
