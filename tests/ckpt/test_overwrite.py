"""A target is replaced only when the new checkpoint is whole, and a kill leaves the old or the new one."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt
from ckpt.pipeline import folder_target
from ckpt.pipeline.removal import (
    delete_beside,
    finish_removals,
    remove_checkpoint,
    replace_file_or_folder,
    set_aside_path,
)
from ckpt_cli.main import USAGE
from ckpt_formats.core.folders import replaced_file
from damage import NOT_FOUND, OUTPUT, SAMPLES
from damage import ckpt as command
from killing import killed, points, spread
from object_stores import StoreServer

LOCKED = 11


def source(folder: Path, value: float) -> Path:
    save_file({"w": np.full((4, 4), value, np.float32), "b": np.zeros(4, np.float32)}, folder / f"{value}.safetensors")
    return folder / f"{value}.safetensors"


def value_of(path: Path) -> float:
    checkpoint = ckpt.open(path)
    assert set(checkpoint) == {"w", "b"}
    (value,) = set(checkpoint["w"].weight[:].ravel().tolist())
    return float(value)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["out", "out.safetensors", "out.ucp"])
def test_overwrite_replaces_a_checkpoint_and_leaves_nothing_beside_it(name: str, tmp_path: Path) -> None:
    target = tmp_path / "place" / name
    target.parent.mkdir()
    assert command("convert", source(tmp_path, 1.0), target, "--overwrite").code == 0
    refused = command("convert", source(tmp_path, 2.0), target)
    assert (refused.code, "--overwrite" in refused.err, value_of(target)) == (OUTPUT, True, 1.0)
    assert command("convert", source(tmp_path, 2.0), target, "--overwrite", "--dry-run").code == 0
    assert value_of(target) == 1.0
    done = command("convert", source(tmp_path, 2.0), target, "--overwrite")
    assert (done.code, value_of(target), names(target.parent)) == (0, 2.0, {name})
    assert done.out.startswith(f"wrote {target}: ")


def test_second_to_replace_a_checkpoint_is_refused_while_the_first_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take for a remainder, and delete, what is about to get the name, or has just got it."""
    place = tmp_path / "place"
    place.mkdir()
    target = place / "out.safetensors"
    ckpt.save(ckpt.open(source(tmp_path, 1.0)), target)
    codes = list[int]()

    def exchange_late(new: Path, path: Path) -> None:
        convert = ("convert", source(tmp_path, 3.0), target, "--overwrite")
        for words in (convert, ("clean", target), ("protect", target)):
            codes.append(command(*words).code)
        removed = set_aside_path(target)
        removed.touch()
        assert finish_removals(place) == []
        removed.unlink()
        replace_file_or_folder(new, path)

    monkeypatch.setattr("ckpt.job.replacing.replace_file_or_folder", exchange_late)
    ckpt.save(ckpt.open(source(tmp_path, 2.0)), target, overwrite=True)
    assert codes == [LOCKED, LOCKED, LOCKED]
    assert (value_of(target), names(place)) == (2.0, {target.name})


def test_a_target_is_replaced_also_if_another_process_sweeps_its_folder_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, make_staging = tmp_path / "out.safetensors", folder_target.make_staging
    overwrite(source(tmp_path, 1.0), target)

    def swept(folder: Path, path: Path) -> None:
        make_staging(folder, path)
        monkeypatch.setattr(folder_target, "make_staging", make_staging)
        folder_target.sweep(tmp_path)
        assert not folder.exists()

    monkeypatch.setattr(folder_target, "make_staging", swept)
    overwrite(source(tmp_path, 2.0), target)
    assert value_of(target) == 2.0


def test_a_job_that_would_replace_a_target_raises_its_own_error(tmp_path: Path) -> None:
    target, new = tmp_path / "out.safetensors", source(tmp_path, 2.0)
    overwrite(source(tmp_path, 1.0), target)
    opened = ckpt.open(new)
    new.unlink()
    with pytest.raises(ckpt.NotFoundError, match=r"2\.0\.safetensors: cannot be read"):
        ckpt.save(opened, target, overwrite=True)
    assert value_of(target) == 1.0


