"""Disks that fail when they are flushed: the command fails, and what was lost is written again, never believed.

After a failed fsync, Linux calls the lost pages clean: the next fsync of the same file succeeds.
"""

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt.chains.chain import Chain
from ckpt.chains.change import change
from ckpt.chains.write import DeltaPolicy
from ckpt.copying.sealing import seal
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt.pipeline import target as life
from ckpt.pipeline.folder_target import sweep
from ckpt.pipeline.removal import remove_checkpoint, set_aside_path
from ckpt_formats.core import publish
from ckpt_formats.core.files import write_sealed
from ckpt_formats.core.folders import replaced_file
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex
from ckpt_formats.universal.entry import Extent
from ckpt_formats.universal.pack_file import PlacedStates
from clusters import files
from damage import FULL, OUTPUT, SAMPLES, ckpt
from held import states

ZERO1 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
COMMAND = ("convert", ZERO1, "out", "--pack-size", "1")


@dataclass
class Disk:
    """fsync that fails for files: each of them once. It knows which files the disk has taken since."""

    fails: Callable[[Path], bool] = lambda path: False
    error: int = errno.EIO
    lost: set[int] = field(default_factory=set)
    """The numbers of files of which a flush has failed."""
    kept: list[int] = field(default_factory=list)
    """These files, open: a new file never gets the number of a lost one."""

    def fsync(self, descriptor: int) -> None:
        path, number = Path(os.readlink(f"/proc/self/fd/{descriptor}")), os.fstat(descriptor).st_ino
        if number not in self.lost and self.fails(path):
            self.lost.add(number)
            self.kept.append(os.dup(descriptor))
            raise OSError(self.error, os.strerror(self.error))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(os, "fsync", disk.fsync)
    yield disk
    for descriptor in disk.kept:
        os.close(descriptor)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("expected") / "out"
    assert ckpt(*COMMAND[:2], target, *COMMAND[3:]).code == 0
    return files(target)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_written(disk: Disk, expected: dict[str, bytes]) -> None:
    """The target is complete, and none of its files is one that was lost."""
    assert files(Path("out")) == expected
    assert disk.lost
    assert not {path.stat().st_ino for path in Path("out").rglob("*") if path.is_file()} & disk.lost


