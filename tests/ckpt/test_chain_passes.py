"""`verify`, `compact` and `restore` go through a chain once: counted in manifests, and in chunks that are decoded."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ckpt.chains.append import append
from ckpt.chains.compact import Retention, compact
from ckpt.chains.verify import verify_chain
from ckpt.chains.write import DeltaPolicy
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.files import Reader
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import chain_file, folder
from ckpt_formats.universal.chain.members import open_member
from ckpt_formats.universal.entry import ParameterEntry
from ckpt_formats.universal.manifest import Manifest
from ckpt_formats.universal.replay import StateArrays, StoredDelta
from damage import ckpt
from held import checkpoint, contents, flip, parameter

CHUNK = 1 << 18


def drifting(steps: int, elements: int = CHUNK + 100, rounded: bool = True) -> Iterator[Checkpoint]:
    """A run of masters that move a little. Copies that are not `rounded` differ from their masters, in one value."""
    random = np.random.default_rng(1)
    w, m = (random.standard_normal(elements).astype(np.float32) for _ in range(2))
    for step in range(1, steps + 1):
        m = m * np.float32(0.9) + random.standard_normal(elements).astype(np.float32)
        w = w - np.float32(1e-4) * m
        copy = w.astype(DTYPES["bfloat16"])
        if not rounded:
            copy[5] = 77.0
        states = {"master": w, "model": copy, "exp_avg": m}
        yield checkpoint([parameter("w", states)], (Group({}, ("w",)),), origin=Origin("held", None, step))


def chain_of(run: Path, steps: int, rounded: bool = True, base_every: int | None = None) -> Path:
    for state in drifting(steps, rounded=rounded):
        append(run, state, None, DeltaPolicy(base_every=base_every), Execution())
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
    report = verify_chain(run, Execution(2))
    findings = [(one.kind, one.what) for one in report.findings]
    differ = ("copy", "1 of 262,244 weights differ from their rounded masters")
    assert findings == ([] if rounded else [differ])
    assert len(counted.manifests) == 5
    assert len(counted.chunks) == 4 * 2
    assert set(counted.manifests.values()) == {1}
    assert set(counted.chunks.values()) == {1}


def test_verify_counts_all_bytes_that_it_announced(tmp_path: Path) -> None:
    run, seen = chain_of(tmp_path / "run", 3, rounded=False), list[tuple[int, int]]()
    verify_chain(run, Execution(2), lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0


def test_a_copy_before_damage_is_compared_and_a_state_after_it_is_not(tmp_path: Path) -> None:
    """The damaged chunk is the last one of step 3: whole are the copies of steps 1 and 2, which differ."""
    run = chain_of(tmp_path / "run", 4, rounded=False)
    folder = run / chain_file.read(run).members[2].folder
    entry = manifest.load(folder / manifest.NAME).entries[0]
    flip(folder / manifest.pack_file(0), entry.delta.extent.offset + int(entry.delta.chunks.starts[1]) + 9)
    report = verify_chain(run, Execution(2))
    assert report.bad_steps == (3, 4)
    assert [one.kind for one in report.findings] == ["checksum", "unreadable", "copy"]
    assert "(chunk 1 of 2)" in report.findings[0].what
    assert "chunk 1 of 2" in report.findings[1].what


@pytest.mark.parametrize(("keep", "deltas"), [("every:2", 5), ("2,5,7", 6)])
def test_compact_decodes_each_delta_once_and_leaves_no_values_behind(
    keep: str, deltas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted are the deltas that were there; those that are written are decoded to check them, by their codec."""
    run = chain_of(tmp_path / "run", 7, rounded=False)
    steps = {
        member.step: contents(open_member(run, chain_file.read(run), member)) for member in chain_file.read(run).members
    }
    counted = Counted(monkeypatch)
    result = compact(run, Retention((keep,)), DeltaPolicy(), Execution(2))
    assert set(counted.chunks.values()) == {1}
    assert len({path for path, *_ in counted.chunks}) == deltas
    names = {"chain.json", "chain.lock", *(member.folder for member in result.after.members)}
    assert {path.name for path in run.iterdir()} == names
    for member in result.after.members:
        assert contents(open_member(run, result.after, member)) == steps[member.step]


def test_compact_writes_the_same_without_memory_for_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each state is replayed from its base, and no file is needed for values."""
    run = chain_of(tmp_path / "run", 5)
    other = shutil.copytree(run, tmp_path / "other")
    assert compact(run, Retention(("2,4",)), DeltaPolicy(), Execution(2)).after.members
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    monkeypatch.setattr("ckpt.chains.compact.carry", None)
    compact(other, Retention(("2,4",)), DeltaPolicy(), Execution(2))
    files = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    assert all((run / file).read_bytes() == (other / file).read_bytes() for file in files)


def test_leftovers_of_a_killed_compact_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = chain_of(tmp_path / "run", 3)
    (run / folder.REPLAYED.format(4)).write_bytes(b"values")
    compact(run, Retention(("last:1",)), DeltaPolicy(), Execution(2))
    assert {path.name for path in run.iterdir()} == {"chain.json", "chain.lock", "step-0000000003.1"}


@pytest.mark.parametrize("form", ["universal", "torch"])
def test_restore_says_what_it_will_replay_and_decodes_each_delta_once(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = chain_of(tmp_path / "run", 4)
    arguments = ("restore", run, tmp_path / "out", "--to", form, "--workers", 1, "--json")
    report = json.loads(ckpt(*arguments, "--dry-run").out)
    stored = sum(entry.delta.extent.nbytes for folder in run.glob("*/") for entry in _entries(folder) if entry.delta)
    nbytes = 3 * 8 * (CHUNK + 100)
    assert report["replay"] == {"deltas": 3, "stored_nbytes": stored, "nbytes": nbytes, "seconds": 0.006}
    assert any(note["text"].startswith("3 deltas to replay: ") for note in report["notes"])
    counted = Counted(monkeypatch)
    done = ckpt(*arguments)
    assert done.code == 0
    assert "3 deltas to replay: " in done.out
    assert set(counted.chunks.values()) == {1}
    assert len(counted.chunks) == 3 * 2


def _entries(folder: Path) -> Iterator[ParameterEntry]:
    return iter(manifest.load(folder / manifest.NAME).entries)
