"""Restore the end of a long chain: `python benchmarks/chain.py --gb 0.5 --deltas 30 --keep FOLDER`.

A run of PyTorch's AdamW on gradients that are random but of low rank: masters in fp32, copies in bf16, both moments.
Each state is appended to a chain, in FOLDER, where a later run finds it again. The last one is then restored in three
ways, in one run, each in a process of its own: by `ckpt restore`; by copying the full state, flushed to the disk; and
delta by delta, each on the full state that the one before it left, as a program does that knows only one delta at a
time. All must give the bytes of the state as it was saved. Then, on copies of the chain: `append`, `verify` and
`compact`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from measure import Run, measure, medians, warm

from ckpt.chains.append import append
from ckpt.chains.write import DeltaPolicy
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.containers import sealed_json
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.chain import chain_file

if TYPE_CHECKING:
    import torch

CKPT = [sys.executable, "-m", "ckpt_cli"]
LOAD = "from ckpt.job import load_kernels; load_kernels()"
"""Kernels are loaded before anything is measured."""
ROWS, COLUMNS = 1024, 1024
BYTES_EACH = ROWS * COLUMNS * (3 * 4 + 2)


def states(gb: float, steps: int) -> Iterator[Checkpoint]:
    """The run, state after state; only one is held."""
    import torch

    torch.manual_seed(1)
    weights = [
        torch.nn.Parameter(torch.randn(ROWS, COLUMNS) * 0.02) for _ in range(max(1, round(gb * 1e9 / BYTES_EACH)))
    ]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    options = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    names = tuple(f"layers.{i}.weight" for i in range(len(weights)))
    for step in range(1, steps + 1):
        for weight in weights:
            weight.grad = (torch.randn(ROWS, 8) @ torch.randn(8, COLUMNS) * 1e-3).bfloat16().float()
        optimizer.step()
        held = {name: _parameter(name, w, optimizer.state[w], step) for name, w in zip(names, weights, strict=True)}
        yield Checkpoint(
            path=Path("/held"),
            origin=Origin("torch", torch.__version__, step),
            parameters=held,
            groups=(Group(options, names),),
        )


def _parameter(name: str, weight: torch.Tensor, kept: dict[str, torch.Tensor], step: int) -> Parameter:
    master = weight.detach().numpy()
    arrays = {
        "master": master,
        "model": master.astype(DTYPES["bfloat16"]),
        "exp_avg": kept["exp_avg"].numpy(),
        "exp_avg_sq": kept["exp_avg_sq"].numpy(),
    }
    return Parameter(name, "parameter", {s: Tensor.of(ArrayBlob(a)) for s, a in arrays.items()}, {"step": step})


def grow(kept: Path, gb: float, deltas: int) -> float:
    """Append all states that are not there yet, and save the last one and the next; the seconds of the deltas."""
    run, seconds = kept / "run", 0.0
    kept.mkdir(exist_ok=True)
    there = chain_file.read(run).members[-1].step if run.exists() else 0
    for state in states(gb, deltas + 2):
        step = state.origin.step or 0
        began = time.monotonic()
        if there < step <= deltas + 1:
            append(run, state, None, DeltaPolicy(), Execution())
            seconds += time.monotonic() - began if step != 1 else 0.0
        whole = kept / {deltas + 1: "saved", deltas + 2: "next"}.get(step, "")
        if not whole.exists():
            save(state, whole, Universal())
    return seconds


def naive(run: Path, scratch: Path) -> Run:
    """Restore the base, then each delta on what the one before it left; the sum of all runs."""
    runs, full = [], None
    for member in chain_file.read(run).members:
        alone = scratch / "delta"
        shutil.rmtree(alone, ignore_errors=True)
        alone.mkdir()
        for name in ("packs", manifest.INDEX):
            (alone / name).symlink_to((run / member.folder / name).resolve())
        manifest_fields = json.loads((run / member.folder / manifest.NAME).read_text())
        del manifest_fields["checksum"]
        if full is not None:
            manifest_fields["parent"]["path"] = f"../{full.name}"
        (alone / manifest.NAME).write_bytes(sealed_json.dump(manifest_fields))
        target = scratch / f"full{member.step}"
        runs.append(measure([*CKPT, "restore", str(alone), str(target)]))
        if full is not None:
            shutil.rmtree(full)
        full = target
    assert full is not None
    full.rename(scratch / "naive")
    sums = (sum(getattr(one, name) for one in runs) for name in ("wall", "cpu"))
    return Run(*sums, max(one.tree for one in runs), max(one.process for one in runs), sum(one.written for one in runs))


def check_same(saved: Path, *others: Path) -> None:
    """All hold the same state, in the same files."""
    for folder in others:
        assert manifest.load(folder / manifest.NAME).content == manifest.load(saved / manifest.NAME).content
        subprocess.run(["diff", "-r", saved / "packs", folder / "packs"], check=True)


def linked(run: Path, to: Path) -> str:
    """The chain again, to be changed: files are never changed in their place."""
    shutil.copytree(run, to, copy_function=os.link)
    return str(to)


def restored(kept: Path, scratch: Path, rounds: int) -> dict[str, Run]:
    """The three ways; of the two that are fast, the median of some rounds."""
    out, copied, saved = scratch / "out", scratch / "copied", kept / "saved"
    copying = 'cp -r "$1" "$2" && find "$2" -type f -exec sync {} +'
    ways = {
        "ckpt restore": (out, [*CKPT, "restore", str(kept / "run"), str(out)]),
        "cp -r and fsync of the full state": (copied, ["bash", "-c", copying, "-", str(saved), str(copied)]),
    }
    runs: dict[str, list[Run]] = {}
    for _ in range(rounds):
        for name, (target, command) in ways.items():
            shutil.rmtree(target, ignore_errors=True)
            runs.setdefault(name, []).append(measure(command))
    medians_by_way = {name: medians(some) for name, some in runs.items()}
    medians_by_way["delta by delta"] = naive(kept / "run", scratch)
    check_same(saved, out, copied, scratch / "naive")
    return medians_by_way


def changed(kept: Path, scratch: Path) -> dict[str, Run]:
    """What else is done with a chain."""
    longer, shorter = (linked(kept / "run", scratch / name) for name in ("longer", "shorter"))
    commands = {
        "ckpt append, one more": ["append", longer, str(kept / "next")],
        "ckpt verify, all states": ["verify", str(kept / "run")],
        "ckpt compact --keep last:1": ["compact", shorter, "--keep", "last:1"],
    }
    return {name: measure([*CKPT, *command]) for name, command in commands.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--deltas", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--keep", type=Path, help="Where the chain is made, and found again by a later run.")
    parser.add_argument("--grow", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.grow is not None:
        print(grow(given.grow, given.gb, given.deltas))
        return
    with tempfile.TemporaryDirectory(dir=given.scratch or given.keep) as temporary:
        scratch = Path(temporary)
        kept = given.keep or scratch / "kept"
        # In a process of its own: a child's peak is at least the size of the process that starts it.
        command = [sys.executable, __file__, "--gb", str(given.gb), "--deltas", str(given.deltas), "--grow", str(kept)]
        if not (kept / "next").exists():
            seconds = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            print(f"the chain was made in {seconds:,.0f} s, checked")
        members = chain_file.read(kept / "run").members
        assert len(members) == given.deltas + 1, "another chain is kept there"
        raw, stored = members[-1].raw_nbytes, sum(member.stored_nbytes for member in members)
        print(f"{raw / 1e6:,.0f} MB a state, {given.deltas} deltas, {os.cpu_count()} cores")
        ratio = raw / members[-1].stored_nbytes
        total = raw * len(members)
        print(f"chain: {stored / 1e6:,.0f} MB for {total / 1e6:,.0f}; the last delta {ratio:.2f}x smaller\n")
        subprocess.run([sys.executable, "-c", LOAD], check=True)
        warm(kept)
        runs = restored(kept, scratch, given.rounds)
        fast = runs["ckpt restore"].wall
        print("| way | wall s | MB/s of state | CPU s | peak MB | relative |\n| --- | --- | --- | --- | --- | --- |")
        for name, one in {**runs, **changed(kept, scratch)}.items():
            rate, times = raw / one.wall / 1e6, one.wall / fast
            print(f"| {name} | {one.wall:.2f} | {rate:,.0f} | {one.cpu:.2f} | {one.process / 1e6:,.0f} | {times:.2f} |")


if __name__ == "__main__":
    main()
