"""Formats of installed packages: read, written and listed as those of ckpt, and never a traceback if one is broken."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click import Context

import ckpt
import ckpt.ext
from ckpt.original import original_format
from ckpt_cli.main import cli
from ckpt_formats.core.checkpoint import OriginalForm
from ckpt_formats.core.tensor import read
from ckpt_formats.registry import writable
from damage import NOT_FOUND, SAMPLES, UNSUPPORTED
from damage import ckpt as command
from held import checkpoint, parameter
from plugin_packages import PAGE, install, install_format_of_the_page

SAMPLE = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
SMALL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((), np.int64)}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path for packages; what is imported of it is forgotten afterwards."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def npy(packages: Path) -> Path:
    install_format_of_the_page(packages)
    return packages


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of safetensors."""
    path = tmp_path_factory.mktemp("small") / "small.safetensors"
    ckpt.save(checkpoint([parameter(name, {"model": array}) for name, array in SMALL.items()]), path)
    return path


# The page


def test_the_format_of_the_page_goes_through_the_pipeline(npy: Path, tmp_path: Path) -> None:
    source = ckpt.open(SAMPLE).cast("fp32")
    out = tmp_path / "arrays"
    ckpt.save(source, out, "npy")
    copied = ckpt.open(out)
    assert copied.format == "npy"
    assert list(copied) == list(source)
    assert ckpt.verify(copied) == []
    for file in out.glob("*.npy"):
        np.load(file)
    ckpt.save(copied, tmp_path / "back", ckpt.Universal())
    back = ckpt.open(tmp_path / "back")
    for name, one in source.items():
        for other in (copied, back):
            assert np.array_equal(read(other[name].weight), read(one.weight)), name
    assert original_format(back, tmp_path / "again")[0].name == "npy"


def test_the_format_of_the_page_refuses_what_it_should(npy: Path, tmp_path: Path) -> None:
    with pytest.raises(ckpt.UnsupportedError, match="bfloat16"):
        ckpt.Job(ckpt.open(SAMPLE), tmp_path / "out", writable("npy")).plan()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "names.json").write_text(json.dumps({"w": "../../etc/passwd"}))
    with pytest.raises(ckpt.errors.UnsafeError):
        ckpt.open(tmp_path / "bad")


def test_the_page_lists_the_names_of_ext() -> None:
    table = PAGE.read_text("utf-8").partition("<!-- ext -->\n")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split(" | ")[0])]
    assert sorted(listed) == sorted(ckpt.ext.__all__)
    assert all(getattr(ckpt.ext, name).__doc__ for name in ckpt.ext.__all__ if name not in ("DTYPES", "MODEL"))


# The shell


