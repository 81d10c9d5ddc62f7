"""`ckpt compress` and `ckpt decompress`: from any checkpoint to a smaller one and back, bit for bit."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal, manifest
from damage import BROKEN, NOT_FOUND, OUTPUT, SAMPLES, Ran, ckpt
from held import contents, flip
from killing import killed, points, spread

ZERO3 = SAMPLES / "deepspeed-0.19-zero3-bf16-dp4-tied-frozen"
ELEMENTS = 700 * 1000


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """As a model may have them: large and small, of several types, one without elements."""
    torch.manual_seed(0)
    return {
        "table": torch.randn(700, 1000) * 0.02,
        "half": (torch.randn(300, 1000) * 0.02).bfloat16(),
        "kernel": torch.randn(64, 32, 3, 3).half(),
        "bias": torch.zeros(1000),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "ids": torch.arange(50_000),
        "mask": torch.rand(300, 300) > 0.5,
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its optimizer after two real steps, as torch.save has them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1000, 700), torch.nn.GELU(), torch.nn.Linear(700, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(64, 1000)).square().mean().backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("trained") / "state.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, path)
    return path


@pytest.fixture(scope="module")
def small(trained: Path) -> Path:
    target = trained.parent / "small"
    assert done(ckpt("compress", trained, f"{target}/"))
    return target


def done(ran: Ran) -> Ran:
    assert ran.code == 0, ran.err
    return ran


def same(one: Any, other: Any) -> bool:
    """Equal trees, tensors by their bits."""
    if isinstance(one, torch.Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*raw)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_file_of_safetensors_comes_back(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    done(ckpt("compress", tmp_path / "model.safetensors", f"{tmp_path / 'small'}/"))
    done(ckpt("decompress", tmp_path / "small", tmp_path / "again.safetensors"))
    assert same(load_file(tmp_path / "again.safetensors"), weights)
    nbytes = sum(path.stat().st_size for path in (tmp_path / "small").rglob("*.safetensors"))
    assert nbytes < 0.85 * (tmp_path / "model.safetensors").stat().st_size


def test_a_file_of_torch_comes_back(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(weights, tmp_path / "model.pt")
    done(ckpt("compress", tmp_path / "model.pt", f"{tmp_path / 'small'}/"))
    done(ckpt("decompress", tmp_path / "small", tmp_path / "again.pt"))
    assert same(torch.load(tmp_path / "again.pt", weights_only=True), weights)


def test_an_optimizer_comes_back(trained: Path, small: Path, tmp_path: Path) -> None:
    done(ckpt("decompress", small, tmp_path / "again.pt"))
    actual, expected = (torch.load(path, weights_only=True) for path in (tmp_path / "again.pt", trained))
    assert same(actual, expected)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "options",
    [("--to", "torch"), ("--to", "safetensors"), ("--to", "universal"), ("--to", "deepspeed-universal")],
    ids=lambda options: options[1],
)
def test_convert_writes_the_same_from_a_compressed_checkpoint(options: tuple[str, ...], tmp_path: Path) -> None:
    done(ckpt("compress", ZERO3, f"{tmp_path / 'small'}/"))
    done(ckpt("convert", ZERO3, tmp_path / "plain", "--to", "universal"))
    for source in ("small", "plain"):
        done(ckpt("convert", tmp_path / source, tmp_path / f"from {source}", *options))
    ours, theirs = (tmp_path / "from small", tmp_path / "from plain")
    paths = [path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()] if theirs.is_dir() else [Path()]
    assert paths
    for path in paths:
        assert (ours / path).read_bytes() == (theirs / path).read_bytes(), path


def test_a_compressed_checkpoint_is_cut_over_ranks_like_any_other(tmp_path: Path) -> None:
    done(ckpt("compress", ZERO3, f"{tmp_path / 'small'}/"))
    for source, target in ((tmp_path / "small", "ours"), (ZERO3, "theirs")):
        done(ckpt("reshard", source, tmp_path / target, "--to", "deepspeed", "--dp", "2", "--zero", "1"))
    assert contents(open_checkpoint(tmp_path / "ours")) == contents(open_checkpoint(tmp_path / "theirs"))


def test_compressed_again_it_is_the_same_and_so_is_what_it_holds(small: Path, tmp_path: Path) -> None:
    ran = done(ckpt("compress", small, f"{tmp_path / 'again'}/"))
    assert "chunks of the source match their checksums" in ran.out
    for path in small.rglob("*.safetensors"):
        assert (tmp_path / "again" / path.relative_to(small)).read_bytes() == path.read_bytes()
    done(ckpt("decompress", small, tmp_path / "plain", "--to", "universal"))
    ids = {manifest.load(f / manifest.NAME).content for f in (small, tmp_path / "again", tmp_path / "plain")}
    assert len(ids) == 1


def test_the_table_says_what_each_kind_of_state_takes(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no row is broken
    ran = done(ckpt("compress", trained, f"{tmp_path / 'small'}/"))
    *table, wrote = ran.out.splitlines()
    assert wrote.startswith("wrote ")
    head, *rows = [line.split() for line in table]
    assert head == ["state", "type", "elements", "raw", "stored", "ratio", "bits", "codec"]
    assert {row[0] for row in rows} == {"model", "exp_avg", "exp_avg_sq", "step", "total"}
    shown = done(ckpt("inspect", tmp_path / "small"))
    for line in table:
        assert line.strip() in shown.out
    report = json.loads(done(ckpt("inspect", tmp_path / "small", "--json")).out)
    first = next(p for p in report["parameters"] if p["name"] == "0.weight")["states"]["exp_avg"]
    assert first["codec"]
    assert first["stored_nbytes"] < first["nbytes"] == 4 * ELEMENTS


def test_the_json_adds_up(trained: Path, tmp_path: Path) -> None:
    report = json.loads(done(ckpt("compress", trained, f"{tmp_path / 'small'}/", "--json")).out)
    assert report["raw_nbytes"] == sum(row["raw_nbytes"] for row in report["states"])
    assert report["stored_nbytes"] == sum(row["stored_nbytes"] for row in report["states"])
    assert report["stored_nbytes"] <= report["nbytes"] == _size(tmp_path / "small" / "packs")
    assert report["ratio"] == round(report["raw_nbytes"] / report["stored_nbytes"], 4)
    weight = next(row for row in report["states"] if row["state"] == "model")
    assert weight["bits_per_element"] == round(8 * weight["stored_nbytes"] / weight["elements"], 3)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("level", ["default", "max"])
def test_an_estimate_is_about_right_and_writes_nothing(level: str, trained: Path, tmp_path: Path) -> None:
    estimate = json.loads(
        done(ckpt("compress", trained, f"{tmp_path / 'small'}/", "--dry-run", "--json", "--level", level)).out
    )
    assert list(tmp_path.iterdir()) == []
    report = json.loads(done(ckpt("compress", trained, f"{tmp_path / 'small'}/", "--json", "--level", level)).out)
    assert [row["state"] for row in estimate["states"]] == [row["state"] for row in report["states"]]
    for about, true in zip(estimate["states"], report["states"], strict=True):
        assert abs(about["stored_nbytes"] - true["stored_nbytes"]) <= 0.03 * true["raw_nbytes"]
        assert about["raw_nbytes"] == true["raw_nbytes"]


@pytest.mark.slow
def test_an_estimate_takes_no_longer_for_more(tmp_path: Path) -> None:
    """400 MB of which it looks at a little."""
    held = {f"w{i}": torch.randn(1000, 1000) for i in range(4)}
    torch.save({f"{i}.{name}": t.clone() for i in range(25) for name, t in held.items()}, tmp_path / "model.pt")
    ckpt("compress", tmp_path / "model.pt", f"{tmp_path / 'small'}/", "--dry-run")
    began = time.process_time()
    ran = done(ckpt("compress", tmp_path / "model.pt", f"{tmp_path / 'small'}/", "--dry-run"))
    assert time.process_time() - began < 1.5
    assert "nothing was written" in ran.out


def test_compress_writes_the_same_files_without_the_check(trained: Path, small: Path, tmp_path: Path) -> None:
    done(ckpt("compress", trained, f"{tmp_path / 'unchecked'}/", "--no-check"))
    for path in small.rglob("*.safetensors"):
        assert (tmp_path / "unchecked" / path.relative_to(small)).read_bytes() == path.read_bytes()


def test_a_codec_of_the_users_is_taken_for_all_that_it_can_hold(trained: Path, tmp_path: Path) -> None:
    report = json.loads(done(ckpt("compress", trained, f"{tmp_path / 'small'}/", "--codec", "planes", "--json")).out)
    assert {name for row in report["states"] for name in row["codecs"]} <= {"planes", "none"}
    assert contents(open_checkpoint(tmp_path / "small")) == contents(open_checkpoint(trained))


@pytest.mark.parametrize("codec", ["magic", "planes:colour=red", ":", "", "planes:level", "rounded"])
def test_a_codec_that_is_not_there_is_refused(codec: str, trained: Path, tmp_path: Path) -> None:
    ran = ckpt("compress", trained, f"{tmp_path / 'small'}/", "--codec", codec)
    assert ran.code == 2
    assert "--codec" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_compress_names_what_is_in_the_way(trained: Path, tmp_path: Path) -> None:
    assert ckpt("compress", tmp_path / "nothing", f"{tmp_path / 'small'}/").code == NOT_FOUND
    (tmp_path / "there").mkdir()
    for extra in ((), ("--dry-run",)):
        assert ckpt("compress", trained, f"{tmp_path / 'there'}/", *extra).code == OUTPUT
    assert ckpt("compress", trained, tmp_path / "no" / "where").code == OUTPUT


def test_a_damaged_source_is_not_compressed(trained: Path, tmp_path: Path) -> None:
    source = tmp_path / "state.pt"
    source.write_bytes(trained.read_bytes())
    flip(source, source.stat().st_size // 2)
    assert ckpt("compress", source, f"{tmp_path / 'small'}/").code == BROKEN
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.pt"]


def test_a_damaged_chunk_is_named_by_verify_and_refused_by_all(small: Path, tmp_path: Path) -> None:

    broken = tmp_path / "broken"
    shutil.copytree(small, broken)
    path = max((broken / "packs").iterdir(), key=lambda path: path.stat().st_size)
    flip(path, path.stat().st_size // 2, 3)
    ran = ckpt("verify", broken)
    assert ran.code == BROKEN
    assert "0.weight" in ran.out
    for command in (("convert", "--to", "torch"), ("decompress",), ("compress",)):
        ran = ckpt(command[0], broken, tmp_path / "out", *command[1:])
        assert ran.code == BROKEN
        assert path.name in ran.err
        assert "Traceback" not in ran.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken"]


def run(*arguments: object, **env: str) -> str:
    """In a process of its own."""
    command = [sys.executable, "-m", "ckpt_cli", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **env})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_zstandard_is_not_imported_where_nothing_is_coded(trained: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from ckpt_cli.main import cli\n"
        f"cli.main(['convert', {str(trained)!r}, {str(tmp_path / 'out')!r}], standalone_mode=False)\n"
        f"cli.main(['verify', {str(tmp_path / 'out')!r}], standalone_mode=False)\n"
        "assert 'zstandard' not in sys.modules, 'imported'"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_killed_at_any_point_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Universal.__init__.__kwdefaults__, "pack_nbytes", 1)  # type: ignore[attr-defined]
    rng = np.random.default_rng(0)
    held = {f"layers.{i}": torch.from_numpy(rng.standard_normal((64, 500)).astype(np.float32)) for i in range(40)}
    torch.save(held, tmp_path / "model.pt")
    target, stage = tmp_path / "small", tmp_path / ".small.ckpt-partial"

    def compress() -> int:
        output = done(ckpt("compress", tmp_path / "model.pt", f"{target}/", "--workers", "2", "--json")).out
        return int(json.loads(output)["resumed_files"])

    count, resumed = points(compress, tmp_path), []
    good = {path.name: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    for point in spread(count, 8):
        shutil.rmtree(target)
        shutil.rmtree(stage, ignore_errors=True)  # killed between the last rename and the last removal
        killed(compress, tmp_path, point)
        if not target.exists():
            resumed.append(compress())
            assert not stage.exists()
        assert {path.name: path.read_bytes() for path in target.rglob("*") if path.is_file()} == good
    assert max(resumed) >= 20


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    peaks = []
    for count in (2, 12):
        torch.save({f"w{i}": torch.randn(2000, 2000) for i in range(count)}, tmp_path / f"{count}.pt")
        peaks.append(_peak("compress", tmp_path / f"{count}.pt", f"{tmp_path}/small{count}/"))
        peaks.append(_peak("decompress", tmp_path / f"small{count}", tmp_path / f"plain{count}"))
    assert max(peaks) < 400 << 20
    assert peaks[2] < peaks[0] + (40 << 20)
    assert peaks[3] < peaks[1] + (40 << 20)


def _peak(*arguments: object) -> int:
    """Bytes: of the process's own memory, not of the one that it was forked from."""
    code = (
        "import sys; from ckpt_cli.main import cli; cli.main(sys.argv[1:], standalone_mode=False)\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print(next(line.split()[1] for line in lines if line.startswith('VmHWM')), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stderr.split()[-1]) << 10
