"""`ckpt doctor` says what is missing, tells nothing secret, leaves nothing behind and never fails itself."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt.doctor.credentials import STORES
from ckpt.doctor.examination import LOCAL_FILE_SYSTEMS
from ckpt.doctor.file_system import find_kind
from ckpt.doctor.packages import NEEDED, OPTIONAL
from ckpt_cli.commands.doctor import UNFIT
from ckpt_formats.core.folders import PARITY
from damage import SAMPLES, ckpt

ROOT = Path(__file__).parents[2]
SECRET = "hunter2-AKIA-do-not-show"
RUN = """
import sys
{before}
from ckpt_cli.main import run
sys.argv = ["ckpt", "doctor", *{arguments!r}]
run()
"""


BLOCKER = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")
sys.meta_path.insert(0, Blocker())
"""


def run_doctor(*arguments: str, before: str = "", **env: str) -> "subprocess.CompletedProcess[str]":
    code = RUN.format(before=before, arguments=arguments)
    environment = {**os.environ, **env}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert "Traceback" not in done.stderr
    return done


def test_no_value_of_a_variable_and_no_content_of_a_file_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    names = {name for _, variables, _ in STORES.values() for name in variables}
    for name in names | {"AWS_ENDPOINT_URL", "CKPT_CPU_LEVEL", "PGPASSWORD"}:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("HOME", str(home))
    files = [file for _, _, files in STORES.values() for file in files]
    for file in files:
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(SECRET)
    for arguments in ([], ["--json"], ["-v"], ["--json", "-v"]):
        done = ckpt("doctor", tmp_path, *arguments)
        assert SECRET not in done.out + done.err
        for name in (*names, *(f"~/{file}" for file in files)):
            assert name in done.out, name
    assert "HF_TOKEN_PATH names a file that does not exist" in ckpt("doctor", tmp_path).out


def test_a_folder_that_works_is_left_as_it_was(tmp_path: Path) -> None:
    # With one byte less than what is written, this fails: see the next test.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))"
    done = run_doctor(str(tmp_path), "--json", before=limit)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["file_system"]["locks"]
    assert report["file_system"]["problem"] is None
    assert not list(tmp_path.iterdir())
    assert not [one for one in report["shortcomings"] if one["needed"]]


def test_a_folder_in_which_little_can_be_written_is_named(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))"
    done = run_doctor(str(tmp_path), before=limit)
    assert done.returncode == UNFIT
    assert "cannot be written: File too large" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_read_only_is_named() -> None:
    done = ckpt("doctor", "/proc")  # nobody can make a folder there, not even root
    assert done.code == UNFIT
    assert "/proc cannot be written" in done.out
    assert "ckpt doctor PATH" in done.out
    assert json.loads(ckpt("doctor", "/proc", "--json").out)["ok"] is False


