"""The one pipeline: the same bytes whatever the effort, and a target that is whole or absent whatever happens."""

import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.job import save
from ckpt.pipeline import Execution, Result, check_complete, plan
from ckpt.pipeline.executors import run_tasks
from ckpt.pipeline.folder_target import open_target
from ckpt.pipeline.job_note import JobNote
from ckpt.pipeline.receipts import from_lines
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Group
from ckpt_formats.core.errors import CorruptError, IncompleteError, LockedError, NoSpaceError, OutputError, RulesError
from ckpt_formats.core.format import FilePlan, Format, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.engines.safetensors import Safetensors
from ckpt_formats.engines.torch_save import Torch
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from held import checkpoint, contents, everything, flip, lay, parameter
from small_disk import mounted, remount

EFFORT = Execution(2, 1 << 20)
SMALL_PACKS = 4000
"""Bytes of a pack, so that each parameter of `many` has one of its own."""
FORMATS: dict[str, WritableFormat] = {
    "universal": Universal(pack_nbytes=SMALL_PACKS),
    "torch": Torch(),
    "safetensors": Safetensors(),
}


def target_of(name: str, folder: Path) -> Path:
    return folder / {"universal": "target", "torch": "target.pt", "safetensors": "target"}[name]


def tree(path: Path) -> dict[str, bytes]:
    """All files of a checkpoint, which is a folder or a file."""
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    return {str(f.relative_to(path.parent)): f.read_bytes() for f in files}


def many(files: int = 6, length: int = 2000) -> Checkpoint:
    """Parameters of different sizes, so that the order of work is known: the largest first."""
    return checkpoint(
        [parameter(f"p{i}", {"model": np.arange(length * (files - i), dtype=np.float32)}) for i in range(files)]
    )


@pytest.mark.parametrize("name", FORMATS)
def test_workers_and_memory_do_not_show_in_the_bytes(name: str, tmp_path: Path) -> None:
    source, written = everything(), []
    for workers in (1, 2, 3, 4):
        for memory in (1, 1 << 14, 1 << 30):
            folder = tmp_path / f"{workers}-{memory}"
            folder.mkdir()
            target = target_of(name, folder)
            format = replace(FORMATS[name], shard_nbytes=100) if name == "safetensors" else FORMATS[name]
            save(source, target, format, resources=Execution(workers, memory))
            written.append(tree(target))
            assert [path.name for path in folder.iterdir()] == [target.name], "nothing is left behind"
    assert all(one == written[0] for one in written)


def announced(name: str, source: Checkpoint) -> tuple[str, ...]:
    return tuple(map(str, FORMATS[name].plan(source).dropped))


@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", FORMATS)
def test_every_format_carries_what_it_can_hold_to_every_other(first: str, second: str, tmp_path: Path) -> None:
    """Exactly: through two formats come the same bits as through one, and what is lost was announced."""
    source = everything()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    save(source, target_of(first, tmp_path / "a"), FORMATS[first], resources=EFFORT)
    between = open_checkpoint(target_of(first, tmp_path / "a"))
    save(between, target_of(second, tmp_path / "b"), FORMATS[second], resources=EFFORT)
    restored = open_checkpoint(target_of(second, tmp_path / "b"))
    expected = contents(source)
    if "safetensors" in (first, second):
        expected = {
            (n, s): v for (n, s), v in expected.items() if s == "model" and source.parameters[n].role != "extra"
        }
        assert any(announced(name, source) for name in (first, second))
    else:
        assert restored.groups == source.groups
        assert restored.extras == source.extras
        assert restored.origin == source.origin
        assert {n: (p.role, p.values) for n, p in restored.parameters.items()} == {
            n: (p.role, p.values) for n, p in source.parameters.items()
        }
        assert not announced(first, source)
    assert contents(restored) == expected
    assert restored.aliases == source.aliases


class Dying(Universal):
    """Stops in the middle of its work, as a killed process would."""

    def __init__(self, after: int, error: BaseException) -> None:
        super().__init__(pack_nbytes=SMALL_PACKS)
        vars(self).update(after=after, error=error, begun=itertools.count(), lock=threading.Lock())

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        with self.lock:
            if next(self.begun) >= self.after:
                raise self.error
        return super().write(folder, part, transfer)


class Counting(Universal):
    """Knows what it was asked to write."""

    def __init__(self) -> None:
        super().__init__(pack_nbytes=SMALL_PACKS)
        vars(self)["files"] = []

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        self.files.append(part.file)
        return super().write(folder, part, transfer)


