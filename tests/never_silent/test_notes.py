"""What is said beside the result: notes, errors for programs, numbers in their order, words only when they are true."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ckpt_cli import notes, progress
from ckpt_formats.core.notices import Notice, Weight
from damage import ckpt

SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"
DEEPSPEED = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
TRAINER = SAMPLES / "transformers-5.23-trainer"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A universal checkpoint, a chain, a compressed one and a source with many extras."""
    folder = tmp_path_factory.mktemp("made")
    weights = {f"layers.{i}.weight": torch.full((8, 8), float(i)) for i in range(12)}
    torch.save({"model": weights, "step": 3, **{f"extra{i}": i for i in range(200)}}, folder / "a.pt")
    assert ckpt("convert", folder / "a.pt", folder / "u").code == 0
    assert ckpt("compress", folder / "a.pt", f"{folder}/small/").code == 0
    assert ckpt("append", folder / "run.chain", folder / "a.pt").code == 0
    return folder


COMMANDS = {
    "inspect": ["inspect", "a.pt"],
    "verify": ["verify", "u"],
    "verify a chain": ["verify", "run.chain"],
    "diff": ["diff", "a.pt", "u"],
    "append": ["append", "new.chain", "a.pt"],
    "append --dry-run": ["append", "newer.chain", "a.pt", "--dry-run"],
    "log": ["log", "run.chain"],
    "rules": ["rules", "a.pt"],
    "convert": ["convert", "a.pt", "out.safetensors", "--to", "safetensors"],
    "convert --dry-run": ["convert", "a.pt", "out2", "--dry-run"],
    "reshard --dry-run": ["reshard", DEEPSPEED, "out3", "--dp", "1", "--dry-run"],
    "reshard": ["reshard", DEEPSPEED, "out4", "--dp", "1"],
    "compress": ["compress", "a.pt", "out5"],
    "compress --dry-run": ["compress", "a.pt", "out6", "--dry-run"],
    "decompress": ["decompress", "small", "out7.pt"],
    "restore": ["restore", "run.chain", "out8"],
    "restore --dry-run": ["restore", "run.chain", "out9", "--dry-run"],
    "compact --dry-run": ["compact", "run.chain", "--dry-run"],
    "compact": ["compact", "run.chain"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_json_has_the_notes_and_stderr_has_none(
    name: str, samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(samples)
    done = ckpt(*COMMANDS[name], "--json")
    assert done.code in (0, 1), done.err
    report = json.loads(done.out)
    assert "notices" not in report
    assert isinstance(report["notes"], list)
    for note in report["notes"]:
        assert note.keys() == {"text", "names", "weight"}
        assert note["weight"] in ("lost", "unsure", "info")
    assert "note:" not in done.err


def test_a_long_list_is_cut_and_shown_in_full_when_asked(samples: Path) -> None:
    arguments = ["convert", samples / "a.pt", samples / "never.safetensors", "--to", "safetensors", "--dry-run"]
    brief, long, data = ckpt(*arguments), ckpt(*arguments, "-v"), ckpt(*arguments, "--json")
    lost = next(line for line in brief.err.splitlines() if "extra0" in line)
    assert "more (`--verbose`)" in lost
    assert "extra199" not in lost
    assert "extra199" in long.err
    assert any("extra199" in note["names"] for note in json.loads(data.out)["notes"])


def test_notes_come_once_and_the_heaviest_first(capsys: pytest.CaptureFixture[str]) -> None:
    notes.begin(as_json=False, verbose=False)
    notes.note(
        "good to know", Notice("gone", ("a", "b"), Weight.LOST), "good to know", Notice("guessed", (), Weight.UNSURE)
    )
    notes.flush()
    notes.note("good to know")
    notes.flush()
    assert capsys.readouterr().err.splitlines() == ["note: gone: a, b", "note: guessed", "note: good to know"]
    notes.begin(as_json=False, verbose=False)


ERRORS = {
    "nothing there": (["inspect", "nowhere"], 10, "not found"),
    "damaged": (["convert", SAMPLES / "damaged/truncated-shard", "o1"], 20, "damaged"),
    "exists": (["convert", "a.pt", "u"], 30, "target"),
    "unknown option": (["convert", "a.pt", "o2", "--nonsense"], 2, "usage"),
    "no argument": (["convert"], 2, "usage"),
    "no command": (["nonsense"], 2, "usage"),
    "no such format to write": (["convert", "a.pt", "o3", "--to", "chain"], 22, "unsupported"),
    "no such codec": (["compress", "a.pt", "o4", "--codec", "nonsense"], 2, "usage"),
    "a pattern that is none": (["convert", "a.pt", "o5", "--only", "("], 2, "usage"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_one_json_object_too(name: str, samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(samples)
    arguments, code, kind = ERRORS[name]
    done = ckpt(*arguments, "--json")
    assert done.code == code, done.err
    report = json.loads(done.out)
    assert report.keys() == {"error", "notes"}
    assert report["error"].keys() == {"code", "kind", "what", "where", "hint"}
    assert (report["error"]["code"], report["error"]["kind"]) == (code, kind)
    assert report["error"]["what"]
    assert ckpt(*arguments).out == ""


def test_verify_names_all_damage_of_a_checkpoint_that_cannot_be_opened(tmp_path: Path) -> None:
    folder = shutil.copytree(DEEPSPEED, tmp_path / "run")
    files = sorted(folder.rglob("*.pt"))
    for path in files[:2]:
        os.truncate(path, path.stat().st_size // 2)
    with files[2].open("r+b") as file:  # one bit of a tensor
        data = file.read()
        at = len(data) // 2
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    done = ckpt("verify", folder)
    assert done.code == 20
    assert all(path.name in done.out + done.err for path in files[:3])
    report = json.loads(ckpt("verify", folder, "--json").out)
    assert not report["ok"]
    assert {Path(finding["where"]).name for finding in report["findings"]} >= {path.name for path in files[:3]}


def test_layers_option_takes_numbers(samples: Path, tmp_path: Path) -> None:
    assert ckpt("convert", samples / "a.pt", tmp_path / "m.safetensors", "--to", "safetensors").code == 0
    for source in (samples / "a.pt", tmp_path / "m.safetensors", samples / "u"):
        assert "{0..11} (12 alike)" in ckpt("inspect", source).out


def test_compress_levels_differ(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(64, 512)).square().sum().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    sizes = []
    for level in ("default", "max"):
        done = ckpt("compress", tmp_path / "a.pt", tmp_path / level, "--level", level, "--json")
        sizes.append(json.loads(done.out)["stored_nbytes"])
    assert sizes[1] < sizes[0]
    assert ckpt("compress", tmp_path / "a.pt", tmp_path / "fast", "--level", "fast").code == 2


def test_terminal_shows_what_is_being_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for after, lines in ((0.01, 1), (60, 0)):
        with progress.announced("reading the headers of run ...", after):
            time.sleep(0.1)
        assert capsys.readouterr().err.count("reading the headers of run ...") == lines


@pytest.mark.parametrize(("columns", "widest"), [(None, 100), (140, 140), (60, 60)])
def test_help_is_as_wide_as_the_terminal(columns: int | None, widest: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    if columns is not None:
        environment["COLUMNS"] = str(columns)
    command = [sys.executable, "-m", "ckpt_cli", "convert", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    longest = max(map(len, done.stdout.splitlines()))
    assert widest - 25 < longest <= max(widest, 90)


def test_the_rate_is_in_the_units_of_the_sizes(samples: Path, tmp_path: Path) -> None:
    done = ckpt("convert", samples / "a.pt", tmp_path / "out")
    assert "iB/s" in done.out
    assert "MB/s" not in done.out