@pytest.mark.parametrize(
    ("package", "code", "message"),
    [
        ("numpy", UNFIT, "pip install numpy"),
        ("rich", UNFIT, "pip install rich"),
        ("obstore", 0, "pip install 'ckpt-suite[cloud]'"),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(
    package: str, code: int, message: str, tmp_path: Path
) -> None:
    done = run_doctor(str(tmp_path), before=BLOCKER.format(package=package))
    assert done.returncode == code
    assert message in done.stdout
    assert f"the package {package} is" in done.stdout


def test_missing_kernels_are_named_with_what_makes_them(tmp_path: Path) -> None:
    moved = f"from ckpt_codecs.native import library; library.PATH = library.Path({str(tmp_path / 'libckpt.so')!r})"
    done = run_doctor(str(tmp_path), before=moved)
    assert done.returncode == UNFIT
    assert "libckpt.so is missing" in done.stdout
    assert "fix   make kernels" in done.stdout


def test_a_level_that_the_cpu_lacks_is_named_with_what_mends_it(tmp_path: Path) -> None:
    done = run_doctor(str(tmp_path), CKPT_CPU_LEVEL="99")
    assert done.returncode == UNFIT
    assert "unset CKPT_CPU_LEVEL" in done.stdout


@pytest.mark.parametrize(("path", "code"), [("no-such-folder", 10), ("s3://bucket/key", 22)])
def test_a_path_that_cannot_be_tried_is_an_error_with_a_hint(path: str, code: int) -> None:
    done = ckpt("doctor", path)
    assert (done.code, done.out) == (code, "")
    assert "hint: " in done.err


def test_the_kind_of_the_file_system_is_that_of_the_last_mount_above(tmp_path: Path) -> None:
    place = tmp_path.resolve()
    line = "22 1 0:1 / {} rw shared:1 - {} source rw"
    mounts = [("/", "ext4"), (place.parent, "nfs4"), (place, "tmpfs"), (place, "lustre"), (f"{place}x", "xfs")]
    assert find_kind(place / "run", "\n".join(line.format(*mount) for mount in mounts)) == "lustre"
    assert find_kind(place / "run", "nothing that is a mount") is None


def test_every_package_of_the_installation_is_looked_at() -> None:
    if sys.version_info < (3, 11):
        import tomli as tomllib
    else:
        import tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {one.partition(">")[0].partition("=")[0] for one in requirements if ";" not in one}

    assert names(project["dependencies"]) == set(NEEDED)
    extras = project["optional-dependencies"]
    for extra in set(extras) - {"bench", "test", "site", "release"}:
        assert names(extras[extra]) <= set(OPTIONAL), extra


def of_parity(run: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The checkpoints of a run, and by the first words of what is missing, what fixes it."""
    report = json.loads(ckpt("doctor", run, "--json").out)
    assert report["ok"]
    named = {one["what"]: one["remedy"] for one in report["shortcomings"] if str(run) in one["what"]}
    return report["parity"], named


def test_doctor_says_which_checkpoints_of_a_run_have_no_parity(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        shutil.copytree(SAMPLES / "universal-1-plain", tmp_path / f"step-{step}")
    assert ckpt("protect", tmp_path / "step-1", "--lose", "1").code == 0
    parity, named = of_parity(tmp_path)
    assert [(Path(one["path"]).name, one["losses"], one["fits"]) for one in parity] == [
        ("step-10", 0, False), ("step-2", 0, False), ("step-1", 1, True)]  # fmt: skip
    assert named[f"{tmp_path}/step-10 (and 1 more): no parity"] == f"ckpt protect '{tmp_path}/step-10' --lose 2"
    text = ckpt("doctor", tmp_path).out
    assert "step-10        none\n  step-2         none\n  step-1         any 1 of" in text
    # On a disk that goes with its machine, parity beside its files goes too.
    is_local = json.loads(ckpt("doctor", tmp_path, "--json").out)["file_system"]["kind"] in LOCAL_FILE_SYSTEMS
    near = [remedy for what, remedy in named.items() if "on this disk" in what]
    assert near == [f"ckpt protect '{tmp_path}/step-1' --lose 1 --into '/OTHER/DISK' --overwrite"] * is_local
    assert ckpt("doctor", tmp_path / "step-1").out.count("step-1   ") == 1


def test_doctor_says_which_parity_does_not_fit_its_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(SAMPLES / "deepspeed-0.19-zero1-bf16-dp2", run)
    assert ckpt("protect", run, "--lose", "2", "--by", "node:1").code == 0
    [first], _ = of_parity(run)
    assert (first["fits"], first["by"], first["losses"]) == (True, "node:1", 2)
    largest = max((path for path in run.rglob("*.pt")), key=lambda path: path.stat().st_size)
    changed = bytes(byte ^ 1 for byte in largest.read_bytes())
    largest.write_bytes(changed)  # another one under its name, with the same length, as old as `cp -p` leaves it
    os.utime(largest, ns=(10**18,) * 2)
    (run / "latest").unlink()
    (run / "notes.txt").write_text("new")
    (run / PARITY / "1" / "group-000").write_bytes(b"")
    [now], named = of_parity(run)
    assert not now["fits"]
    assert now["changed"] == sorted(["latest", largest.relative_to(run).as_posix()])
    assert now["unprotected"] == ["notes.txt"]
    assert now["damaged_parity"] == [str(run / PARITY / "1" / "group-000")]
    fixes = "\n".join(named.values())
    assert (
        f"ckpt repair '{run}' --dry-run; if you changed it on purpose, ckpt protect '{run}' --lose 2 --by node:1"
        in fixes
    )
    assert "but it does not fit" in ckpt("doctor", run).out
    for manifest in run.rglob("manifest"):
        manifest.write_bytes(manifest.read_bytes()[:-1])
    [torn], named = of_parity(run)
    assert "does not fit its checksum" in torn["problem"]
    assert [what for what in named if "its parity cannot be read" in what]


@pytest.mark.slow
def test_doctor_names_the_folders_of_parity_that_lies_elsewhere(tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "it's a place"
    shutil.copytree(SAMPLES / "universal-1-plain", run)
    assert ckpt("protect", run, "--lose", "1", "--into", place).code == 0
    (run / "notes.txt").write_text("new")
    [parity], named = of_parity(run)
    assert (parity["elsewhere"], parity["unprotected"]) == ([str(place)], ["notes.txt"])
    fixes = [remedy for what, remedy in named.items() if "without parity" in what]
    assert [shlex.split(fix) for fix in fixes] == [
        ["ckpt", "protect", str(run), "--lose", "1", "--into", str(place), "--overwrite"]
    ]
    assert ckpt(*shlex.split(fixes[0])[1:]).code == 0
    assert of_parity(run)[0][0]["fits"]


def test_doctor_names_parity_of_a_single_domain(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(SAMPLES / "deepspeed-0.19-zero1-bf16-dp2", run)
    assert ckpt("protect", run, "--lose", "1", "--by", "node:8").code == 0
    _, named = of_parity(run)
    assert named[f"{run}: all files are lost together (--by node:8), so its parity is a copy of them"] == (
        f"ckpt protect '{run}' --lose 1 --overwrite"
    )


def test_doctor_surveys_checkpoints_that_are_single_files(tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copy(SAMPLES / "universal-1-plain.tensors.safetensors", tmp_path / f"step-{step}.safetensors")
    assert ckpt("protect", tmp_path / "step-1.safetensors").code == 0
    parity, _ = of_parity(tmp_path)
    shown = [(Path(one["path"]).name, one["losses"], one["by"], one["fits"]) for one in parity]
    assert shown == [("step-2.safetensors", 0, None, False), ("step-1.safetensors", 2, "part", True)]
    (tmp_path / "step-1.safetensors").write_bytes(b"short")
    [_, changed], _ = of_parity(tmp_path)
    assert changed["changed"] == ["step-1.safetensors"]