def interrupted(target: Path, after: int, error: BaseException | None = None) -> None:
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        save(many(), target, Dying(after, error or RuntimeError("killed")), resources=Execution(1, 1 << 20))
    assert not target.exists()


@pytest.mark.parametrize("after", range(7))
@pytest.mark.parametrize("error", [RuntimeError("killed"), KeyboardInterrupt()], ids=["killed", "interrupted"])
def test_a_second_run_does_only_the_rest(after: int, error: BaseException, tmp_path: Path) -> None:
    target = tmp_path / "target"
    if after < 6:
        interrupted(target, after, error)
    format, sums = Counting(), []
    outcome = save(
        many(), target, format, resources=Execution(1, 1 << 20), progress=lambda done, total: sums.append((done, total))
    )
    done = after if after < 6 else 0
    before = sum((target / part.file).stat().st_size for part in format.plan(many()).files[:done])
    assert outcome == Result(target, 6, outcome.nbytes, done, 0, outcome.seconds, resumed_nbytes=before)
    assert len(format.files) == 6 - done
    total = format.plan(many()).nbytes
    assert sums[-1] == (total, total)
    assert {one for _, one in sums} == {total}
    assert sums == sorted(sums)
    assert contents(open_checkpoint(target)) == contents(many())
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_resumed_target_has_the_same_bytes(tmp_path: Path) -> None:
    interrupted(tmp_path / "target", 3)
    save(many(), tmp_path / "target", Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT)
    (tmp_path / "once").mkdir()
    save(many(), tmp_path / "once/target", Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT)
    assert tree(tmp_path / "target") == tree(tmp_path / "once/target")


def test_a_part_that_was_damaged_meanwhile_is_written_anew(tmp_path: Path) -> None:
    target = tmp_path / "target"
    interrupted(target, 4)
    staged = sorted((tmp_path / ".target.ckpt-partial/data/packs").iterdir())
    assert len(staged) == 4
    flip(staged[0], staged[0].stat().st_size - 1)
    flip(staged[1], 9)
    staged[2].unlink()
    format = Counting()
    assert save(many(), target, format, resources=EFFORT).resumed == 1
    assert {f"packs/{path.name}" for path in staged[:3]} <= set(format.files)
    assert contents(open_checkpoint(target)) == contents(many())


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe\x00", b"[]\n[]\n", b'{"plan": 5}\n', b'{"plan": null}'])
def test_job_whose_note_is_damaged_is_started_anew(damage: bytes, tmp_path: Path) -> None:
    target = tmp_path / "target"
    interrupted(target, 4)
    (tmp_path / ".target.ckpt-partial/job").write_bytes(damage)
    assert save(many(), target, Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT).resumed == 0
    assert contents(open_checkpoint(target)) == contents(many())


def test_a_journal_cut_at_any_byte_loses_only_its_end(tmp_path: Path) -> None:
    target, stage = tmp_path / "target", tmp_path / ".target.ckpt-partial"
    interrupted(target, 3)
    kept = tmp_path / "kept"
    stage.rename(kept)
    journal = b"".join(path.read_bytes() for path in sorted((kept / "journal").iterdir()))
    for cut in range(0, len(journal), 41):
        shutil.copytree(kept, stage)
        shutil.rmtree(stage / "journal")
        (stage / "journal").mkdir()
        (stage / "journal" / "receipts-cut").write_bytes(journal[:cut])
        outcome = save(many(), target, Universal(pack_nbytes=SMALL_PACKS), resources=Execution(1, 1 << 20))
        assert outcome.resumed == len(list(from_lines(journal[:cut].decode().splitlines())))
        assert contents(open_checkpoint(target)) == contents(many())
        shutil.rmtree(target)


def test_other_choices_start_anew(tmp_path: Path) -> None:
    target = tmp_path / "target"
    interrupted(target, 4)
    format = Counting()
    assert save(many().select(["p"]), target, format, resources=EFFORT).resumed == 0
    assert len(format.files) == 6


