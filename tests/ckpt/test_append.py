"""Append reads the state before from where it still lies: equal files, and work that no length of a chain changes."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.chains import tip
from ckpt.chains import write as chain_write
from ckpt.chains.append import append
from ckpt.chains.compact import Retention, compact
from ckpt.chains.restore import open_step, restore
from ckpt.chains.write import DeltaPolicy
from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin
from ckpt_formats.core.chunking import DEFAULT_ELEMENTS as CHUNK
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.checked import StateDiffers
from damage import ckpt
from effort import TIMES
from held import checkpoint, contents, flip, parameter

ENDINGS = {"torch": ".pt", "one file": ".ucp"}
ELEMENTS = CHUNK + 5
"""Of the larger parameter: two chunks."""


def states(count: int, elements: int = ELEMENTS) -> Iterator[Checkpoint]:
    """A run held in memory: a matrix and a vector that move a little, and their moments."""
    random = np.random.default_rng(0)
    held = {
        name: [random.standard_normal(shape).astype(np.float32) for _ in range(3)]
        for name, shape in {"a": (elements,), "b": (30, 7)}.items()
    }
    for step in range(1, count + 1):
        parameters = []
        for name, (w, m, v) in held.items():
            g = random.standard_normal(w.shape).astype(np.float32)
            m, v = m * np.float32(0.9) + g, np.abs(v) * np.float32(0.99) + g * g
            w = w - np.float32(1e-4) * m
            held[name] = [w, m, v]
            kept = {"master": w, "model": w.astype(DTYPES["bfloat16"]), "exp_avg": m, "exp_avg_sq": v}
            parameters.append(parameter(name, kept, step=step))
        yield checkpoint(parameters, (Group({"lr": 1e-4}, ("a", "b")),), origin=Origin("held", None, step))


def saved_states(at: Path, count: int, form: str = "universal", elements: int = ELEMENTS) -> list[Path]:
    """The run in files: all checkpoints of one format."""
    paths = []
    for state in states(count, elements):
        paths.append(at / f"saved{state.step}{ENDINGS.get(form, '')}")
        save(state, paths[-1], writable("universal" if form == "one file" else form))
    return paths


ONE = Execution(workers=1)


def add(run: Path, path: Path, parent: Path | None = None, policy: DeltaPolicy | None = None) -> object:
    opened = None if parent is None else open_checkpoint(parent)
    return append(run, open_checkpoint(path), None, policy or DeltaPolicy(), ONE, None, opened)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def last_member(run: Path) -> dict[str, bytes]:
    return files(run / chain_file.read(run).members[-1].folder)


def forget(run: Path) -> None:
    """The chain no longer states where its last member was appended from."""
    (run / chain_file.NAME).write_bytes(chain_file.dump(replace(chain_file.read(run), appended_from=None)))


@pytest.mark.parametrize("form", ["one file", "torch", "dcp"])
def test_files_are_equal_wherever_the_state_before_is_read(form: str, tmp_path: Path) -> None:
    saved = saved_states(tmp_path, 4, form)
    results: list[dict[str, bytes]] = []
    for way in ("given", "found", "replayed"):
        run = tmp_path / "chain"
        for path in saved[:3]:
            add(run, path)
        if way == "replayed":
            forget(run)
        add(run, saved[3], saved[2] if way == "given" else None)
        results.append(last_member(run))
        assert contents(open_step(run, None, ReadOptions()).checkpoint) == contents(open_checkpoint(saved[3]))
        shutil.rmtree(run)
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("state", ["master", "exp_avg"])
def test_a_parent_that_differs_in_one_chunk_is_named_and_nothing_is_written(state: str, tmp_path: Path) -> None:
    saved, run = saved_states(tmp_path, 3), tmp_path / "chain"
    for path in saved[:2]:
        add(run, path)
    last = open_checkpoint(saved[1])
    values = np.array(last.parameters["a"].states[state])
    values.view(np.uint32)[-1] ^= 1
    other = {**last.parameters}
    kept = {name: np.array(tensor) for name, tensor in last.parameters["a"].states.items()}
    other["a"] = parameter("a", {**kept, state: values}, step=2)
    save(replace(last, parameters=other), tmp_path / "other", writable("universal"))
    before = files(run)
    with pytest.raises(StateDiffers, match=f"`a`: chunk 1 of 2 of its state `{state}`"):
        add(run, saved[2], tmp_path / "other")
    done = ckpt("append", run, saved[2], "--parent", tmp_path / "other")
    assert done.code == 20
    assert "chunk 1 of 2" in done.err
    assert files(run) == before


def test_a_source_that_was_replaced_is_noticed_and_the_chain_is_replayed(tmp_path: Path) -> None:
    saved, run, expected = saved_states(tmp_path, 3), tmp_path / "chain", tmp_path / "expected"
    for path in saved[:2]:
        add(run, path)
    shutil.copytree(run, expected)
    forget(expected)
    add(expected, saved[2])
    state = open_checkpoint(saved[1])
    changed = np.array(state.parameters["b"].states["master"]) + 1
    kept = {name: np.array(tensor) for name, tensor in state.parameters["b"].states.items()}
    save(
        replace(state, parameters={**state.parameters, "b": parameter("b", {**kept, "master": changed}, step=2)}),
        tmp_path / "changed",
        writable("universal"),
        resources=Execution(),
    )
    shutil.rmtree(saved[1])
    (tmp_path / "changed").rename(saved[1])
    done = ckpt("append", run, saved[2])
    assert done.code == 0, done.err
    assert "`b`: chunk 0 of 1 of its state `master`" in done.err
    assert last_member(run) == last_member(expected)


def test_states_that_the_parent_lacks_are_replayed(tmp_path: Path) -> None:
    saved, run, expected = saved_states(tmp_path, 3), tmp_path / "chain", tmp_path / "expected"
    for path in saved[:2]:
        add(run, path)
    shutil.copytree(run, expected)
    forget(expected)
    add(expected, saved[2])
    save(open_checkpoint(saved[1]).select(only=["a"]), tmp_path / "part", writable("universal"))
    written = append(
        run, open_checkpoint(saved[2]), None, DeltaPolicy(), Execution(), None, open_checkpoint(tmp_path / "part")
    )
    assert "4 of 8 states are not in" in str(written.notes[0])
    assert last_member(run) == last_member(expected)
    save(
        open_checkpoint(saved[1]).rename({"a": "c", "b": "d"}),
        tmp_path / "none",
        writable("universal"),
        resources=Execution(),
    )
    (tmp_path / "more").mkdir()
    with pytest.raises(UnsupportedError, match="none of the states"):
        add(expected, saved_states(tmp_path / "more", 4)[3], tmp_path / "none")


def test_the_values_of_another_step_are_refused(tmp_path: Path) -> None:
    saved, run = saved_states(tmp_path, 4, elements=100), tmp_path / "chain"
    for path in saved[:3]:
        add(run, path)
    with pytest.raises(StateDiffers):
        add(run, saved[3], saved[1])
    add(run, saved[3], saved[2])


def tips(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if "tip-" in path.name)


@pytest.mark.parametrize("codec", ["auto", "subspace:step_size=0.5"])
def test_the_tip_is_the_last_state_and_a_restore_reads_it_alone(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plain, policy = tmp_path / "chain", tmp_path / "plain", DeltaPolicy(codec, tip=codec == "auto")
    for state in states(4):
        append(run, state, None, policy, ONE)
        append(plain, state, None, replace(policy, tip=False), ONE)
        if codec != "auto":  # as if it had no tip
            (plain / chain_file.NAME).write_bytes(chain_file.dump(replace(chain_file.read(plain), tip=None)))
        assert last_member(run) == last_member(plain)
        assert tips(run) == ([] if state.step == 1 else [f"tip-{state.step:010d}"])
    chain = chain_file.read(run)
    assert chain.tip is not None
    assert chain.members[-1].exact == (codec == "auto")
    expected = open_step(plain, None, ReadOptions()).checkpoint
    opened, read_of = open_step(run, None, ReadOptions()), set[Path]()
    real = Reader.read_into

    def noted(reader: Reader, path: Path, *more: Any) -> None:
        read_of.add(path)
        real(reader, path, *more)

    monkeypatch.setattr(Reader, "read_into", noted)
    restore(opened, tmp_path / "restored", writable("universal"), ONE)
    assert {path.relative_to(run).parts[0] for path in read_of if path.is_relative_to(run)} == {chain.tip.folder}
    monkeypatch.undo()
    restored = open_checkpoint(tmp_path / "restored")
    assert contents(restored) == contents(expected)
    assert restored.errors.keys() == expected.errors.keys()
    assert ckpt("verify", run).code == 0
    assert f'"folder": "{chain.tip.folder}"' in ckpt("log", run, "--json").out


def test_a_tip_that_is_damaged_or_missing_is_replayed(tmp_path: Path) -> None:
    run, checkpoints = tmp_path / "chain", list(states(5))
    for state in checkpoints[:3]:
        append(run, state, None, DeltaPolicy(tip=True), ONE)
    pack = run / tips(run)[0] / "packs/00000.safetensors"
    flip(pack, pack.stat().st_size // 2)
    tip_state, _ = tip.opened(run, chain_file.read(run))
    assert [finding.kind for finding in find_problems(tip_state[0], Execution(), lambda nbytes: None)] != []
    done = ckpt("restore", run, tmp_path / "out")
    assert done.code == 20
    assert f"Remove the folder {tips(run)[0]}" in done.err
    written = append(run, checkpoints[3], None, DeltaPolicy(tip=True), ONE)
    assert "read in another way" in str(written.notes[0])
    shutil.rmtree(run / tips(run)[0])
    assert tip.opened(run, chain_file.read(run))[1][0].kind == "unreadable"
    append(run, checkpoints[4], None, DeltaPolicy(tip=True), ONE)
    for state in checkpoints:
        assert contents(open_step(run, state.step, ReadOptions()).checkpoint) == contents(state)
    assert ckpt("verify", run).code == 0


def test_a_base_needs_no_tip_and_what_a_crash_left_of_one_is_removed(tmp_path: Path) -> None:
    run, checkpoints = tmp_path / "chain", list(states(4, 1000))
    for state in checkpoints[:2]:
        append(run, state, None, DeltaPolicy(tip=True), ONE)
    (run / "tip-0000000077").mkdir()
    (run / ".tip-0000000003.ckpt-partial").mkdir()
    append(run, checkpoints[2], None, DeltaPolicy(tip=True, base_every=2), ONE)
    assert tips(run) == []
    assert chain_file.read(run).tip is None


def test_bases_are_placed_where_replaying_would_take_longer_than_writing(tmp_path: Path) -> None:
    """Told from bytes alone: at the same place each time, and for states of any size."""
    run, before = tmp_path / "chain", None
    most = int(4 * chain_write.WRITE_NS / chain_write.REPLAY_NS)
    for state in states(most + 4, 100):
        append(run, state, None, DeltaPolicy(base_by_cost=True, check=False), ONE, None, before)
        before = state
    kinds = [member.kind for member in chain_file.read(run).members]
    assert kinds == ["base", *["delta"] * most, "base", *["delta"] * 2]


def test_base_every_takes_a_number_or_auto(tmp_path: Path) -> None:
    saved, run = saved_states(tmp_path, 2, elements=100), tmp_path / "chain"
    for path in saved:
        assert ckpt("append", run, path, "--base-every", "auto").code == 0
    assert [member.kind for member in chain_file.read(run).members] == ["base", "delta"]
    for wrong in ("0", "often"):
        assert ckpt("append", run, saved[1], "--base-every", wrong).code == 2


@pytest.mark.parametrize("retention", [Retention(("last:2",)), Retention(("all",), upto=3)])
def test_compact_leaves_no_tip_of_another_state(retention: Retention, tmp_path: Path) -> None:
    run, checkpoints = tmp_path / "chain", list(states(4, 1000))
    for state in checkpoints:
        append(run, state, None, DeltaPolicy(tip=True), ONE)
    compact(run, retention, DeltaPolicy(), ONE)
    chain = chain_file.read(run)
    assert tips(run) == ([] if chain.tip is None else [chain.tip.folder])
    last = checkpoints[chain.members[-1].step - 1]
    assert contents(open_step(run, None, ReadOptions()).checkpoint) == contents(last)
    assert chain.tip is None or chain.tip.content == chain.members[-1].content


class Work:
    """What appending reads: manifests with their indexes, and bytes of files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.indexes = self.nbytes = 0
        load, read = manifest.load, Reader.read_into

        def counted_load(path: Path) -> manifest.Manifest:
            self.indexes += 1
            return load(path)

        def counted_read(reader: Reader, path: Path, offset: int, out: memoryview, *seal: object) -> None:
            self.nbytes += len(out)
            read(reader, path, offset, out, *seal)  # type: ignore[arg-type]

        monkeypatch.setattr(manifest, "load", counted_load)
        monkeypatch.setattr(Reader, "read_into", counted_read)

    def of(self, action: Callable[[], object]) -> tuple[int, int]:
        before = self.indexes, self.nbytes
        action()
        return self.indexes - before[0], self.nbytes - before[1]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((3, 9), id="short"),
        pytest.param((5, 24 * TIMES), id="long", marks=pytest.mark.slow),  # campaigns append 480
    ],
)
def test_the_length_of_the_chain_changes_nothing(
    lengths: tuple[int, ...], given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 3 indexes are read, the same number of bytes, and the files are those that a replay leads to."""
    run, work, reads = tmp_path / "chain", Work(monkeypatch), dict[int, tuple[int, int]]()
    before: Checkpoint | None = None
    for number, state in enumerate(states(max(lengths) + 1, elements=1000)):
        if number in lengths:
            save(state, after := tmp_path / f"after{number}", writable("universal"))
            source, parent = open_checkpoint(after), before if given else None
            read_alone = shutil.copytree(run, tmp_path / f"replayed{number}", symlinks=True)
            forget(read_alone)
            copied = shutil.copytree(run, tmp_path / f"chain{number}")
            reads[number] = work.of(
                lambda to=copied, new=source, old=parent: append(to, new, None, DeltaPolicy(), ONE, None, old)
            )
            if number <= 50:
                append(read_alone, source, None, DeltaPolicy(), ONE)
                assert last_member(read_alone) == last_member(copied)
        if number + 1 in lengths:
            save(state, last := tmp_path / f"last{number}", writable("universal"))
            state = open_checkpoint(last)
        append(run, state, None, DeltaPolicy(check=False), ONE, None, before)
        before = state
    assert {member.kind for member in chain_file.read(run).members[1:]} == {"delta"}
    assert len(set(reads.values())) == 1
    assert next(iter(reads.values()))[0] <= 3
