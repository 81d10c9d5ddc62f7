"""What is published: a wheel with the library and without its sources, and sources from which it can be built."""

import sys
import tarfile
from pathlib import Path

import pytest

import kernel_headers
import wheels

pytest.importorskip("hatchling", reason="make installs it")
pytestmark = pytest.mark.slow


def test_the_wheel_of_this_machine_holds_its_library_and_no_sources(tmp_path: Path) -> None:
    platform = wheels.hatch_build.name_platform()
    print(wheels.check(wheels.build(platform, tmp_path), platform))


def test_the_sources_hold_all_that_a_wheel_is_built_from(tmp_path: Path) -> None:
    name = wheels.build_sources(tmp_path)
    with tarfile.open(name) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {f"codecs/kernels/{path.name}" for path in kernel_headers.SOURCES.glob("*.[ch]")}
    assert len(expected) > 10
    assert expected | {"hatch_build.py", "pyproject.toml", "codecs/ckpt_codecs/native/library.py"} <= names
    assert not [name for name in names if "libckpt" in name]


def test_the_compiler_is_the_same_for_an_installation_and_for_make() -> None:
    if sys.version_info < (3, 11):
        import tomli as tomllib
    else:
        import tomllib

    project = tomllib.loads((wheels.ROOT / "pyproject.toml").read_text())
    (pinned,) = (name for name in project["build-system"]["requires"] if name.startswith("ziglang"))
    assert "==" in pinned
    assert pinned in (wheels.ROOT / "constraints.txt").read_text().splitlines()