def test_overwrite_replaces_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command("convert", source(tmp_path, 1.0), tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    done = command("convert", source(tmp_path, 2.0), ".", "--overwrite")
    assert (done.code, value_of(tmp_path / "out")) == (0, 2.0), done.err
    again = command("convert", source(tmp_path, 3.0), "../out/.", "--overwrite")
    assert (again.code, value_of(tmp_path / "out")) == (10, 2.0)
    assert "the current folder was removed or replaced" in again.err


def test_overwrite_removes_the_checksums_and_the_parity_of_the_old_file(tmp_path: Path) -> None:
    target, parity = tmp_path / "out.safetensors", tmp_path / ".out.safetensors.ckpt-parity"
    assert command("convert", source(tmp_path, 1.0), target, "--seal", "--protect", 1).code == 0
    assert parity.is_dir()
    ckpt.save(ckpt.open(source(tmp_path, 2.0)), target, overwrite=True)
    assert command("verify", target).code == 0
    assert not (tmp_path / "out.safetensors.ckpt-seal").exists()
    assert command("repair", target).code == NOT_FOUND  # it would set back what fits no hash of the old file
    assert value_of(target) == 2.0


@pytest.mark.slow
def test_kills_leave_the_old_file_with_its_checksums_and_parity_or_the_new_one_without(tmp_path: Path) -> None:
    old, new, place = source(tmp_path, 1.0), source(tmp_path, 2.0), tmp_path / "place"
    target = place / "out.safetensors"
    work = partial(ckpt.save, ckpt.open(new), target, overwrite=True)

    def begin() -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        ckpt.save(ckpt.open(old), target)
        ckpt.seal(target)
        ckpt.protect(target, 1)

    begin()
    whole, values, count = names(place), set(), points(work, place)
    for point in range(count - 14, count):
        begin()
        assert killed(work, place, point)
        value, repaired = value_of(target), command("repair", target).code
        assert command("verify", target).code == 0
        assert repaired == 0 if value == 1.0 else repaired in (NOT_FOUND, OUTPUT), point
        ckpt.clean(target)
        assert names(place) == (whole if value == 1.0 else {target.name}), point
        values.add(value)
    assert values == {1.0, 2.0}


@pytest.mark.slow
def test_a_second_name_that_a_kill_left_goes_with_its_file_and_what_lies_beside_the_next_one_counts(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    target = folder / "model.safetensors"
    second = replaced_file(target)

    def begin() -> None:
        ckpt.save(ckpt.open(source(tmp_path, 1.0)), target)
        ckpt.seal(target)
        ckpt.protect(target, 1)
        second.hardlink_to(target)  # killed before the exchange

    begin()
    data = target.read_bytes()
    target.write_bytes(data[:-1] + b"\0")
    assert command("repair", target).code == 0
    assert target.read_bytes() == data
    second.hardlink_to(target)
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)  # as `rsync -a` and `cp -r -p`: the two names become two files
    assert command("repair", copied / target.name).code == 0
    for place in (folder, copied):
        ckpt.clean(place / target.name)
        assert names(place) == {target.name, f"{target.name}.ckpt-seal", f".{target.name}.ckpt-parity"}
    second.hardlink_to(target)
    remove_checkpoint(target)
    assert names(folder) == set()

    begin()
    source(tmp_path, 2.0).rename(target)  # killed after it
    assert command("verify", folder).code == 0
    target.unlink()
    delete_beside(target)
    refused = command("convert", source(tmp_path, 2.0), target)
    assert (refused.code, "belongs to model.safetensors, which is gone" in refused.err) == (OUTPUT, True)
    ckpt.clean(target)
    begin()


def test_convert_and_copy_write_nothing_beside_the_seal_or_the_parity_of_a_file_that_is_gone(tmp_path: Path) -> None:
    target, copied = tmp_path / "out.safetensors", tmp_path / "copied.safetensors"
    for option in ("--seal", "--protect=1"):
        assert command("convert", source(tmp_path, 1.0), target, option).code == 0
        ckpt.save(ckpt.open(source(tmp_path, 2.0)), copied)
        target.unlink()
        for name, path in (("convert", source(tmp_path, 2.0)), ("copy", copied)):
            refused = command(name, path, target)
            assert (refused.code, "belongs to out.safetensors, which is gone" in refused.err) == (OUTPUT, True)
        copied.unlink()
        delete_beside(target)


@pytest.mark.parametrize("name", ["home", "run", "notes.txt", "link"])
def test_overwrite_refuses_what_is_not_one_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("ten years of work")
    (tmp_path / "notes.txt").write_text("mine")
    for step in (1, 2):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
        save_file({"w": np.ones(2)}, tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors")
    ckpt.save(ckpt.open(source(tmp_path, 1.0)), tmp_path / "u")
    (tmp_path / "link").symlink_to("u")
    before = names(tmp_path)
    with pytest.raises(ckpt.errors.OutputError):
        ckpt.save(ckpt.open(source(tmp_path, 1.0)), tmp_path / name, "universal", overwrite=True)
    assert names(tmp_path) == before


def test_overwrite_refuses_its_own_source_shards_and_stores(tmp_path: Path, server: StoreServer, user: object) -> None:
    path = source(tmp_path, 1.0)
    ckpt.save(ckpt.open(path), tmp_path / "u")
    done = command("convert", tmp_path / "u", tmp_path / "u", "--overwrite")
    assert (done.code, value_of(tmp_path / "u")) == (OUTPUT, 1.0)
    assert command("convert", path, tmp_path / "u", "--overwrite", "--shard", "0/2").code == USAGE
    with pytest.raises(ckpt.UnsupportedError, match="replaced at once"):
        ckpt.save(ckpt.open(path), server.put("old.safetensors", path), overwrite=True)


def test_restore_and_compress_replace_a_checkpoint(tmp_path: Path) -> None:
    chain = SAMPLES / "universal-1-delta"
    ckpt.save(ckpt.open(source(tmp_path, 1.0)), tmp_path / "u")
    assert command("restore", chain, tmp_path / "u", "--step", "10", "--overwrite").code == 0
    assert ckpt.open(tmp_path / "u").step == 10
    for value in (1.0, 2.0):
        assert command("compress", source(tmp_path, value), tmp_path / "small.ucp", "--overwrite").code == 0
        assert value_of(tmp_path / "small.ucp") == value


def overwrite(path: Path, target: Path) -> None:
    ckpt.save(ckpt.open(path), target, ckpt.Universal(), overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["out", "out.ucp"])
def test_kills_leave_the_old_or_the_new_checkpoint(name: str, tmp_path: Path) -> None:
    old, new, place = source(tmp_path, 1.0), source(tmp_path, 2.0), tmp_path / "place"
    place.mkdir()
    target = place / name
    ckpt.save(ckpt.open(old), target, ckpt.Universal())
    count = points(partial(overwrite, new, target), place)
    values = set()
    for point in spread(count, 12):
        overwrite(old, target)
        assert killed(partial(overwrite, new, target), place, point)
        values.add(value_of(target))
        if point % 3 == 0:
            ckpt.clean(target)
            assert names(place) == {name}
    assert values == {1.0, 2.0}
    overwrite(new, target)
    assert (value_of(target), names(place)) == (2.0, {name})