@dataclass
class Order:
    """What was flushed, what got a name or lost one, in this order: after a loss of power, each may be undone."""

    events: list[tuple[str, str]] = field(default_factory=list)

    def at(self, *event: str) -> int:
        """When this happened last."""
        return max(number for number, one in enumerate(self.events) if one == event)

    def is_flushed_between(self, folder: Path, first: int, last: int) -> bool:
        return ("flush", folder.name) in self.events[first:last]


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Order:
    order = Order()

    def noted(what: str, function: Callable[..., Any], name: Callable[..., object]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            order.events.append((what, Path(os.fsdecode(name(*arguments))).name))  # type: ignore[call-overload]
            return function(*arguments, **options)

        return call

    def target(source: object, target: object, flag: int = 0) -> object:
        return target

    def itself(path: object) -> object:
        return path

    for what, function, name in (
        ("flush", "fsync", lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}")),
        ("name", "link", target),
        ("name", "replace", target),
        ("remove", "unlink", itself),
    ):
        monkeypatch.setattr(os, function, noted(what, getattr(os, function), name))
    monkeypatch.setattr(publish, "renameat2", noted("name", publish.renameat2, target))
    return order


def test_each_step_of_a_replacement_and_of_a_removal_is_on_the_disk_before_the_next(order: Order, place: Path) -> None:
    target, seal_file = place / "out.safetensors", "out.safetensors.ckpt-seal"
    second = replaced_file(target).name
    for value in (1.0, 2.0):
        save_file({"w": np.full(3, value, np.float32)}, place / f"{value}.safetensors")
    save(open_checkpoint(place / "1.0.safetensors"), target)
    seal(target)
    order.events.clear()
    save(open_checkpoint(place / "2.0.safetensors"), target, overwrite=True)
    exchanged, unsealed = order.at("name", target.name), order.at("remove", seal_file)
    assert order.is_flushed_between(place, order.at("name", second), exchanged)
    assert order.is_flushed_between(place, exchanged, unsealed)
    assert order.is_flushed_between(place, unsealed, order.at("remove", second))
    remove_checkpoint(target)
    aside = set_aside_path(target).name
    assert order.is_flushed_between(place, order.at("name", aside), order.at("remove", aside))


def test_a_list_is_on_the_disk_before_it_has_its_name_and_its_name_before_anything_is_removed(
    order: Order, place: Path
) -> None:
    run = place / "run.chain"
    Chain(run).append(next(states(1, 100)), step=1)
    with change(run, Execution(workers=1)) as changed:
        assert changed.chain is not None
        (run / "step-0000000009").write_bytes(b"")
        changed.replace(changed.chain)
        changed.remove_leftovers()
    listed, removed = order.at("name", chain_file.NAME), order.at("remove", "step-0000000009")
    assert order.events[listed - 1][0] == "flush"
    assert order.events[listed - 1][1].startswith(f".{chain_file.NAME}-")
    assert order.is_flushed_between(run, listed, removed)


@pytest.mark.parametrize(("name", "error"), [("00001.safetensors", errno.EIO), ("manifest.json", errno.ENOSPC)])
def test_convert_writes_a_file_again_whose_flush_failed(
    name: str, error: int, disk: Disk, expected: dict[str, bytes]
) -> None:
    disk.error, disk.fails = error, lambda path: path.name == name
    failed = ckpt(*COMMAND)
    assert failed.code == (FULL if error == errno.ENOSPC else OUTPUT)
    assert "Run the same command again to continue" in failed.err
    assert not Path("out").exists()
    disk.fails = lambda path: False
    assert ckpt(*COMMAND).code == 0
    check_written(disk, expected)


def test_convert_writes_all_files_of_a_folder_again_whose_flush_failed(disk: Disk, expected: dict[str, bytes]) -> None:
    disk.fails = lambda path: path.name == "packs"
    failed = ckpt(*COMMAND, "--json")
    assert failed.code == OUTPUT
    assert "the disk did not take what was written" in failed.err
    assert not any(Path(".out.ckpt-partial/data/packs").iterdir())
    assert ckpt(*COMMAND).code == 0
    assert files(Path("out")) == expected


@pytest.mark.parametrize("name", ["00001.safetensors", "manifest.json"])
@pytest.mark.parametrize("later", ["shards", "commit"])
def test_no_later_shard_publishes_a_file_whose_flush_failed(
    later: str, name: str, disk: Disk, expected: dict[str, bytes]
) -> None:
    """The flush fails when the last shard publishes."""
    disk.fails = lambda path: path.name == name and "/commit-" in str(path)
    assert ckpt(*COMMAND, "--shard", "0/2").code == 0
    failed = ckpt(*COMMAND, "--shard", "1/2")
    assert failed.code == OUTPUT, failed.out
    assert not Path("out").exists()
    disk.fails = lambda path: False
    if later == "commit":
        done = ckpt("commit", "out")
        assert done.code == (0 if name == "manifest.json" else 20), done.err
    for shard in ("0/2", "1/2"):
        assert ckpt(*COMMAND, "--shard", shard).code == 0
    check_written(disk, expected)


def test_a_shard_whose_own_flush_failed_fails_and_writes_again(disk: Disk, expected: dict[str, bytes]) -> None:
    disk.fails = lambda path: path.parent.name == "packs" and "/attempts/" in str(path)
    assert ckpt(*COMMAND, "--shard", "0/2").code == OUTPUT
    disk.fails = lambda path: False
    for shard in ("1/2", "0/2"):
        assert ckpt(*COMMAND, "--shard", shard).code == 0
    check_written(disk, expected)


def test_a_shard_fails_when_the_last_flush_fails(disk: Disk, place: Path) -> None:
    assert ckpt(*COMMAND, "--shard", "0/2").code == 0
    disk.fails = lambda path: path == place and (place / "out").exists()
    failed = ckpt(*COMMAND, "--shard", "1/2")
    assert failed.code == OUTPUT
    assert "the disk did not take what was written" in failed.err


@pytest.mark.slow
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_new_member_stays_if_the_list_names_it_although_the_list_was_not_flushed(
    disk: Disk, place: Path, is_listed: bool
) -> None:
    for step, state in enumerate(states(2, 100), 1):
        Chain(place / "other.chain").append(state, step=step, policy=DeltaPolicy(base_every=1))
    Chain(place / "run.chain").append(open_checkpoint(place / "other.chain" / "step-0000000001"))
    first, last = chain_file.read(place / "other.chain").members
    shutil.copytree(place / "other.chain" / last.folder, place / "run.chain" / last.folder)
    disk.fails = lambda path: path == place / "run.chain" if is_listed else path.name.startswith(".chain.json")
    with change(place / "run.chain", Execution(workers=1)) as changed, pytest.raises(OSError, match="error"):
        changed.add(ChainIndex((first, last)), last.folder)
    assert list(Chain(place / "run.chain")) == ([1, 2] if is_listed else [1])
    assert (place / "run.chain" / last.folder).exists() == is_listed
    assert ckpt("diff", "run.chain", "other.chain@2" if is_listed else "other.chain@1").code == 0


def test_a_copy_of_a_file_has_its_seal_although_its_folder_was_not_flushed(disk: Disk, place: Path) -> None:
    save_file({"w": np.zeros(3, np.float32)}, place / "one.safetensors")
    seal(place / "one.safetensors")
    disk.fails = lambda path: path == place and (place / "copy.safetensors").exists()
    assert ckpt("copy", "one.safetensors", "copy.safetensors").code == OUTPUT
    assert {one.name for one in place.iterdir()} >= {"copy.safetensors", "copy.safetensors.ckpt-seal"}


def test_append_names_a_file_system_that_cannot_replace_a_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ckpt("append", "run.chain", ZERO1).code == 0
    before, replace = files(Path("run.chain")), os.replace

    def without_replacing(source: Path, target: Path, **more: int) -> None:
        if Path(target).name == "chain.json" and os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "File exists", str(source), None, str(target))
        replace(source, target, **more)

    monkeypatch.setattr(os, "replace", without_replacing)
    failed = ckpt("append", "run.chain", SAMPLES / "deepspeed-0.19-zero3-bf16-dp4-tied-frozen", "--step", "99")
    assert failed.code == OUTPUT, failed.err
    assert "the file system cannot rename a file over another one (File exists)" in failed.err
    assert "ckpt doctor" in failed.err
    assert files(Path("run.chain"))["chain.json"] == before["chain.json"]


