"""Flip bits in checkpoints that Orbax and Flax saved, and that ckpt wrote for Orbax.

A bit of a random byte of a random file is flipped. Either ckpt refuses the checkpoint, or reads what it read before, or
the bit is in what has no checksum: values, texts, numbers in JSON, and `.zarray` or `zarr.json` of arrays in folders of
their own. There, the seal finds it that `ckpt seal` wrote before. Names of tensors never change in silence, but in
MessagePack, which has no checksum at all.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

import ckpt
import trained
from ckpt.errors import CkptError
from damage import ckpt as command
from jax_jobs.launch import save_all
from run import Round, alternated

SAVED = ("mesh-8", "zarr3", "plain", "plain-zarr3", "run/3", "aggregate-placeholders", "flax/checkpoint_1000")
WRITTEN = {"second": ckpt.Orbax(chunk_nbytes=1000), "third": ckpt.Orbax(chunk_nbytes=1000, zarr3=True)}
Content = dict[str, bytes]


def content(path: Path) -> Content:
    """The bytes of each tensor, by its name, type and shape; and everything else as text."""
    opened = ckpt.open(path)
    tensors = {f"{p.name}/{state} {t.dtype} {t.shape}": np.asarray(t).tobytes() for p, state, t in opened.tensors()}
    steps = {p.name: p.count for p in opened.values()}
    return tensors | {"others": repr((opened.step, steps, sorted(opened.extras.items(), key=str))).encode()}


def tensor_names(content: Content) -> set[str]:
    return {name.partition(" ")[0] for name in content}


class Flips:
    """Flips in one checkpoint."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.path = folder / source.name
        folder.mkdir(parents=True)
        shutil.copytree(source, self.path) if source.is_dir() else shutil.copyfile(source, self.path)
        inside = sorted(self.path.rglob("*")) if source.is_dir() else [self.path]
        self.files = [path for path in inside if path.is_file() and path.stat().st_size]
        self.before = content(self.path)
        assert command("seal", self.path).code == 0

    def flip(self, generator: random.Random) -> Counter[str]:
        """Flip a bit, read everything, and flip it back. Return what was seen."""
        path = generator.choice(self.files)
        whole = path.read_bytes()
        data = bytearray(whole)
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
        try:
            assert command("verify", self.path).code != 0, f"the seal does not find a flip in {path}"
            try:
                after = content(self.path)
            except CkptError:
                return Counter({"refused": 1})
            if after == self.before:
                return Counter({"as before": 1})
            is_known = tensor_names(after) == tensor_names(self.before) or path.name.startswith("checkpoint")
            assert is_known, f"other tensors after a flip in {path}"
            assert path.name not in ("manifest.ocdbt", "_METADATA"), f"other values after a flip in {path}"
            return Counter({"in what has no checksum": 1})
        finally:
            path.write_bytes(whole)


def flips(folder: Path, names: tuple[str, ...]) -> dict[str, Flips]:
    """Flips by the names of checkpoints."""
    saved = trained.once("jax_jobs", "saved", save_all)
    sources = {name: saved / name for name in names if name not in WRITTEN}
    for name in names:
        if name in WRITTEN:
            (folder / "written").mkdir(exist_ok=True)
            sources[name] = folder / "written" / name
            ckpt.save(ckpt.open(saved / "run"), sources[name], WRITTEN[name])
    return {name: Flips(path, folder / name.replace("/", "-")) for name, path in sources.items()}


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    generator = random.Random(seed)
    every = flips(folder, (*SAVED, *WRITTEN))
    yield from alternated({name: partial(one.flip, generator) for name, one in every.items()})
