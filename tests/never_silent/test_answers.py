"""What a command answers is neither more nor less than what it knows: NaN, missing checksums, endings, empty paths."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckpt as library
from ckpt.findings.not_finite import NotFinite, find_not_finite
from ckpt.job import save
from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.registry import writable
from ckpt_formats.registry.encoded import uses_codecs
from damage import UNSUPPORTED, ckpt
from held import checkpoint, parameter


def spoiled() -> np.ndarray:
    values = np.linspace(1, 2, 64, dtype=np.float32).reshape(8, 8)
    values[1, 2], values[3, 4] = np.nan, np.inf
    return values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files with a NaN and an infinity in the weight `w`, in several formats, and the same without them."""
    folder = tmp_path_factory.mktemp("answers")
    good = np.linspace(1, 2, 64, dtype=np.float32).reshape(8, 8)
    for name, values in (("bad", spoiled()), ("good", good)):
        parameters = [parameter("w", {"model": values}), parameter("x", {"model": good * (1 + (name == "bad"))})]
        source = checkpoint(parameters)
        for ending in (".safetensors", ".pt"):
            save(source, folder / f"{name}{ending}")
        save(source, folder / name, writable("universal"))
    return folder


@pytest.mark.parametrize("name", ["bad.safetensors", "bad.pt", "bad"])
def test_verify_names_the_tensors_with_nan_and_infinity(name: str, folder: Path) -> None:
    assert find_not_finite(library.open(folder / name)) == [NotFinite("w", "model", 1, 1)]
    ran = ckpt("verify", folder / name, "--values")
    assert ran.code == 0
    assert "note: 2 values are NaN or infinite: w model (1 NaN, 1 infinite)" in ran.err
    assert "2 values are NaN or infinite (" in ran.out
    rows = json.loads(ckpt("verify", folder / name, "--values", "--json").out)["not_finite"]
    assert rows == [{"tensor": "w", "state": "model", "nan": 1, "infinite": 1}]
    assert "no value is NaN or infinite" in ckpt("verify", folder / name.replace("bad", "good"), "--values").out


@pytest.mark.parametrize("name", ["bad.pt", "bad", "coded", "sealed/bad.safetensors"])
def test_verify_names_nan_and_infinity_by_default_where_there_are_checksums(
    name: str, folder: Path, tmp_path: Path
) -> None:
    if name == "coded":
        values = np.tile(spoiled(), (64, 1))
        values[8:] = 1
        source = checkpoint([parameter("w", {"model": values})])
        save(source, folder / name, library.Universal(codec="planes"))
        assert uses_codecs(library.open(folder / name))
    if name.startswith("sealed"):
        (folder / "sealed").mkdir()
        save(library.open(folder / "bad.pt"), folder / name)
        library.seal(folder / name)
    ran = ckpt("verify", folder / name)
    assert ran.code == 0
    assert "note: 2 values are NaN or infinite: w model (1 NaN, 1 infinite)" in ran.err
    assert ran.out.startswith("ok: ")
    assert "; 2 values are NaN or infinite (" in ran.out
    rows = json.loads(ckpt("verify", folder / name, "--json").out)["not_finite"]
    assert rows == [{"tensor": "w", "state": "model", "nan": 1, "infinite": 1}]
    (note,) = library.verify(library.open(folder / name)).notes
    assert note.names == ("w model (1 NaN, 1 infinite)",)


