"""Damage published chains, then read and follow them.

A chain of two epochs, with bases, folds and three ranks, is damaged: bits of a file are flipped; a file is cut,
lengthened, emptied or lost; two files of a kind are swapped; one has the bytes of another; the head is an older one, or
that of the other epoch. Some rounds damage several files. `reader` opens each step; `follower` holds an earlier step in
memory and updates. Both give the bits that were published or an error of ours. A follower never goes back within an
epoch, holds what it held after an error, and comes to the last step once the chain is whole again. In rounds named
`forged`, somebody without the key of the run publishes: a follower that has the key never holds that.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ckpt.following.follower import Follower
from ckpt.following.source import FollowedStep
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.published.records import HEAD, StepName
from published import PublishedRun, Weights
from run import Round, alternated

Files = dict[str, bytes]
RANKS = 3
PATIENCE = 0.02
"""Seconds for which a follower reads what is missing again."""
LAST = StepName(2, 10)


def weights_at(step: int, branch: int = 0) -> Weights:
    """Weights that change a little with each step. A branch goes another way from step 4 on."""
    random_ = np.random.default_rng(1)
    weights = {
        "embed": random_.normal(0, 0.02, (96, 64)).astype(ml_dtypes.bfloat16),
        "norm": random_.normal(1, 0.1, 33).astype(np.float32),
        "head": random_.normal(0, 0.02, (3, 700)).astype(ml_dtypes.bfloat16),
    }
    for one in range(1, step + 1):
        changes = np.random.default_rng([one, branch if one > 4 else 0])
        for values in weights.values():
            bits = values.reshape(-1).view(f"u{values.dtype.itemsize}")
            bits[changes.integers(0, bits.size, 1 + bits.size // 50)] += 1
    return weights


class PublishedHistory:
    """A chain in a folder, and its files after each step that was published."""

    def __init__(self, folder: Path, key: bytes | None = None) -> None:
        self.folder = folder / "policy.chain"
        self.run = PublishedRun(self.folder, weights_at(1), RANKS, key, {"config.json": b'{"model_type": "x"}'})
        self.files: dict[StepName, Files] = {}
        for step in range(1, 8):
            self._publish(step, 0, base=step == 4)
            if step == 6:
                self.run.fold(4, 6)
        self.run.epoch = 2
        for step in range(5, LAST.step + 1):
            self._publish(step, 1)
            if step in (7, 9):
                self.run.fold(step - 2, step)
        self.files[LAST] = self.read()
        self.heads = {name: files[HEAD] for name, files in self.files.items()}

    def _publish(self, step: int, branch: int, base: bool = False) -> None:
        self.run.publish(step, weights_at(step, branch), base)
        self.files[StepName(self.run.epoch, step)] = self.read()

    def read(self) -> Files:
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in paths}

    def place(self, files: Mapping[str, bytes]) -> None:
        """Let the folder have these files and no others."""
        for key, data in files.items():
            path = self.folder / key
            if not path.exists() or path.read_bytes() != data:
                path.with_suffix(".tmp").write_bytes(data)
                path.with_suffix(".tmp").replace(path)
        for path in self.folder.rglob("*"):
            if path.is_file() and path.relative_to(self.folder).as_posix() not in files:
                path.unlink()


# Damage: each changes files, and returns the key of what it changed


def flip(files: Files, generator: random.Random) -> str:
    key = generator.choice([key for key, data in files.items() if data])
    data = bytearray(files[key])
    for _ in range(generator.choice((1, 1, 1, 2, 9))):
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    files[key] = bytes(data)
    return key


def cut(files: Files, generator: random.Random) -> str:
    key = generator.choice([key for key, data in files.items() if data])
    files[key] = files[key][: generator.randrange(len(files[key]))]
    return key


def lengthen(files: Files, generator: random.Random) -> str:
    key = generator.choice(list(files))
    files[key] += generator.randbytes(generator.choice((1, 16, 5000)))
    return key


def clear_page(files: Files, generator: random.Random) -> str:
    """Let a part of a file be zeros, as after a crash of a machine."""
    key = generator.choice([key for key, data in files.items() if data])
    data = bytearray(files[key])
    at = generator.randrange(len(data))
    data[at : at + 512] = bytes(len(data[at : at + 512]))
    files[key] = bytes(data)
    return key


def lose(files: Files, generator: random.Random) -> str:
    key = generator.choice(list(files))
    del files[key]
    return key


def of_a_kind(files: Files, generator: random.Random) -> tuple[str, str]:
    """Return two keys in one folder of the chain."""
    folder = generator.choice(("objects", "objects", "steps", "folds"))
    keys = [key for key in files if key.startswith(f"published/{folder}/")]
    return tuple(generator.sample(keys, 2)) if len(keys) > 1 else (HEAD, HEAD)  # type: ignore[return-value]


def swap(files: Files, generator: random.Random) -> str:
    one, other = of_a_kind(files, generator)
    files[one], files[other] = files[other], files[one]
    return one


def duplicate(files: Files, generator: random.Random) -> str:
    one, other = of_a_kind(files, generator)
    files[one] = files[other]
    return one


DAMAGES: Mapping[str, Callable[[Files, random.Random], str]] = {
    one.__name__: one for one in (flip, cut, lengthen, clear_page, lose, swap, duplicate)
}


class DamagedChain:
    """Rounds of damage to one chain."""

    def __init__(self, history: PublishedHistory, generator: random.Random) -> None:
        self.history, self.generator = history, generator
        self.states = history.run.states
        self.last_of = {name.step: name for name in sorted(self.states)}
        """Of the steps of both epochs, the name by which a step is opened."""

    def damaged(self, kind: str) -> tuple[Files, Counter[str]]:
        """Return the last files of the chain with damage, and what was damaged."""
        files, seen = dict(self.history.files[LAST]), Counter[str]()
        if kind == "old head":
            files[HEAD] = self.generator.choice(list(self.history.heads.values()))
            return files, Counter({"damaged head.json": 1})
        for _ in range(self.generator.choice((1, 1, 1, 2, 5))):
            key = DAMAGES[kind](files, self.generator)
            seen[f"damaged {key.removeprefix('published/').partition('/')[0]}"] += 1
        return files, seen

    def read(self, kind: str) -> Counter[str]:
        """Open a step of a damaged chain, and the last one."""
        files, seen = self.damaged(kind)
        self.history.place(files)
        step = self.generator.choice(list(self.last_of))
        for path in (Path(f"{self.history.folder}@{step}"), self.history.folder):
            try:
                opened = open_checkpoint(path)
                values = {name: read(opened[name].weight) for name in opened}
            except CkptError as error:
                seen[f"{type(error).__name__}"] += 1
                continue
            wanted = [self.states[name] for name in self.states if path == self.history.folder or name.step == step]
            assert any(same(values, weights) for weights in wanted), f"{path.name}: other weights after {seen}"
            seen["right"] += 1
        return seen

    def follow(self, kind: str) -> Counter[str]:
        """Let a follower that has an earlier step update from a damaged chain, and then from a whole one."""
        names = [name for name in self.states if name != LAST]
        earlier = self.generator.choice([*names, None])
        with Follower(self.history.folder, patience=PATIENCE) as follower:
            if earlier is not None:
                self.history.place(self.history.files[earlier])
                self.check(follower, follower.update(), earlier)
            files, seen = self.damaged(kind)
            self.history.place(files)
            try:
                step = follower.update()
            except CkptError as error:
                seen[type(error).__name__] += 1
                assert (follower.step is None) == (earlier is None)
                if follower.step is not None:
                    self.check(follower, follower.step, earlier)
            else:
                name = StepName(step.epoch, step.step)
                assert earlier is None or name >= earlier, f"went back from {earlier} to {name}"
                self.check(follower, step, name)
                seen["right" if name == LAST else "an earlier step"] += 1
            self.history.place(self.history.files[LAST])
            self.check(follower, follower.update(), LAST)
        return seen

    def forge(self) -> Counter[str]:
        """Let somebody without the key publish other weights, with all hashes right, to followers with the key."""
        history, key = self.history, self.history.run.key
        last = self.generator.choice(sorted(self.states))
        kind = self.generator.choice(("delta", "base", "epoch", "same step"))
        forger = copy(history.run)
        forger.key = self.generator.choice((None, b"the key of a stranger"))
        forger.states, forger.refs, forger.last = dict(forger.states), dict(forger.refs), last
        forger.epoch, forger.folds, forger.base = last.epoch + 5 * (kind == "epoch"), [], StepName(last.epoch, 4)
        history.place(history.files[last])
        forger.publish(last.step + (kind != "same step"), weights_at(3, 7), base=kind == "base")
        files, seen = history.read(), Counter[str]()
        if self.generator.random() < 0.3:
            files[HEAD], kind = history.files[last][HEAD], f"{kind}, true head"
        history.place(history.files[last])
        with Follower(history.folder, key=key, patience=PATIENCE) as follower:
            self.check(follower, follower.update(), last)
            history.place(files)
            for one in (follower, Follower(history.folder, key=key, patience=PATIENCE)):
                try:
                    one.update()
                except CkptError as error:
                    seen[f"{kind}: {type(error).__name__}"] += 1
                if one.step is not None:
                    self.check(one, one.step, last)
        return seen

    def check(self, follower: Follower, step: FollowedStep, name: StepName | None) -> None:
        assert name is not None
        assert (step.epoch, step.step) == (name.epoch, name.step), f"{step}, not {name}"
        assert same(follower.tensors(), self.states[name]), f"other weights at {name}"


def same(values: Mapping[str, np.ndarray[Any, Any]], weights: Weights) -> bool:
    return values.keys() == weights.keys() and all(
        (one := values[name]).dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        for name, other in weights.items()
    )


def rounds(folder: Path, seed: int) -> Generator[Round, None, None]:
    """Yield each kind of damage in turn, to a reader and to a follower."""
    chain = DamagedChain(PublishedHistory(folder), random.Random(seed))
    ways = {"reader": chain.read, "follower": chain.follow}
    kinds = (*DAMAGES, "old head")
    works = {f"{who}, {kind}": partial(way, kind) for kind in kinds for who, way in ways.items()}
    (folder / "signed").mkdir()
    signed = DamagedChain(PublishedHistory(folder / "signed", b"the key of the run"), random.Random(seed))
    yield from alternated({**works, "follower, forged": signed.forge})
