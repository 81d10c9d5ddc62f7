"""Manifests and chains of unreleased versions are refused, in one sentence that names the commit which reads them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_formats.containers import sealed_json
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import file as index
from damage import SAMPLES, ckpt

UNSUPPORTED = 22
PLAIN, CHAIN = SAMPLES / "universal-1-plain", SAMPLES / "universal-1-delta"


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "version 2": lambda fields: fields.update(version=2),
    "version 3": lambda fields: fields.update(version=3),
    "saved_as": lambda fields: fields.update(saved_as={"format": "torch"}),
}
FILES = {"parameters": [{"name": "w", "role": "parameter", "file": "parameters/w.safetensors"}]}
"""A field of a version 1 that had a file for each parameter."""
CHAINS: dict[str, Callable[[dict[str, Any]], object]] = {
    "version 2": lambda fields: fields.update(version=2),
    "losses": lambda fields: fields["members"][0].update(losses={}),
}


def edited(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    edit(fields)
    path.write_bytes(sealed_json.dump(fields))


def assert_refused(*arguments: object, commit: str = "357a565") -> None:
    done = ckpt(*arguments)
    assert done.code == UNSUPPORTED, done
    assert f"written by an unreleased version of ckpt, whose form only commit {commit} of ckpt still reads" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("form", MANIFESTS)
def test_a_manifest_of_an_earlier_form_is_refused(form: str, tmp_path: Path) -> None:
    folder = shutil.copytree(PLAIN, tmp_path / "folder")
    edited(folder / manifest.NAME, MANIFESTS[form])
    assert_refused("inspect", folder)
    assert_refused("verify", folder)
    assert_refused("convert", folder, tmp_path / "out.pt")
    assert_refused("append", tmp_path / "chain", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_manifest_of_a_file_for_each_parameter_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(PLAIN, tmp_path / "folder")
    edited(folder / manifest.NAME, lambda fields: fields.update(FILES))
    assert_refused("inspect", folder, commit="fc24d33")


@pytest.mark.parametrize("form", CHAINS)
def test_a_chain_of_an_earlier_form_is_refused(form: str, tmp_path: Path) -> None:
    run = shutil.copytree(CHAIN, tmp_path / "run")
    edited(run / index.NAME, CHAINS[form])
    for command in ("inspect", "verify", "log"):
        assert_refused(command, run)
    assert_refused("inspect", f"{run}@11")
    assert_refused("restore", run, tmp_path / "out", "--step", 11)
    assert_refused("compact", run, "--keep", "last:1")
    assert_refused("append", run, PLAIN, "--step", 99)


@pytest.mark.parametrize("form", MANIFESTS)
def test_a_member_of_an_earlier_form_is_refused(form: str, tmp_path: Path) -> None:
    run = shutil.copytree(CHAIN, tmp_path / "run")
    edited(run / "step-0000000011" / manifest.NAME, MANIFESTS[form])
    assert_refused("inspect", f"{run}@12")
    assert_refused("inspect", run / "step-0000000012")
    assert_refused("restore", run, tmp_path / "out", "--step", 12)


@pytest.mark.parametrize("version", [0, 4, "1", None, 1.5, True])
def test_a_version_that_does_not_exist_yet_is_refused(version: object, tmp_path: Path) -> None:
    folder = shutil.copytree(PLAIN, tmp_path / "folder")
    edited(folder / manifest.NAME, lambda fields: fields.update(version=version))
    done = ckpt("inspect", folder)
    assert done.code == UNSUPPORTED, done
    assert "this program reads version 1" in done.err
