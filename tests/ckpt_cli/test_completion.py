"""What helps to type: formats, completion scripts, man pages."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_cli.main import COMMANDS
from ckpt_formats.registry import FORMATS, ONLY_READ
from damage import ckpt
from hatch_build import ROOT, write_manual


def test_formats_names_all_with_their_endings_and_marks() -> None:
    rows = {row["name"]: row for row in json.loads(ckpt("formats", "--json").out)["formats"]}
    assert list(rows) == list(FORMATS)
    assert {name for name, row in rows.items() if not row["written"]} == set(ONLY_READ)
    assert rows["torch"]["endings"] == [".pt", ".pth", ".bin", ".ckpt"]
    assert "manifest.json" in rows["universal"]["marks"]["paths"]
    out = ckpt("formats").out
    assert all(f"\n{name} " in f"\n{out}" for name in FORMATS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_accepts_its_script(shell: str, tmp_path: Path) -> None:
    script = ckpt("completion", shell).out
    assert json.loads(ckpt("completion", shell, "--json").out)["script"] == script.removesuffix("\n")
    assert "_CKPT_COMPLETE" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    (tmp_path / "script").write_text(script)
    done = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [("ckpt conv", "convert"), ("ckpt convert a b --to meg", "megatron"), ("ckpt completion f", "fish")],
)
def test_bash_gets_completions(words: str, expected: str) -> None:
    count = str(len(words.split()) - 1)
    env = {**os.environ, "_CKPT_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": count}
    done = subprocess.run([sys.executable, "-m", "ckpt_cli"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert f"plain,{expected}\n" in done.stdout, done.stderr


def test_fish_shows_whole_descriptions(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not here")
    (tmp_path / "script").write_text(ckpt("completion", "fish").out)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["fish", "-c", f"source {tmp_path}/script; complete -C 'ckpt convert --dp'"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("--dp\tdeepspeed, deepspeed-universal, megatron"), done


def test_every_command_has_a_man_page_without_errors(tmp_path: Path) -> None:
    write_manual(tmp_path / "man")
    pages = {path.stem: path for path in (tmp_path / "man").iterdir()}
    assert pages.keys() == {"ckpt", *(f"ckpt-{name}" for name in COMMANDS)}
    if shutil.which("groff") is None:
        pytest.skip("groff is not here")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", *sorted(pages.values())], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 10_000