def test_another_source_starts_anew(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save(many(), source, Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT)
    with pytest.raises(RuntimeError):
        save(open_checkpoint(source), tmp_path / "target", Dying(3, RuntimeError()), resources=Execution(1))
    changed = next((source / "packs").iterdir())
    os.utime(changed, ns=(0, 0))
    assert (
        save(open_checkpoint(source), tmp_path / "target", Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT).resumed
        == 0
    )


def test_evidence_of_the_first_run_counts_in_the_second(tmp_path: Path) -> None:
    """Damage of the source that the first run read is found although the second does not read it."""
    source, target = tmp_path / "source", tmp_path / "target"
    save(many(), source, Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT)
    opened = open_checkpoint(source)
    largest = max(opened.files, key=lambda shard: shard.nbytes).path
    times = largest.stat()
    flip(largest, largest.stat().st_size - 1)
    os.utime(largest, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(RuntimeError):
        save(opened, target, Dying(2, RuntimeError()), resources=Execution(1))
    format = Counting()
    with pytest.raises(CorruptError, match="checksum"):
        save(opened, target, format, resources=Execution(1))
    assert len(format.files) == 4, "the damaged part itself was not written again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_damaged_source_leaves_nothing(tmp_path: Path) -> None:
    for name, format in FORMATS.items():
        source = tmp_path / name
        source.mkdir()
        save(many(), source / "source", Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT)
        opened = open_checkpoint(source / "source")
        flip(opened.files[2].path, opened.files[2].nbytes - 1)
        with pytest.raises(CorruptError, match=r"00002|p2"):
            save(opened, target_of(name, source), format, resources=EFFORT)
        assert [path.name for path in source.iterdir()] == ["source"]


CODE = """
import sys, os, signal, time
from pathlib import Path
sys.path[:0] = {paths!r}
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.universal import Universal
from ckpt_formats.registry.opening import open_checkpoint
moves = int(sys.argv[3])
def moved(done, total):
    global moves
    moves -= 1
    if moves < 0:
        {act}
format = Universal(pack_nbytes=4000)
save(open_checkpoint(Path(sys.argv[1])), sys.argv[2], format, resources=Execution(2, 1), progress=moved)
"""


def run(act: str, source: Path, target: Path, moves: int, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    code = CODE.format(paths=[p for p in sys.path if p], act=act)
    arguments = [sys.executable, "-c", code, str(source), str(target), str(moves)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, preexec_fn=limited)


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_the_target_absent_or_whole(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save(many(20, 5_000), source, Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT)
    expected, resumed = contents(open_checkpoint(source)), []
    for moves in (0, 1, 3, 6, 10, 15, 18):
        target = tmp_path / f"target{moves}"
        killed = run("os.kill(os.getpid(), signal.SIGKILL)", source, target, moves)
        assert killed.returncode == -signal.SIGKILL
        assert not target.exists()
        resumed.append(
            save(open_checkpoint(source), target, Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT).resumed
        )
        assert contents(open_checkpoint(target)) == expected
        assert tree(target).keys() == {f.replace("source", target.name, 1) for f in tree(source)}
    assert resumed[0] == 0
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_an_interrupt_in_the_middle_stops_soon_and_leaves_no_target(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save(many(5, 20_000), source, Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT)
    act = "os.kill(os.getpid(), signal.SIGINT) if moves == -1 else time.sleep(0.05)"
    began = time.monotonic()
    stopped = run(act, source, target, 2)
    assert stopped.returncode in (130, -signal.SIGINT)
    assert "KeyboardInterrupt" in stopped.stderr
    assert time.monotonic() - began < 30
    assert not target.exists()
    assert save(open_checkpoint(source), target, Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT).files == 5


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_an_output_error_and_the_next_run_goes_on(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save(many(5, 20_000), source, Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT)
    failed = run("pass", source, target, 0, limit=250_000)
    assert "OutputError" in failed.stderr
    assert not target.exists()
    assert save(open_checkpoint(source), target, Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT).files == 5
    assert contents(open_checkpoint(target)) == contents(open_checkpoint(source))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where we may mount one."""
    with mounted(tmp_path / "disk", "1m") as disk:
        yield disk


def test_a_full_disk_is_said_and_the_next_run_goes_on(small_disk: Path) -> None:
    source, ballast = many(8, 8_000), small_disk / "ballast"
    ballast.write_bytes(bytes(400 << 10))
    with pytest.raises(NoSpaceError, match="target: no space left"):
        save(source, small_disk / "target", Universal(pack_nbytes=SMALL_PACKS), resources=Execution(1, 1 << 20))
    assert not (small_disk / "target").exists()
    ballast.unlink()
    with pytest.raises(NoSpaceError):  # it is still too large; but the journal survives a full disk
        save(source, small_disk / "target", Universal(pack_nbytes=SMALL_PACKS), resources=Execution(1, 1 << 20))
    half = source.select(["p[567]"])
    save(half, small_disk / "target", Universal(pack_nbytes=SMALL_PACKS), resources=Execution(1, 1 << 20))
    assert contents(open_checkpoint(small_disk / "target")) == contents(half)


def test_a_read_only_file_system_is_an_output_error(small_disk: Path) -> None:
    remount(small_disk, "ro")
    with pytest.raises(OutputError):
        save(many(), small_disk / "target", Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT)


def test_two_processes_cannot_write_one_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with open_target(target, EFFORT, None), pytest.raises(LockedError):
        save(many(), target, Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT)
    save(many(), target, Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT)


def test_a_target_that_exists_is_never_touched(tmp_path: Path) -> None:
    file, folder, link, dangling = (tmp_path / name for name in ("file", "folder", "link", "dangling"))
    file.write_text("precious")
    folder.mkdir()
    link.symlink_to(folder)
    dangling.symlink_to(tmp_path / "nowhere")
    for target in (file, folder, link, dangling):
        with pytest.raises(OutputError, match="exists already"):
            save(many(), target, Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT)
    assert file.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "folder", "link"]


def test_a_target_that_appears_meanwhile_is_never_touched(tmp_path: Path) -> None:
    target = tmp_path / "target"

    def progress(done: int, total: int) -> None:
        target.mkdir(exist_ok=True)
        (target / "precious").write_text("theirs")

    with pytest.raises(OutputError, match="exists already"):
        save(many(), target, Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT, progress=progress)
    assert [path.name for path in target.iterdir()] == ["precious"]


def test_a_target_inside_or_around_its_source_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "run" / "source"
    source.mkdir(parents=True)
    (tmp_path / "link").symlink_to(source)
    held = replace(many(), path=source)
    for target in (source / "target", source / "parameters/target", tmp_path / "link" / "target"):
        with pytest.raises(OutputError, match="the target is inside the source"):
            plan(held, target, Universal(pack_nbytes=SMALL_PACKS))
    for target in (source, tmp_path / "run", tmp_path):
        with pytest.raises(OutputError):
            plan(held, target, Universal(pack_nbytes=SMALL_PACKS))
    with pytest.raises(OutputError, match="should hold the target"):
        plan(held, tmp_path / "absent" / "target", Universal(pack_nbytes=SMALL_PACKS))
    plan(held, tmp_path / "run" / "source2", Universal(pack_nbytes=SMALL_PACKS))


def test_save_refuses_an_incomplete_source_before_it_writes(tmp_path: Path) -> None:
    holed = replace(many().parameters["p5"].states[MODEL].crop(Box((0,), (1000,))), shape=(2000,))
    source = many()
    bad = replace(source.parameters["p5"], states={MODEL: holed})
    with pytest.raises(IncompleteError, match=r"`p5` model: no file holds block \[1000:2000\]"):
        save(
            replace(source, parameters={**source.parameters, "p5": bad}),
            tmp_path / "t",
            Universal(pack_nbytes=SMALL_PACKS),
            resources=EFFORT,
        )
    assert not list(tmp_path.iterdir())
    holes = {f"p{i}": replace(bad, name=f"p{i}") for i in range(5)}
    for count in (2, 3, 4, 5):
        with pytest.raises(IncompleteError) as caught:
            check_complete(replace(source, parameters=dict(list(holes.items())[:count])))
        assert [name for name in holes if f"`{name}`" in caught.value.what] == list(holes)[: min(count, 3)]
        assert caught.value.what.endswith(f" and {count - 3} more") == (count > 3)
    for stray in (replace(source, aliases={"a": "nobody"}), replace(source, groups=(Group({}, ("nobody",)),))):
        with pytest.raises(IncompleteError, match="nobody"):
            check_complete(stray)


def test_an_error_that_names_no_place_is_given_its_tensor(tmp_path: Path) -> None:
    class Refusing(Universal):
        def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
            raise RulesError("no")

    with pytest.raises(RulesError, match="tensor p0: no"):
        save(many(), tmp_path / "target", Refusing(), resources=Execution(1))
    assert not list(tmp_path.iterdir())


def test_a_file_that_ends_too_early_while_it_is_copied_leaves_nothing(tmp_path: Path) -> None:
    values = np.arange(1000, dtype=np.float32)
    raw = lay(tmp_path / "source.bin", values, 0, (4,))
    source = checkpoint([replace(parameter("w", {MODEL: values}), states={MODEL: Tensor.of(raw)})])
    os.truncate(tmp_path / "source.bin", 3000)
    with pytest.raises(CorruptError, match="ends at byte 3000"):
        save(source, tmp_path / "target", Universal(pack_nbytes=SMALL_PACKS), resources=EFFORT)
    assert [path.name for path in tmp_path.iterdir()] == ["source.bin"]


@pytest.mark.parametrize("name", FORMATS)
def test_until_it_is_committed_nobody_takes_it_for_a_checkpoint(name: str, tmp_path: Path) -> None:
    """The law of `WritableFormat`: parts may be written in any order and again, and only `commit` makes a whole."""
    source, format = many(), FORMATS[name]
    if name == "safetensors":
        format = Safetensors(shard_nbytes=20_000)
    plan = format.plan(source)
    parts = plan.files
    assert parts == format.plan(source).files or name == "torch"
    receipts: dict[str, Receipt] = {}
    for part in (*reversed(parts), *parts):
        with _reader() as reader:
            receipts[part.file] = format.write(tmp_path, part, Transfer(reader))
        if plan.single_file is None and name == "universal":
            assert not format.detect(tmp_path)
    format.commit(tmp_path, source, [receipts[part.file] for part in parts])
    whole = tmp_path if plan.single_file is None else tmp_path / str(plan.single_file)
    assert format.detect(whole)
    opened: Format = format
    assert contents(opened.read(whole, ReadOptions())) == contents(source)


def _reader():  # type: ignore[no-untyped-def]
    from ckpt_formats.core.files import Reader

    return Reader()


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_work_in_flight_is_bounded_and_everything_is_done_once(in_flight: int) -> None:
    taken, given, most = 0, 0, 0

    def items() -> Iterator[int]:
        nonlocal taken, most
        for i in range(50):
            taken += 1
            most = max(most, taken - given)
            yield i

    results: Counter[int] = Counter()
    with ThreadPoolExecutor(4) as pool:
        for result in run_tasks(pool, lambda i: i * i, items(), in_flight):
            given += 1
            results[result] += 1
    assert results == Counter(i * i for i in range(50))
    assert most <= in_flight + 1


def test_run_tasks_starts_nothing_after_an_error_and_waits_for_what_runs() -> None:
    started: list[int] = []
    ended: list[int] = []
    gate = threading.Event()

    def work(i: int) -> int:
        started.append(i)
        if i == 3:
            gate.set()
            raise ValueError("the third")
        gate.wait(120)
        time.sleep(0.05)
        ended.append(i)
        return i

    with ThreadPoolExecutor(4) as pool, pytest.raises(ValueError, match="the third"):
        list(run_tasks(pool, work, range(1000), 4))
    assert len(started) < 20
    assert sorted(started) == sorted([*ended, 3])


class AtOnce(Executor):
    """Has done everything by the time it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except ValueError as error:
            future.set_exception(error)
        return future


def test_run_tasks_raises_the_error_of_the_earliest_item() -> None:
    def work(i: int) -> int:
        if i in (3, 5, 6, 7):
            raise ValueError(str(i))
        return i

    given: list[int] = []
    with pytest.raises(ValueError, match="3"):
        given.extend(run_tasks(AtOnce(), work, range(100), 8))
    assert given == [0, 1, 2, 4]


def test_a_consumer_that_stops_leaves_nothing_running() -> None:
    running = 0
    lock = threading.Lock()

    def work(i: int) -> int:
        nonlocal running
        with lock:
            running += 1
        time.sleep(0.01)
        with lock:
            running -= 1
        return i

    with ThreadPoolExecutor(4) as pool:
        stream = run_tasks(pool, work, range(1000), 8)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert running == 0


def test_the_slabs_of_all_workers_fit_the_memory() -> None:
    for workers in (1, 2, 8, 64):
        for memory in (1 << 26, 1 << 28, 1 << 33):
            assert 4 * workers * Execution(workers, memory).slab <= memory
    assert Execution(1, 1).slab > 0


def test_target_notes_its_job_first(tmp_path: Path) -> None:
    with open_target(tmp_path / "target", EFFORT, None) as stage:
        stage.begin(JobNote.of("the job", Path("source"), tmp_path / "target", "universal", [], None))
        assert json.loads((stage.folder / "job").read_bytes())["id"] == "the job"
        assert stage.receipts(Universal()) == {}
        stage.discard()
    assert not list(tmp_path.iterdir())
