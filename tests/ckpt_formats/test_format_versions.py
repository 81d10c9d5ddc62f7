"""Manifests and chains of a version that this program does not know are refused by every command that reads them."""

import json
import shutil
from pathlib import Path

import pytest

from ckpt_formats.containers import sealed_json
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import chain_file
from damage import SAMPLES, ckpt

UNSUPPORTED = 22
PLAIN, CHAIN = SAMPLES / "universal-1-plain", SAMPLES / "universal-1-delta"


def state_version(path: Path, version: object) -> None:
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    path.write_bytes(sealed_json.dump({**fields, "version": version}))


def assert_refused(*arguments: object) -> None:
    done = ckpt(*arguments)
    assert done.code == UNSUPPORTED, done
    assert "this program reads version" in done.err
    assert "Upgrade ckpt." in done.err
    assert "Traceback" not in done.err


def test_a_manifest_of_a_later_version_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(PLAIN, tmp_path / "folder")
    state_version(folder / manifest.NAME, 3)
    assert_refused("inspect", folder)
    assert_refused("verify", folder)
    assert_refused("convert", folder, tmp_path / "out.pt")
    assert_refused("append", tmp_path / "chain", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_chain_of_a_later_version_is_refused(tmp_path: Path) -> None:
    run = shutil.copytree(CHAIN, tmp_path / "run")
    state_version(run / chain_file.NAME, 4)
    for command in ("inspect", "verify", "log"):
        assert_refused(command, run)
    assert_refused("inspect", f"{run}@11")
    assert_refused("restore", run, tmp_path / "out", "--step", 11)
    assert_refused("compact", run, "--keep", "last:1")
    assert_refused("append", run, PLAIN, "--step", 99)


def test_a_member_of_a_later_version_is_refused(tmp_path: Path) -> None:
    run = shutil.copytree(CHAIN, tmp_path / "run")
    state_version(run / "step-0000000011" / manifest.NAME, 3)
    assert_refused("inspect", f"{run}@12")
    assert_refused("inspect", run / "step-0000000012")
    assert_refused("restore", run, tmp_path / "out", "--step", 12)


@pytest.mark.parametrize("version", [0, 3, "1", None, 1.5, True])
def test_format_refuses_what_is_no_version(version: object, tmp_path: Path) -> None:
    folder = shutil.copytree(PLAIN, tmp_path / "folder")
    state_version(folder / manifest.NAME, version)
    assert_refused("inspect", folder)