def test_the_commands_know_the_format_of_a_package(npy: Path, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "arrays"
    assert command("convert", small, out, "--to", "npy").code == 0
    assert sorted(path.name for path in out.glob("names*")) == ["names.json"]
    assert json.loads(command("inspect", out, "--json").out)["format"] == "npy"
    assert command("copy", out, tmp_path / "copied").code == 0
    assert command("compress", out, tmp_path / "compressed").code == 0
    assert command("decompress", tmp_path / "compressed", tmp_path / "back").code == 0
    assert (tmp_path / "back" / "names.json").is_file()
    (row,) = [row for row in json.loads(command("formats", "--json").out)["formats"] if row["package"]]
    assert (row["name"], row["package"], row["written"]) == ("npy", "npy-ckpt 1.0", True)
    assert "from the package npy-ckpt 1.0" in command("formats").out


def test_a_process_of_its_own_knows_the_format_of_a_package(npy: Path, small: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ckpt_cli", "convert", small, tmp_path / "arrays", "--to", "npy"]
    assert subprocess.run(words, env={**os.environ, "PYTHONPATH": str(npy)}).returncode == 0
    assert (tmp_path / "arrays" / "names.json").is_file()


def test_a_shell_completes_the_name_of_a_package(npy: Path) -> None:
    (to,) = [option for option in cli.get_command(Context(cli), "convert").params if option.name == "format_name"]
    assert [item.value for item in to.shell_complete(Context(cli), "np")] == ["npy"]


def test_a_name_that_no_package_provides_is_wrong_usage(npy: Path, small: Path, tmp_path: Path) -> None:
    done = command("convert", small, tmp_path / "out", "--to", "zarr")
    assert done.code == 2
    assert ", npy" in done.err
    with pytest.raises(ckpt.InvalidArgumentError, match="there is no format zarr"):
        ckpt.save(ckpt.open(small), tmp_path / "out", "zarr")


def test_a_package_is_not_imported_before_it_is_needed(packages: Path, small: Path, tmp_path: Path) -> None:
    install(packages, "late", "late = late_format:Late", late_format="raise SystemExit('imported')")
    assert command("convert", small, tmp_path / "out", "--to", "torch").code == 0
    assert command("inspect", tmp_path / "out").code == 0
    assert "late_format" not in sys.modules


# Broken packages


def begin_with(folder: Path, method: str, line: str) -> None:
    """Put a line at the begin of a method of the page's format, which is in this folder."""
    code = (folder / "npy_folder.py").read_text()
    changed, count = re.subn(rf"(    def {method}\(.*:\n)", rf"\1        {line}\n", code)
    assert count == 1
    (folder / "npy_folder.py").write_text(changed)


BASE = """
from ckpt.ext import *
class Late(Format):
    name, summary = "late", "a format"
    def detect(self, path): return path.name == "mine"
    def read(self, path, options): return {}["missing"]
"""
BROKEN: dict[str, tuple[str, str]] = {
    "an import that fails": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "a syntax error": ("def", "SyntaxError"),
    "an exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "a class that is missing": ("", "AttributeError"),
    "a class of something else": ("class Late: pass", "not a class derived from ckpt.ext.Format"),
    "another name": (BASE.replace('"late"', '"other"'), "`name` of late_format:Late is not 'late'"),
    "no method": (
        "from ckpt.ext import *\nclass Late(Format): name = summary = 'late'",
        "TypeError: Can't instantiate",
    ),
    "a terminal's codes": ("raise ValueError('\\x1b[2J')", "ValueError: \\x1b[2J"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_is_named(case: str, packages: Path, small: Path, tmp_path: Path) -> None:
    code, reason = BROKEN[case]
    install(packages, "late", "late = late_format:Late", late_format=code)
    done = command("convert", small, tmp_path / "out", "--to", "late")
    assert done.code == UNSUPPORTED
    assert "the format `late` of the package late 1.0 cannot be loaded" in done.err
    assert reason in done.err
    assert "Traceback" not in done.err
    done = command("formats")
    assert (done.code, "late 1.0 cannot be loaded" in done.err) == (0, True)
    (tmp_path / "unknown").write_bytes(b"unknown")
    done = command("inspect", tmp_path / "unknown")
    assert done.code == NOT_FOUND
    assert "the package late 1.0 cannot be loaded" in done.err


def test_a_broken_package_is_a_notice_where_another_reads_the_path(npy: Path, small: Path, tmp_path: Path) -> None:
    install(npy, "late", "late = late_format:Late", late_format="import no_such_module")
    ckpt.save(ckpt.open(small), tmp_path / "arrays", writable("npy"))
    (notice,) = [notice for notice in ckpt.open(tmp_path / "arrays").notices if "late 1.0" in str(notice)]
    assert "cannot be loaded" in str(notice)


FAILING: dict[str, tuple[str, str]] = {
    "detect": (BASE.replace('path.name == "mine"', "1 / 0"), "fails: ZeroDivisionError"),
    "read": (BASE, "fails: KeyError: 'missing'"),
    "no checkpoint": (BASE.replace('{}["missing"]', "1"), "TypeError: it returned int, not Checkpoint"),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_format_that_fails_to_read_is_named(case: str, packages: Path, tmp_path: Path) -> None:
    code, reason = FAILING[case]
    install(packages, "late", "late = late_format:Late", late_format=code)
    (tmp_path / "mine").write_bytes(b"mine")
    done = command("inspect", tmp_path / "mine")
    assert done.code == (NOT_FOUND if case == "detect" else UNSUPPORTED)
    assert "package late 1.0" in done.err
    assert reason in done.err


@pytest.mark.parametrize("method", ["plan", "write", "commit"])
def test_a_format_that_fails_to_write_is_named(method: str, npy: Path, small: Path, tmp_path: Path) -> None:
    begin_with(npy, method, "1 / 0")
    with pytest.raises(ckpt.UnsupportedError, match=r"`npy` of the package npy-ckpt 1\.0 fails: ZeroDivisionError"):
        ckpt.save(ckpt.open(small), tmp_path / "out", writable("npy"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["plan", "write"])
def test_a_format_that_returns_something_else_is_named(method: str, npy: Path, small: Path, tmp_path: Path) -> None:
    begin_with(npy, method, "return 1")
    with pytest.raises(ckpt.UnsupportedError, match=r"fails: TypeError: it returned int, not (Plan|Receipt)"):
        ckpt.save(ckpt.open(small), tmp_path / "out", writable("npy"))


def test_a_full_disk_stays_one_when_a_package_writes(npy: Path, small: Path, tmp_path: Path) -> None:
    begin_with(npy, "write", "raise OSError(28, 'No space left on device')")
    with pytest.raises(ckpt.errors.NoSpaceError):
        ckpt.save(ckpt.open(small), tmp_path / "out", writable("npy"))


# Entry points

WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "the name of a format of ckpt": (
        lambda folder: install(folder, "late", "torch = late_format:Late"),
        "'torch' of the package late 1.0 is ignored: ckpt has a format of this name",
    ),
    "a name with other characters": (
        lambda folder: install(folder, "late", "La te = late_format:Late"),
        "'La te' of the package late 1.0 is ignored: a name has",
    ),
    "two packages": (
        lambda folder: [install(folder, name, "late = late_format:Late") for name in ("late", "later")],
        "several packages provide the format `late`: late 1.0, later 1.0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_entry_point_that_cannot_be_used_is_noted(case: str, packages: Path) -> None:
    prepare, reason = WRONG[case]
    prepare(packages)
    done = command("formats")
    assert done.code == 0
    assert reason in done.err
    assert writable("torch") == ckpt.Torch()


def test_entry_points_that_are_no_text_of_the_form_name_their_package(packages: Path, tmp_path: Path) -> None:
    install(packages, "late", "late")
    with pytest.raises(ckpt.UnsupportedError, match="the entry points of the package late cannot be read"):
        writable("late")
    (tmp_path / "unknown").write_bytes(b"unknown")
    with pytest.raises(ckpt.NotFoundError) as refused:
        ckpt.open(tmp_path / "unknown")
    assert "the package late" in str(refused.value.hint)


def test_a_file_of_a_package_that_is_not_installed_any_more_becomes_universal(small: Path, tmp_path: Path) -> None:
    source = ckpt.open(small)
    object.__setattr__(source, "original", OriginalForm("late"))
    format, (note,) = original_format(source, tmp_path / "out")
    assert format == ckpt.Universal()
    assert "there is no format late" in str(note)
