"""Flip bits in universal checkpoints.

Checkpoints of all kinds (plain and coded packs, boxes, one file, chains with deltas) are written from a sample. A bit
of a random byte of a random file is flipped: in packs, indexes, manifests, and files ending in .ucp. Each must be named
by `verify`: within the values of a state, by parameter, state and chunk; elsewhere by the file. And no conversion may
give other values: it gives the right ones, or is refused. `hostile_columns` changes numbers of columns instead, with
all checksums right, as an attacker would: each is refused, or is another valid checkpoint (with another name, say),
with no error but ours, in bounded time and memory. Not part of the check.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from ckpt_formats.universal.single_file import is_single, last_entries
from damage import SAMPLES, ckpt
from forged import Forged, forge
from held import contents
from run import Round, alternated

EFFORT = Execution(2, 1 << 20)
ZERO1 = next(SAMPLES.glob("deepspeed-*-zero1-bf16-dp2"))


def checkpoints(folder: Path) -> list[Path]:
    """One of each kind; those of a chain are its last member."""
    source = open_checkpoint(ZERO1)
    save(source, folder / "plain", Universal(pack_nbytes=1 << 17), resources=EFFORT)
    save(source, folder / "coded", Universal(codec="auto"), resources=EFFORT)
    save(source, folder / "plain.ucp", Universal(), resources=EFFORT)
    save(source, folder / "coded.ucp", Universal(codec="auto"), resources=EFFORT)
    shutil.copytree(SAMPLES / "universal-1-delta", folder / "run")
    shutil.copytree(SAMPLES / "universal-2-boxes" / "step-0000000001", folder / "boxes")
    shutil.copytree(SAMPLES / "universal-2-boxes", folder / "run of boxes")
    return [folder / name for name in ("plain", "coded", "boxes", "plain.ucp", "coded.ucp", "run", "run of boxes")]


def places(path: Path) -> dict[tuple[Path, int], str]:
    """The first byte of what is stored of each state of a checkpoint without deltas, and its name."""
    opened = Universal().read(path, ReadOptions())
    return {(seal.path, seal.offset): seal.label for seal in opened.seals if "/" in seal.label and seal.nbytes}


def flipped(path: Path, rng: random.Random, stored: Mapping[tuple[Path, int], str]) -> str:
    """Flip a bit, check what is said of it, and flip it back. What was hit."""
    files = sorted(file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    file = rng.choices(files, [file.stat().st_size for file in files])[0]
    byte, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
    _flip(file, byte, bit)
    try:
        return _examined(path, file, byte, stored)
    finally:
        _flip(file, byte, bit)


def _examined(path: Path, file: Path, byte: int, stored: Mapping[tuple[Path, int], str]) -> str:
    done = ckpt("verify", path, "--json")
    where = f"{file.name} byte {byte}"
    assert "Traceback" not in done.err, (where, done.err)
    assert done.code == 20, (where, done)
    named = [offset for (own, offset) in stored if own == file and offset <= byte]
    end = last_entries(file).begin if is_single(file) else file.stat().st_size
    if not named or byte >= end:
        assert file.name in done.out + done.err, (where, done)
        return "elsewhere"
    label = stored[file, max(named)]
    findings = json.loads(done.out)["findings"]
    assert len(findings) == 1, (where, findings)
    assert label in findings[0]["what"], (where, label, findings)
    assert "chunk" in findings[0]["what"], (where, findings)
    assert findings[0]["tensors"] == [label.rpartition("/")[0]], (where, findings)
    return "a state"


def hostile(path: Path, rng: random.Random, expected: Mapping[tuple[str, str], object], work: Path) -> str:
    """Change some numbers of a column, with all checksums right."""
    target = work / "hostile"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(path, target)
    name = rng.choice(sorted(load_file(target / "index.safetensors")))
    value = rng.choice([0, 1, 255, 1 << 16, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) + 1, (1 << 64) - 1])

    def change(forged: Forged) -> None:
        column = forged.columns[name]
        flat = column.reshape(-1)
        if rng.random() < 0.2:
            forged.columns[name] = np.concatenate([column, column[: rng.randrange(1, 5)]])
        elif flat.size:
            at = rng.randrange(flat.size)
            flat[at : at + rng.choice([1, 1, 1, 7])] = np.array(value & ((1 << 8 * column.itemsize) - 1), column.dtype)

    forge(target, change)
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        actual = contents(open_checkpoint(target))
        problems = find_problems(open_checkpoint(target), EFFORT)
    except CkptError:
        outcome = "refused"
    else:
        outcome = "found by verify" if problems else "harmless" if actual == expected else f"other {name}"
    seconds, grown = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert seconds < 1, (name, value, seconds)
    assert grown < 100_000, (name, value, grown)
    return outcome


def _flip(file: Path, byte: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(byte)
        (value,) = opened.read(1)
        opened.seek(byte)
        opened.write(bytes([value ^ 1 << bit]))


def flips(folder: Path, seed: int) -> Iterator[Round]:
    rng = random.Random(seed)
    runs = {}
    for path in checkpoints(folder):
        stored = {} if path.name.startswith("run") else places(path)
        runs[path.name] = partial(_counted, flipped, path, rng, stored)
    yield from alternated(runs)


def hostile_columns(folder: Path, seed: int) -> Iterator[Round]:
    rng = random.Random(seed)
    runs = {}
    for path in checkpoints(folder)[:3]:
        runs[path.name] = partial(_counted, hostile, path, rng, contents(open_checkpoint(path)), folder)
    yield from alternated(runs)


def _counted(change: Callable[..., str], *arguments: object) -> dict[str, int]:
    return {change(*arguments): 1}
