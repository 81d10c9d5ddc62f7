"""The first change that CONTRIBUTING.md shows fits the code, and does what it says; public CI runs what CI runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIFF = re.compile(r"^```diff\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_first_change_fits_and_works(tmp_path: Path) -> None:
    for name in ("ckpt_cli", "formats", "codecs/ckpt_codecs", "tests/ckpt_cli"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    diffs = DIFF.findall((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(diffs) == 3
    subprocess.run(["git", "apply", "-"], input="".join(diffs), text=True, cwd=tmp_path, check=True)
    paths = [str(tmp_path / name) for name in ("", "formats", "codecs")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "ckpt_cli", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["machine"]["swap_nbytes"] >= 0


def test_public_ci_runs_what_ci_runs() -> None:
    workflow = (ROOT / ".github" / "workflows" / "check.yml").read_text("utf-8")
    assert re.findall(r"- run: (.*)", workflow) == [
        "bash .ci/run",
        "make kernels",
        "python tests/campaigns/versions.py ${{ matrix.python }}",
        "make dist",
    ]
