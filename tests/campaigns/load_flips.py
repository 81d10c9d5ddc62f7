"""Flip bits of sources, and load them into live ranks: none may train on with other values.

    python tests/campaigns/load_flips.py FOLDER [--flips 1000] [--seed 1] [--only TEXT ...] [--json FILE]

The sources are those of `load_matrix.py` whose formats have checksums. A bit of a random byte is flipped: half of them
in what a checksum covers, half anywhere. Two ranks of FSDP2, and one process without a process group's peers, load the
source into memory full of NaN. Either each rank raises the same `CkptError`, or all values and options of groups are
those of the undamaged source. For bytes that a checksum covers, the error names the file. The exit code is 1 if a load
returned other values, raised another error, or on some ranks only. The check runs a sample.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[1] / room) for room in ("jobs", "support"))

import torch
from torch import distributed

import ckpt
from ckpt.errors import CkptError
from ckpt_training import load
from engines import ranks
from load_matrix import SOURCES, Source, is_equal, right_value, write_sources
from loading_jobs.runs import Run, Target

TARGETS = (Target("fsdp2", 2), Target("plain", 1))
WITHOUT_CHECKSUMS = ("safetensors",)
NOT_READ = ("truth", "losses.json", "done", "chain.lock", "*.py")
SECONDS_EACH = 2.0


@dataclass(frozen=True)
class Flip:
    """A bit that was flipped, and what the load did."""

    source: str
    target: str
    file: str
    byte: int
    bit: int
    seal: str
    """What the checksum that covers the byte is of; nothing if none does."""
    result: str
    """The class of the error, `equal`, or what is wrong."""
    message: str = ""
    names_tensor: bool = False

    @property
    def is_right(self) -> bool:
        return not self.result.startswith("wrong")


class Damage:
    """A copy of a source, of which one bit at a time is wrong."""

    def __init__(self, source: Source, folder: Path, out: Path, rng: random.Random) -> None:
        path, _, step = source.address.partition("@")
        self.source, self.rng, self.root = source, rng, out / "source" / source.run / Path(path).name
        if distributed.get_rank() == 0:
            shutil.rmtree(self.root, ignore_errors=True)
            self.root.parent.mkdir(parents=True, exist_ok=True)
            if (folder / path).is_dir():
                shutil.copytree(folder / path, self.root, ignore=shutil.ignore_patterns(*NOT_READ))
            else:
                shutil.copy(folder / path, self.root)
        distributed.barrier()
        self.address = f"{self.root}@{step}" if step else str(self.root)
        opened = ckpt.open(self.address)
        self.tensors = set(opened)
        self.seals = [(seal.path, seal.offset, seal.nbytes, seal.label) for seal in opened.seals if seal.nbytes]
        self.files = sorted(
            path for path in ([self.root] if self.root.is_file() else self.root.rglob("*")) if path.is_file()
        )

    def choose(self) -> tuple[Path, int, int]:
        """A file, a byte in it and a bit: the same in all ranks."""
        if self.seals and self.rng.random() < 0.5:
            path, offset, nbytes, _ = self.rng.choice(self.seals)
            return path, offset + self.rng.randrange(nbytes), self.rng.randrange(8)
        file = self.rng.choice([one for one in self.files if one.stat().st_size])
        return file, self.rng.randrange(file.stat().st_size), self.rng.randrange(8)

    def label(self, file: Path, byte: int) -> str:
        within = (label for path, at, n, label in self.seals if path == file and at <= byte < at + n)
        return next(within, "")


def flip(file: Path, byte: int, bit: int) -> None:
    if distributed.get_rank() == 0:
        with file.open("r+b") as opened:
            opened.seek(byte)
            value = opened.read(1)[0]
            opened.seek(byte)
            opened.write(bytes([value ^ 1 << bit]))
    distributed.barrier()


def flip_all(target: Target, sources: Sequence[Source], count: int, seed: int, folder: Path, out: Path) -> None:
    """Load after each flip; called in every rank, which all make the same choices."""
    rng, run = random.Random(seed), Run(target, seed=1)
    damages = [Damage(source, folder, out, rng) for source in sources]
    truths = {source.run: torch.load(folder / source.run / "truth") for source in sources}
    load(damages[0].address, run.model, run.optimizer)
    options = options_of(run)
    with (out / f"rank{distributed.get_rank()}.jsonl").open("w") as file:
        for number in range(count):
            damage = damages[number % len(damages)]
            where, byte, bit = damage.choose()
            flip(where, byte, bit)
            result, message = load_into(run, damage, truths[damage.source.run], options)
            distributed.barrier()
            flip(where, byte, bit)
            every: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(every, (result, message))
            label = damage.label(where, byte)
            if len(set(every)) > 1:
                result = f"wrong: ranks differ: {every}"
            elif label and result == "CorruptError" and where.name not in message and "steps" not in message:
                result = "wrong: the file is not named"
            one = Flip(
                damage.source.name,
                str(target),
                str(where.relative_to(damage.root.parent)),
                byte,
                bit,
                label,
                result,
                message,
                any(name in message for name in damage.tensors),
            )
            file.write(json.dumps(asdict(one)) + "\n")
            file.flush()


def options_of(run: Run) -> Any:
    return [{name: value for name, value in group.items() if name != "params"} for group in run.optimizer.param_groups]


def load_into(run: Run, damage: Damage, truth: dict[str, torch.Tensor], options: Any) -> tuple[str, str]:
    """Load into memory full of NaN: what came of it, and the error's message."""
    with torch.no_grad():
        for tensor in tensors_of(run):
            tensor.fill_(float("nan"))
    try:
        load(damage.address, run.model, run.optimizer)
    except CkptError as error:
        return type(error).__name__, f"{error} {error.where} {error.hint}"
    except Exception as error:
        return f"wrong: {type(error).__name__}", str(error)
    wrong = [
        f"{name}/{state}"
        for name, state, value in run.values(with_moments=True)
        if not is_equal(value, right_value(truth, name, state, value.dtype, is_weights=False))
    ]
    if wrong:
        return f"wrong: other values of {wrong[:4]}", ""
    if options_of(run) != options:
        return f"wrong: other options: {options_of(run)}", ""
    return "equal", ""


