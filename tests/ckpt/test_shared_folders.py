"""In a folder that several users write, another one lays links, pipes and folders where ckpt writes: all refused."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpt as library
from ckpt.chains.change import change
from ckpt.pipeline import Execution
from ckpt.pipeline.folder_target import SHARDS, folder_of
from ckpt.pipeline.scratch import scratch_folder
from ckpt_formats.core.errors import LockedError, UnsafeError
from ckpt_formats.core.locking import lock
from ckpt_formats.core.own_folder import check_own, create_own, make_own, read_own
from ckpt_formats.universal.chain import folder as chain_folder
from damage import SAMPLES, UNSAFE, ckpt

ZERO1 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
OTHER_USER = 65_534
SECRET = b"of the victim\n"

Lay = Callable[[Path, Path], None]
"""Lays something at a path; the second path is the folder of the victim, which has files `file`, `data/file`."""


def _link(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "file")


def _link_to_nothing(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "new")


def _link_to_folder(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "data")


def _pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def _hard_link(path: Path, victim: Path) -> None:
    os.link(victim / "file", path)


def _file_of_another(path: Path, victim: Path) -> None:
    path.write_bytes(b"")
    os.chown(path, OTHER_USER, OTHER_USER)


def _writable(path: Path, victim: Path) -> None:
    path.write_bytes(b"")
    path.chmod(0o666)


FILES = (_link, _link_to_nothing, _pipe, _hard_link, _file_of_another, _writable)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    (folder / "data").mkdir(parents=True)
    (folder / "file").write_bytes(SECRET)
    (folder / "data" / "file").write_bytes(SECRET)
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder in which everybody may write."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def tree(folder: Path) -> dict[str, bytes | None]:
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def lay(how: Lay, path: Path, victim: Path) -> None:
    if how is _file_of_another and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    how(path, victim)


def check_refused(victim: Path, path: Path, *words: object) -> None:
    before = tree(victim)
    done = ckpt(*words)
    assert done.code == UNSAFE, done.err
    assert f"where: {path}" in done.err
    assert "hint: Remove it" in done.err
    assert tree(victim) == before


@pytest.mark.parametrize("how", FILES)
@pytest.mark.parametrize("name", ["job", "data/packs/00000.safetensors"])
def test_convert_refuses_a_staging_folder_with_foreign_files(name: str, how: Lay, shared: Path, victim: Path) -> None:
    stage = shared / ".out.ckpt-partial"
    path = stage / name
    path.parent.mkdir(parents=True)
    (stage / "lock").touch()
    lay(how, path, victim)
    check_refused(victim, path, "convert", ZERO1, shared / "out")
    assert not os.path.lexists(shared / "out")
    check_refused(victim, path, "clean", shared / "out")


@pytest.mark.parametrize("mode", [0o700, 0o755])
@pytest.mark.parametrize("how", FILES)
def test_a_folder_with_foreign_files_is_refused_each_time(how: Lay, mode: int, shared: Path, victim: Path) -> None:
    stage = shared / "stage"
    (stage / "data").mkdir(parents=True)
    stage.chmod(mode)
    lay(how, stage / "data" / "file", victim)
    before = tree(victim)
    if how is _writable and mode == 0o700:
        check_own(stage)  # nobody else can reach the file
        return
    for _ in range(2):
        with pytest.raises(UnsafeError) as refused:
            make_own(stage)
        assert refused.value.where == str(stage / "data" / "file")
    assert tree(victim) == before


def test_convert_refuses_a_data_folder_that_is_a_link(shared: Path, victim: Path) -> None:
    stage = shared / ".out.ckpt-partial"
    stage.mkdir()
    (stage / "data").symlink_to(victim / "data")
    check_refused(victim, stage / "data", "convert", ZERO1, shared / "out")


@pytest.mark.parametrize("how", [_link, _link_to_nothing, _link_to_folder, _pipe, _hard_link])
def test_convert_refuses_what_is_no_folder(how: Lay, shared: Path, victim: Path) -> None:
    how(shared / ".out.ckpt-partial", victim)
    check_refused(victim, shared / ".out.ckpt-partial", "convert", ZERO1, shared / "out")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_folders_of_another_user_are_refused(shared: Path, victim: Path) -> None:
    stage = shared / ".out.ckpt-partial"
    stage.mkdir()
    (stage / "lock").touch()
    os.chown(stage, OTHER_USER, OTHER_USER)
    check_refused(victim, stage, "convert", ZERO1, shared / "out")
    assert f"belongs to another user (uid {OTHER_USER})" in ckpt("convert", ZERO1, shared / "out").err


def test_a_folder_that_others_could_write_is_refused(shared: Path, victim: Path) -> None:
    stage = shared / ".out.ckpt-partial"
    stage.mkdir()
    stage.chmod(0o777)
    check_refused(victim, stage, "convert", ZERO1, shared / "out")


def test_a_folder_of_the_user_that_was_given_the_name_is_not_emptied(shared: Path, victim: Path) -> None:
    """Who may rename in a shared folder gives a folder of the victim the name of one that ckpt removes."""
    (victim / "published").touch()
    (shared / "out").mkdir()
    for name in (".out.ckpt-partial", f".out.{'0' * 16}{SHARDS}"):
        moved = victim.rename(shared / name)
        before = tree(moved)
        done = ckpt("convert", ZERO1, shared / "out")
        assert done.code == 30
        done = ckpt("clean", shared / "out")
        assert done.code == UNSAFE, done.err
        assert tree(moved) == before
        moved.rename(victim)


def test_a_run_is_continued_in_a_folder_that_others_could_only_read(shared: Path) -> None:
    """As an earlier version made it."""
    stage = shared / ".out.ckpt-partial"
    (stage / "data").mkdir(parents=True)
    (stage / "lock").touch()
    assert ckpt("convert", ZERO1, shared / "out").code == 0
    assert os.listdir(shared) == ["out"]
    mask = os.umask(0)
    os.umask(mask)
    assert (shared / "out").stat().st_mode & 0o777 == 0o777 & ~mask


@pytest.mark.parametrize(
    ("name", "how"),
    [*(("job", how) for how in FILES), ("published", _link_to_nothing), ("lease", _link), ("journal", _pipe)],
)
def test_shards_refuse_foreign_files(name: str, how: Lay, shared: Path, victim: Path) -> None:
    job = library.Job(library.open(ZERO1), shared / "out", library.Universal())
    stage = folder_of(shared / "out", job.id)
    (stage / "attempts").mkdir(parents=True)
    lay(how, stage / name, victim)
    check_refused(victim, stage / name, "convert", ZERO1, shared / "out", "--shard", "0/2")
    check_refused(victim, stage / name, "clean", shared / "out")
    if name == "job":
        check_refused(victim, stage / name, "commit", shared / "out")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_commit_runs_no_command_of_another_user(shared: Path, victim: Path) -> None:
    assert ckpt("convert", ZERO1, shared / "out", "--pack-size", "1", "--shard", "0/2").code == 0
    [stage] = shared.glob(f".*{SHARDS}")
    os.chown(stage, OTHER_USER, OTHER_USER)
    check_refused(victim, stage, "commit", shared / "out")


@pytest.mark.parametrize("how", [_link, _link_to_nothing, _pipe, _hard_link])
def test_a_chain_is_locked_and_replaced_without_following_links(how: Lay, shared: Path, victim: Path) -> None:
    before, run = tree(victim), shared / "run.chain"
    assert ckpt("append", run, ZERO1).code == 0
    how(run / "chain.json.tmp", victim)
    with change(run, Execution()) as changed:
        assert changed.chain is not None
        changed.replace(changed.chain)
    assert chain_folder.peek(run) == changed.chain
    assert tree(victim) == before
    (run / "chain.lock").unlink()
    how(run / "chain.lock", victim)
    check_refused(victim, run / "chain.lock", "append", run, ZERO1)


@pytest.mark.parametrize("how", [_link, _link_to_nothing, _pipe, _hard_link])
def test_own_files_are_plain(how: Lay, shared: Path, victim: Path) -> None:
    before, path = tree(victim), shared / "file"
    how(path, victim)
    with pytest.raises(UnsafeError):
        read_own(path)
    with pytest.raises(UnsafeError), lock(path, LockedError("locked")):
        pass
    os.close(create_own(path))
    path.write_text("own")
    assert read_own(path)[0] == b"own"
    assert tree(victim) == before


def test_scratch_folders_sweep_only_what_ckpt_made(shared: Path, victim: Path) -> None:
    moved = victim.rename(shared / "ckpt-scratch-other")
    (shared / "ckpt-scratch-link").symlink_to(moved)
    before = tree(moved)
    with scratch_folder(shared) as scratch:
        assert scratch.parent.stat().st_mode & 0o777 == 0o700
    assert tree(moved) == before