@pytest.mark.parametrize("shard", [(), ("--shard", "0/1")])
def test_convert_names_a_file_system_that_cannot_rename_a_folder(
    shard: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def across(source: Path, target: Path) -> None:
        if Path(target).name == "out":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(publish, "_renameat2", lambda: None)  # a kernel without the call
        patch.setattr(os, "rename", across)
        failed = ckpt(*COMMAND, *shard)
    assert failed.code == OUTPUT
    assert "the file system cannot rename it to the target" in failed.err
    assert "ckpt doctor" in failed.err
    assert not Path("out").exists()
    # What was written is kept for the next run, whatever has the name meanwhile, and for however long.
    for path in Path().glob(".out*/*"):
        os.utime(path, (0, 0))
    Path("out").mkdir()
    sweep(Path())
    Path("out").rmdir()
    done = ckpt(*COMMAND, *shard, "--json")
    assert (done.code, json.loads(done.out)["resumed_files"] > 0) == (0, True), done.out


@pytest.mark.slow
def test_shards_leave_a_target_that_has_come_from_elsewhere_and_do_not_take_it_for_theirs(
    expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def intrude(point: life.Point) -> None:
        if point == "before rename":
            Path("out").mkdir()

    assert ckpt(*COMMAND, "--shard", "0/2").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(life, "reached", intrude)
        assert ckpt(*COMMAND, "--shard", "1/2").code == OUTPUT
    for shard in ("0/2", "1/2"):
        again = ckpt(*COMMAND, "--shard", shard)
        assert (again.code, "exists already" in again.err) == (OUTPUT, True)
    assert not any(Path("out").iterdir())
    Path("out").rmdir()
    assert ckpt(*COMMAND, "--shard", "1/2").code == 0
    assert files(Path("out")) == expected
    shutil.rmtree("out")  # then they write it again, and nothing says any longer that they are done
    assert ckpt(*COMMAND, "--shard", "0/2").code == 0
    for path in Path().glob(".out*/*"):
        os.utime(path, (0, 0))
    assert ckpt(*COMMAND, "--shard", "1/2").code == 0
    assert files(Path("out")) == expected


def test_an_error_without_a_file_is_not_one_of_standard_output(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the error of `close` is: it names no file."""

    def listing(folder: object = ".") -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "listdir", listing)
    failed = ckpt("clean", "out")
    assert failed.code == OUTPUT
    assert "a file cannot be read or written: Input/output error" in failed.err
    assert "standard output" not in failed.err


@pytest.mark.parametrize(("error", "shard"), [(errno.EINVAL, ()), (errno.EOPNOTSUPP, ("--shard", "0/1"))])
def test_folders_that_cannot_be_flushed_are_no_failure(
    error: int, shard: tuple[str, ...], disk: Disk, expected: dict[str, bytes]
) -> None:
    disk.error, disk.fails = error, Path.is_dir
    done = ckpt(*COMMAND, *shard)
    assert done.code == 0, done.err
    assert "note: the file system cannot flush folders to the disk" in done.err
    assert files(Path("out")) == expected


def test_disk_begins_with_a_file_while_it_is_written_if_the_file_is_flushed_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, begun = publish._sync_file_range(), list[tuple[int, int]]()

    def recorded(file: int, start: int, nbytes: int, flags: int) -> int:
        begun.append((start, nbytes))
        return int(call(file, start, nbytes, flags))

    monkeypatch.setattr(publish, "_sync_file_range", lambda: recorded)
    parts = [bytes([number]) * (3 << 20) for number in range(7)]
    for is_flushed in (False, True):
        seal = write_sealed(tmp_path, str(is_flushed), parts, is_flushed)
        assert (tmp_path / str(is_flushed)).read_bytes() == b"".join(parts)
        assert seal.nbytes == 21 << 20
        assert begun == ([(0, 9 << 20), (9 << 20, 9 << 20)] if is_flushed else [])
    monkeypatch.setattr(publish, "_sync_file_range", lambda: None)  # on systems that lack the call
    write_sealed(tmp_path, "without", parts, is_flushed=True)
    assert (tmp_path / "without").read_bytes() == b"".join(parts)


def test_disk_begins_with_states_in_a_single_file_but_with_no_page_that_has_bytes_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, begun = publish._sync_file_range(), list[tuple[int, int]]()

    def recorded(file: int, start: int, nbytes: int, flags: int) -> int:
        begun.append((start, nbytes))
        return int(call(file, start, nbytes, flags))

    monkeypatch.setattr(publish, "_sync_file_range", lambda: recorded)
    mebi = 1 << 20
    with PlacedStates(tmp_path / "single", Extent(0, mebi + 5, 24 * mebi)) as placed:
        for number in range(24):
            placed.write(bytes([number]) * mebi)
    assert begun == [(2 * mebi, 8 * mebi), (10 * mebi, 8 * mebi)]  # the next would end at 26 MiB
    assert (tmp_path / "single").read_bytes()[mebi + 5 :] == b"".join(bytes([n]) * mebi for n in range(24))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EINVAL])
def test_disk_that_refuses_the_beginning_of_a_file_fails_the_command_but_one_that_cannot_begin_early_does_not(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[int]()

    def failing(file: int, start: int, nbytes: int, flags: int) -> int:
        begun.append(start)
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(publish, "_sync_file_range", lambda: failing)
    monkeypatch.setattr(publish, "_EARLY_NBYTES", 1 << 20)
    monkeypatch.chdir(tmp_path)
    save_file({"a": np.arange(1 << 20, dtype=np.float32)}, "model.safetensors")
    done = ckpt("convert", "model.safetensors", "out", "--to", "safetensors")
    if number == errno.EINVAL:
        assert done.code == 0, done.err
        assert begun == [0], "it is not tried again"
        assert (tmp_path / "out/model.safetensors").stat().st_size > 4 << 20
    else:
        assert done.code == (OUTPUT if number == errno.EIO else FULL)
        assert ("the disk did not take" if number == errno.EIO else "no space left on the disk") in done.err
        assert not (tmp_path / "out").exists()
