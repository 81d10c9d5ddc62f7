"""`verify`, `compact` and `restore` go through a chain once: counted in manifests, and in chunks that are decoded."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.chains.append import append
from ckpt.chains.verify import verify_chain
from ckpt.chains.write import DeltaPolicy
from ckpt.pipeline import Resources
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.files import Reader
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.manifest import Manifest
from ckpt_formats.universal.replay import StateArrays, StoredDelta
from held import checkpoint, flip, parameter

CHUNK = 1 << 18


def drifting(steps: int, elements: int = 2 * CHUNK + 100, rounded: bool = True) -> Iterator[Checkpoint]:
    """A run of masters that move a little. Copies that are not `rounded` differ from their masters, in one value."""
    random = np.random.default_rng(1)
    w, m = (random.standard_normal(elements).astype(np.float32) for _ in range(2))
    for step in range(1, steps + 1):
        m = m * np.float32(0.9) + random.standard_normal(elements).astype(np.float32)
        w = w - np.float32(1e-4) * m
        copy = w.astype(DTYPES["bfloat16"])
        if not rounded:
            copy[5] = 77.0
        states = {"fp32": w, "param": copy, "exp_avg": m}
        yield checkpoint([parameter("w", states)], (Group({}, ("w",)),), origin=Origin("held", None, step))


def chain_of(run: Path, steps: int, rounded: bool = True, policy: DeltaPolicy = DeltaPolicy()) -> Path:
    for state in drifting(steps, rounded=rounded):
        append(run, state, None, policy, Resources())
    return run


class Counted:
    """How often each manifest was loaded, and each chunk of a delta decoded, since this was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.manifests: Counter[Path] = Counter()
        self.chunks: Counter[tuple[Path, int, str, int]] = Counter()
        load, decoded = manifest.load, StoredDelta.decoded

        def counting_load(path: Path) -> Manifest:
            self.manifests[path] += 1
            return load(path)

        def counting_decoded(self_: StoredDelta, number: int, earlier: StateArrays, reader: Reader) -> StateArrays:
            stored = self_.stored
            self.chunks[stored.path, stored.offset, stored.label, number] += 1
            return decoded(self_, number, earlier, reader)

        monkeypatch.setattr(manifest, "load", counting_load)
        monkeypatch.setattr(StoredDelta, "decoded", counting_decoded)


@pytest.mark.parametrize("rounded", [True, False])
def test_verify_loads_each_manifest_once_and_decodes_each_delta_once(
    rounded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where copies are stored, and every member's copy is compared with its master."""
    run = chain_of(tmp_path / "run", 5, rounded)
    counted = Counted(monkeypatch)
    report = verify_chain(run, Resources(2))
    found = [(one.kind, one.what) for one in report.findings]
    differ = ("copy", "1 of 524,388 weights differ from their rounded masters")
    assert found == ([] if rounded else [differ])
    assert len(counted.manifests) == 5
    assert len(counted.chunks) == 4 * 3
    assert set(counted.manifests.values()) == {1}
    assert set(counted.chunks.values()) == {1}


def test_verify_counts_all_bytes_that_it_announced(tmp_path: Path) -> None:
    run, seen = chain_of(tmp_path / "run", 3, rounded=False), list[tuple[int, int]]()
    verify_chain(run, Resources(2), lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0


def test_a_copy_before_damage_is_compared_and_a_state_after_it_is_not(tmp_path: Path) -> None:
    """The damaged chunk is the last one of step 3: whole are the copies of steps 1 and 2, which differ."""
    run = chain_of(tmp_path / "run", 4, rounded=False)
    folder = run / index.read(run).members[2].folder
    entry = manifest.load(folder / manifest.NAME).entries[0]
    flip(folder / manifest.pack_file(0), entry.delta.extent.offset + int(entry.delta.chunks.starts[2]) + 9)
    report = verify_chain(run, Resources(2))
    assert report.bad_steps == (3, 4)
    assert [one.kind for one in report.findings] == ["checksum", "unreadable", "copy"]
    assert "(chunk 2 of 3)" in report.findings[0].what
    assert "chunk 2 of 3" in report.findings[1].what
