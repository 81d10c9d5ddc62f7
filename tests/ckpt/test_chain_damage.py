"""A damaged chain: named before anything is written, and what does not stand on the damage is restored all the same."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_formats.containers import sealed_json
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import file as index
from damage import ckpt
from held import contents, flip
from training import chained

STEPS = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four states, `step1` to `step4`, and their chain."""
    return chained(tmp_path_factory.mktemp("whole"), STEPS)


def member(run: Path, step: int) -> Path:
    return run / f"step-{step:010d}"


def largest(run: Path, step: int) -> Path:
    """The file of the parameter with most bytes."""
    return max(member(run, step).rglob("*.safetensors"), key=lambda path: path.stat().st_size)


def remove(run: Path) -> None:
    shutil.rmtree(member(run, 3))


def swap(run: Path) -> None:
    aside = run / "aside"
    member(run, 3).rename(aside)
    member(run, 2).rename(member(run, 3))
    aside.rename(member(run, 2))


def truncate(run: Path) -> None:
    path = largest(run, 3)
    os.truncate(path, path.stat().st_size - 10)


def alter_values(run: Path) -> None:
    path = largest(run, 3)
    flip(path, path.stat().st_size // 2)


def alter_manifest(run: Path) -> None:
    flip(member(run, 3) / manifest.NAME, 500)


def remove_manifest(run: Path) -> None:
    (member(run, 3) / manifest.NAME).unlink()


def remove_file(run: Path) -> None:
    largest(run, 3).unlink()


def replace_by_another_run(run: Path) -> None:
    """The same step of a run that was trained otherwise, whole and with every checksum right."""
    other = run.parent / "other"
    shutil.rmtree(other, ignore_errors=True)
    other.mkdir()
    chained(other, 3, "momentum")
    remove(run)
    shutil.copytree(member(other / "run", 3), member(run, 3))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (remove, "step-0000000003"),
    "reordered": (swap, "step-000000000"),
    "truncated": (truncate, "step-0000000003"),
    "altered": (alter_values, "step-0000000003"),
    "altered manifest": (alter_manifest, "step-0000000003"),
    "without manifest": (remove_manifest, "step-0000000003"),
    "without a file": (remove_file, "step-0000000003"),
    "of another run": (replace_by_another_run, "step-0000000003"),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_nothing_is_written(name: str, whole: Path, tmp_path: Path) -> None:
    harm, says = DAMAGES[name]
    run = shutil.copytree(whole / "run", tmp_path / "run")
    harm(run)
    out = tmp_path / "out"
    out.mkdir()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    good = 1 if name == "reordered" else 2
    for told in (
        ("restore", run, out / "it"),
        ("restore", run, out / "it", "--to", "dcp"),
        ("convert", run, out / "it"),
    ):
        done = ckpt(*told)
        assert done.code == 20, done.err
        assert says in done.err
        assert "Traceback" not in done.err
        assert f"--step {good}" in done.err or told[0] == "convert"
        assert os.listdir(out) == []
    done = ckpt("verify", run, "--json")
    assert done.code == 20
    said = json.loads(done.out)
    assert says in json.dumps(said["findings"])
    assert set(said["damaged_steps"]) >= {3, 4}
    assert 1 not in said["damaged_steps"]
    assert ckpt("restore", run, out / "good", "--step", str(good)).code == 0
    assert contents(open_checkpoint(out / "good")) == contents(open_checkpoint(whole / f"step{good}"))
    if name != "altered":  # which shows only where the bytes are read
        assert ckpt("append", run, whole / "step4", "--step", "9").code == 20
    assert ckpt("compact", run, "--keep", "4").code == 20
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.slow
def test_every_flipped_byte_of_a_delta_is_found(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole / "run", tmp_path / "run")
    expected = contents(open_checkpoint(run))
    path = min(member(run, 3).rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    for byte in range(0, path.stat().st_size, 7):
        flip(path, byte)
        assert ckpt("verify", run).code == 20, byte
        flip(path, byte)
    assert contents(open_checkpoint(run)) == expected


@pytest.mark.parametrize("byte", [0, 30, 60, 200, 900])
def test_a_damaged_list_is_refused_and_the_members_can_still_be_read(byte: int, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole / "run", tmp_path / "run")
    flip(run / index.NAME, byte)
    for told in (
        ("log", run),
        ("restore", run, tmp_path / "out"),
        ("append", run, whole / "step4"),
        ("compact", run),
    ):
        done = ckpt(*told)
        assert done.code == 20, done.err
        assert "chain.json" in done.err
    assert not (tmp_path / "out").exists()
    assert contents(open_checkpoint(member(run, 4))) == contents(open_checkpoint(whole / "step4"))


def edited(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change a file with a checksum in its first line, and make the checksum fit again."""
    said = json.loads(path.read_text())
    del said["checksum"]
    edit(said)
    path.write_bytes(sealed_json.dump(said))


def entry(said: dict[str, Any]) -> dict[str, Any]:
    """The parameter whose delta is largest."""
    found: dict[str, Any] = max((e for e in said["parameters"] if "delta" in e), key=lambda e: e["delta"]["nbytes"])
    return found


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no parent": lambda s: s.pop("parent"),
    "a parent that is a list": lambda s: s.update(parent=[]),
    "a parent at an absolute path": lambda s: s["parent"].update(path="/etc"),
    "a parent without a path": lambda s: s["parent"].update(path=""),
    "a parent of an impossible id": lambda s: s["parent"].update(content="blake2b-256:xyz"),
    "another parent": lambda s: s["parent"].update(content="blake2b-256:" + 64 * "0"),
    "version 2": lambda s: s.update(version=2),
    "a delta of no state": lambda s: entry(s)["delta"].update(states=[]),
    "a delta of a state that is not there": lambda s: entry(s)["delta"]["states"].append("none"),
    "a delta of a state twice": lambda s: entry(s)["delta"]["states"].append(entry(s)["delta"]["states"][0]),
    "a delta without a state": lambda s: entry(s)["delta"]["states"].pop(),
    "a delta against what is not in it": lambda s: entry(s)["delta"]["parent_states"].append("none"),
    "a delta in no chunks": lambda s: entry(s)["delta"].update(chunk=[0]),
    "a delta in huge chunks": lambda s: entry(s)["delta"].update(chunk=[1 << 40]),
    "a delta in other chunks": lambda s: entry(s)["delta"].update(chunk=[7]),
    "a delta elsewhere": lambda s: entry(s)["delta"].update(offset=entry(s)["delta"]["offset"] + 8),
    "a longer delta": lambda s: entry(s)["delta"].update(nbytes=1 << 50),
    "a codec that nobody has": lambda s: entry(s)["delta"]["codec"].update(name="none"),
    "a codec without a name": lambda s: entry(s)["delta"].update(codec={}),
    "a codec with options that it has not": lambda s: entry(s)["delta"]["codec"].update(more=1),
    "a state in the delta and elsewhere": lambda s: entry(s)["states"]["param"].update(offset=0, nbytes=4),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_delta_is_refused(name: str, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole / "run", tmp_path / "run")
    edited(member(run, 3) / manifest.NAME, HOSTILE[name])
    done = ckpt("restore", member(run, 3), tmp_path / "out")
    assert done.code in (20, 22), done.err
    assert "Traceback" not in done.err
    assert "fault of ckpt" not in done.err
    assert not (tmp_path / "out").exists()


def test_a_delta_that_is_its_own_ancestor(whole: Path, tmp_path: Path) -> None:
    own = shutil.copytree(member(whole / "run", 3), tmp_path / "own")
    content = manifest.load(own / manifest.NAME).content
    edited(own / manifest.NAME, lambda said: said["parent"].update(content=content, path="../own"))
    done = ckpt("inspect", own)
    assert done.code == 20
    assert "its own ancestor" in done.err


HOSTILE_LISTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no members": lambda s: s.update(members=[]),
    "a first member that is a delta": lambda s: s["members"].pop(0),
    "a step back": lambda s: s["members"].reverse(),
    "a member left out": lambda s: s["members"].pop(1),
    "a folder outside": lambda s: s["members"][1].update(folder="../step-0000000002"),
    "a folder twice": lambda s: s["members"][1].update(folder=s["members"][0]["folder"]),
    "a step that is a text": lambda s: s["members"][1].update(step="2"),
    "a kind that nobody knows": lambda s: s["members"][1].update(kind="other"),
    "another content": lambda s: s["members"][3].update(content="blake2b-256:" + 64 * "0"),
    "a version from the future": lambda s: s.update(version=3),
    "another format": lambda s: s.update(format="ckpt-universal"),
}


@pytest.mark.parametrize("name", HOSTILE_LISTS)
def test_a_hostile_list_is_refused(name: str, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole / "run", tmp_path / "run")
    edited(run / index.NAME, HOSTILE_LISTS[name])
    done = ckpt("restore", run, tmp_path / "out")
    assert done.code in (20, 22), done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()