def test_verify_of_a_chain_names_the_first_step_with_nan_or_infinity(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    w, v = (random.normal(size=(32, 32)).astype(np.float32) for _ in range(2))
    chain = library.Chain(tmp_path / "chain")
    for step in range(1, 4):
        w, v = w + np.float32(1e-3), v + np.float32(1e-3)
        w[0, 0] = np.nan if step > 1 else w[0, 0]
        v[: max(0, step - 2), 1] = -np.inf
        chain.append(checkpoint([parameter("w", {"model": w}), parameter("v", {"model": v})]), step=step)
    assert [member.kind for member in chain.index.members] == ["base", "delta", "delta"]
    ran = json.loads(ckpt("verify", tmp_path / "chain", "--json").out)
    rows = [tuple(row.values()) for row in ran["not_finite"]]
    assert rows == [(2, "w", "model", 1, 0), (3, "v", "model", 0, 1)]
    assert ran["ok"]
    (note,) = ran["notes"]
    assert note["text"] == "2 tensors have NaN or infinity, first at"
    assert note["names"] == ["step 2: w model (1 NaN, 0 infinite)", "step 3: v model (0 NaN, 1 infinite)"]


def test_verify_lists_no_value_that_is_finite_or_was_not_read(folder: Path) -> None:
    assert json.loads(ckpt("verify", folder / "good", "--json").out)["not_finite"] == []
    assert "NaN" not in ckpt("verify", folder / "good.pt").out
    assert "not_finite" not in json.loads(ckpt("verify", folder / "bad.safetensors", "--json").out)


def test_verify_says_that_it_checked_no_value_where_there_are_no_checksums(folder: Path) -> None:
    spoken = ckpt("verify", folder / "good.safetensors").out
    assert "headers of 2 tensors are complete; the values were not checked: safetensors has no checksums" in spoken
    assert "checksums over" in ckpt("verify", folder / "good.pt").out


def test_verify_refuses_values_of_a_chain(folder: Path, tmp_path: Path) -> None:
    assert ckpt("append", tmp_path / "chain", folder / "bad").code == 0
    assert ckpt("verify", tmp_path / "chain", "--values").code == 2
    assert ckpt("verify", tmp_path / "chain@7", "--values").code == 0
    assert ckpt("verify", folder / "bad", "--values", "--quick").code == 2


def test_diff_puts_nan_first_and_in_its_last_line(folder: Path) -> None:
    ran = ckpt("diff", folder / "good.safetensors", folder / "bad.safetensors")
    lines = ran.out.splitlines()
    assert lines[1].split()[1:5] == ["%", "-", "-", "-"]
    assert lines[1].endswith("(2 not finite)  w model")
    assert "2 NaN or infinite in 1 tensors" in lines[-1]
    rows = json.loads(ckpt("diff", folder / "good.safetensors", folder / "bad.safetensors", "--json").out)["tensors"]
    (row,) = [row for row in rows if row["name"] == "w"]
    assert (row["max"], row["rms"], row["relative"], row["cosine"]) == (None, None, None, None)


@pytest.mark.parametrize(
    ("name", "code", "kind"),
    [
        *((f"o.{ending}", 2, InvalidArgumentError) for ending in ("safetensor", "safetensors2", "SafeTensor", "ckp")),
        *((f"o.{ending}", UNSUPPORTED, UnsupportedError) for ending in ("csv", "json")),
    ],
)
def test_an_ending_that_is_mistyped_or_of_another_kind_is_refused(
    name: str, code: int, kind: type[Exception], folder: Path, tmp_path: Path
) -> None:
    ran = ckpt("convert", folder / "good.pt", tmp_path / name)
    assert ran.code == code
    assert "--to universal" in ran.err or "--to names a format" in ran.err
    with pytest.raises(kind):
        save(library.open(folder / "good.pt"), tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    assert ckpt("convert", folder / "good.pt", tmp_path / name, "--to", "universal").code == 0


@pytest.mark.parametrize("name", ["o", "run.v2", "step1000.5", "model.dcp", "a.b.c"])
def test_convert_takes_other_names_with_dots_for_folders(name: str, folder: Path, tmp_path: Path) -> None:
    assert ckpt("convert", folder / "good.pt", tmp_path / name).code == 0
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize("command", ["inspect", "verify", "convert", "diff", "copy", "compress", "reshard", "append"])
def test_commands_refuse_an_empty_path(command: str, folder: Path, tmp_path: Path) -> None:
    for arguments in (["", str(tmp_path / "t")], [str(folder / "good"), ""]):
        if command in ("inspect", "verify"):
            arguments = [""]
        ran = ckpt(command, *arguments)
        assert ran.code == 2
        assert "the path is empty" in ran.err


def test_library_refuses_an_empty_path(folder: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="the path is empty"):
        library.open("")
    with pytest.raises(InvalidArgumentError, match="the path is empty"):
        save(library.open(folder / "good.pt"), "")


@pytest.mark.slow
def test_diff_tells_a_closed_pipe_from_a_comparison(folder: Path) -> None:
    command = [sys.executable, "-m", "ckpt_cli", "diff", str(folder / "good"), str(folder / "bad")]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert running.stdout is not None
    running.stdout.close()
    assert running.wait(60) == 128 + signal.SIGPIPE
