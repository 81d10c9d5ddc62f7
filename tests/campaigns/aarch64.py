"""Runs the tests of the kernels as on aarch64: `python tests/campaigns/aarch64.py [TEST ...] [OPTION OF PYTEST ...]`.

Builds the library of aarch64 by zig, and emulates that machine, Python and all, by Debian's qemu-aarch64-static.
Debian's packages and wheels of the package index are unpacked below `~/.cache/ckpt-tests`, not installed.
Without arguments: each kernel against its twin in NumPy, and all golden files. Then the fuzzer, for a while. Needs
apt-get, dpkg-deb, pip and ziglang.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import kernel_headers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYTHON = "3.11"
PACKAGES = ["python3.11-minimal", "libpython3.11-stdlib", "libstdc++6"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WHEELS = [*PROJECT["dependencies"], "hypothesis", "pytest", "pytest-timeout"]
_CONTENT = hashlib.blake2b(repr((PACKAGES, WHEELS)).encode(), digest_size=4).hexdigest()
FOLDER = Path.home() / ".cache" / "ckpt-tests" / f"aarch64-{_CONTENT}"
"""Named by its content: another dependency needs another folder."""
TESTS = [f"tests/ckpt_codecs/test_kernels_{family}.py" for family in kernel_headers.FAMILIES]
TESTS += [
    "tests/ckpt_codecs/test_codec_golden.py",
    "tests/ckpt_codecs/test_deltas_golden.py",
    "tests/ckpt_codecs/test_lossy_golden.py",
]
SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main\n"


def run(*command: str | Path, **options: object) -> None:
    subprocess.run([str(part) for part in command], check=True, **options)  # type: ignore[call-overload]


def unpack_packages(names: list[str], architecture: str, target: Path) -> None:
    """Debian packages with all that they depend on, unpacked into a folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("state/lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        (folder / "state/status").touch()
        (folder / "sources.list").write_text(SOURCE)
        settings = {
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Sandbox::User": "root",
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "state/status",
            "Dir::Cache": folder / "cache",
            "Dir::Etc::sourcelist": folder / "sources.list",
            "Dir::Etc::sourceparts": folder / "none",
        }
        apt = ["apt-get", "--quiet", "--quiet", *(f"--option={name}={value}" for name, value in settings.items())]
        run(*apt, "update")
        run(*apt, "install", "--yes", "--no-install-recommends", "--download-only", *names, stdout=subprocess.DEVNULL)
        target.mkdir(parents=True)
        for package in sorted((folder / "cache/archives").glob("*.deb")):
            run("dpkg-deb", "--extract", package, target)


def unpack_wheels(target: Path) -> None:
    """What ckpt and its tests import, for Python on aarch64."""
    platforms = [f"manylinux{tag}_aarch64" for tag in ("2014", "_2_17", "_2_27", "_2_28")]
    options = ["--only-binary=:all:", f"--python-version={PYTHON}", *(f"--platform={name}" for name in platforms)]
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, *options, *WHEELS)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)


def prepare() -> None:
    """The emulator, the machine's files, and the packages of Python: downloaded once."""
    if FOLDER.is_dir():
        return
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as name:
        folder = Path(name) / "aarch64"
        host = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True)
        unpack_packages(["qemu-user-static"], host.stdout.strip(), folder / "emulator")
        unpack_packages(PACKAGES, "arm64", folder / "root")
        unpack_wheels(folder / "site")
        folder.rename(FOLDER)


def emulated(*command: str | Path) -> list[str | Path]:
    return [FOLDER / "emulator/usr/bin/qemu-aarch64-static", "-L", FOLDER / "root", *command]


def copy_checkout(target: Path) -> None:
    """All files that git knows or does not ignore, without what was built for this machine."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (ROOT / name).is_file():  # a file may be deleted and not yet committed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def fuzz(seconds: float, folder: Path) -> None:
    """The fuzzer, with zig's sanitizer of undefined behaviour."""
    import fuzz_kernels

    program = folder / "fuzz"
    zig = fuzz_kernels.find_zig()
    fuzz_kernels.build(program, [*zig, "-target", "aarch64-linux-musl", "-static"])
    fuzz_kernels.fuzz([[str(part) for part in emulated(program)]], reads=10**9, seconds=seconds, slice=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds-of-fuzzing", type=float, default=30)
    parser.add_argument("tests", nargs="*", default=TESTS)
    arguments, options = parser.parse_known_args()
    prepare()
    with tempfile.TemporaryDirectory() as name:
        checkout = Path(name) / "ckpt"
        copy_checkout(checkout)
        environment = {**os.environ, "CKPT_PLATFORM": "manylinux_2_17_aarch64"}
        run(sys.executable, checkout / "hatch_build.py", env=environment)
        python = emulated(FOLDER / "root/usr/bin" / f"python{PYTHON}")
        environment = {"PATH": os.environ["PATH"], "HOME": name, "PYTHONPATH": str(FOLDER / "site")}
        levels = "import platform; from ckpt_codecs.native import library; print(platform.machine(), library.levels())"
        run(*python, "-c", levels, env={**environment, "PYTHONPATH": f"{FOLDER / 'site'}:{checkout / 'codecs'}"})
        run(*python, "-m", "pytest", "-q", *options, *arguments.tests, cwd=checkout, env=environment)
        if arguments.seconds_of_fuzzing:
            fuzz(arguments.seconds_of_fuzzing, Path(name))


if __name__ == "__main__":
    main()