def tensors_of(run: Run) -> Iterable[torch.Tensor]:
    """The memory of this rank: of the model, and of the optimizer."""
    states = [one for state in run.optimizer.state.values() for one in state.values()]
    for tensor in (*run.model.parameters(), *run.model.buffers(), *states):
        yield getattr(tensor, "_local_tensor", tensor)


def flips(folder: Path, count: int, seed: int, only: Sequence[str]) -> list[Flip]:
    """Flip so many bits, one after another, of all sources in turn."""
    write_sources(folder)
    every = []
    for number, target in enumerate(TARGETS):
        sources = [
            one
            for one in SOURCES
            if one.name not in WITHOUT_CHECKSUMS
            and (not only or any(text in f"{one.name} > {target}" for text in only))
        ]
        out, share = folder / "flips" / str(target), count // len(TARGETS)
        if not sources:
            continue
        out.mkdir(parents=True, exist_ok=True)
        work = partial(flip_all, target, sources, share, seed + number, folder, out)
        ranks.run(target.world, work, out / "logs", 60 + share * SECONDS_EACH, ranks.join_torch)
        every += [Flip(**json.loads(line)) for line in (out / "rank0.jsonl").read_text().splitlines()]
    return every


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    every = flips(options.folder.resolve(), options.flips, options.seed, options.only)
    seen = Counter(
        f"{one.source:18} {'a checksum covers it' if one.seal else 'elsewhere':20} {one.result.partition(':')[0]}"
        for one in every
    )
    for what, number in sorted(seen.items()):
        print(f"{number:6}  {what}")
    wrong = [one for one in every if not one.is_right]
    for one in wrong:
        print(f"{one.source} > {one.target}: {one.file} byte {one.byte} bit {one.bit} ({one.seal}): {one.result}")
        print(f"    {one.message[:300]}")
    corrupt = [one for one in every if one.seal and one.result == "CorruptError"]
    print(
        f"{len(every)} flips: {sum(one.result == 'equal' for one in every)} changed no value, {len(wrong)} wrong; "
        f"{sum(one.names_tensor for one in corrupt)} of {len(corrupt)} checksums that failed name a tensor; "
        f"{time.monotonic() - began:.0f} s"
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in every], indent=1) + "\n")
    return 1 if wrong or not every else 0


if __name__ == "__main__":
    sys.exit(main())
