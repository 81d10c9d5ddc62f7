"""Builds and tries everything that is published: `make dist`, or `python release/dist.py [--quick]`.

1. The last commit is exported twice, to folders of different names, and built: a source archive, and a wheel for each
   platform. Both builds must be equal byte for byte; all times in them are that of the commit.
2. `twine check --strict`, `auditwheel show`, and `tests/campaigns/wheels.py` look at the files. (`abi3audit` has
   nothing to look at: the library is loaded by ctypes and uses nothing of Python's ABI.)
3. Each file that can run here is installed into a clean environment, where the demo of the README runs: the wheel in
   each Python that is found, and by uvx and pipx; the source archive in this Python; the wheel of aarch64, emulated.
4. dist/ gets the files, a list of components (CycloneDX), and the checksums of all of it. Wheels that nothing here
   can run are in dist/untested/.

With --quick, steps 1 and 2 are done for this machine's platform alone, and the wheel is tried in this Python.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "campaigns")]
import aarch64  # noqa: E402
import wheels  # noqa: E402

DIST = ROOT / "dist"
BIN = Path(sys.executable).parent
AARCH64 = "manylinux_2_17_aarch64"
TESTED = ("manylinux_2_17_x86_64", AARCH64)
UNTESTED = ("musllinux_1_2_x86_64", "musllinux_1_2_aarch64", "macosx_11_0_x86_64", "macosx_11_0_arm64")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MOST_INSTALLED_NBYTES = 60_000_000
"""Of an environment with ckpt, without NumPy, and without pip, which came with the environment."""
NOT_COUNTED = re.compile(r"(numpy|pip|setuptools)([-.].*)?|_distutils_hack|distutils-precedence\.pth")


DEBIAN_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Failure(SystemExit):
    """Something is not fit to be published; says what."""


def run(*command: str | Path, **options: object) -> str:
    """What a command prints on stdout. Ends with its output if it fails."""
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise Failure(f"$ {shlex.join(words)}\n{done.stdout}{done.stderr}\nexit code {done.returncode}")
    return str(done.stdout)


def say(text: str) -> None:
    print(text, flush=True)


def export(folder: Path) -> int:
    """Write the files of the last commit into a folder. Returns the commit's time, in seconds since 1970."""
    folder.mkdir(parents=True)
    archive = folder.with_suffix(".tar")
    run("git", "archive", "--format=tar", f"--output={archive}", "HEAD", cwd=ROOT)
    with tarfile.open(archive) as opened:
        opened.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    archive.unlink()
    return int(run("git", "log", "-1", "--format=%ct", cwd=ROOT))


def build(sources: Path, target: Path, platforms: tuple[str, ...], time: int) -> list[Path]:
    """The source archive and the wheels."""
    target.mkdir(parents=True)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(time)}
    environment.pop("CKPT_CC", None)
    code = "import sys; from hatchling.build import build_{0} as build; build(sys.argv[1])"
    run(sys.executable, "-c", code.format("sdist"), target, cwd=sources, env=environment)
    for platform in platforms:
        run(
            sys.executable,
            "-c",
            code.format("wheel"),
            target,
            cwd=sources,
            env=environment | {"CKPT_PLATFORM": platform},
        )
    return sorted(target.iterdir())


def compare(one: list[Path], other: list[Path]) -> None:
    """Raises `Failure` if two builds differ in a byte."""
    if [path.name for path in one] != [path.name for path in other]:
        raise Failure("the two builds have different files")
    differing = [a.name for a, b in zip(one, other, strict=True) if a.read_bytes() != b.read_bytes()]
    if differing:
        raise Failure(f"not reproducible: {', '.join(differing)}")


def check(files: list[Path]) -> None:
    """What can be said of the files without running them."""
    run(BIN / "twine", "check", "--strict", *files)
    for file in files:
        if file.suffix != ".whl":
            say(f"{file.name}: {file.stat().st_size:,} bytes")
            continue
        platform = file.stem.rpartition("-")[2]
        say(wheels.check(file, platform))
        if platform.startswith("manylinux"):
            shown = " ".join(run(BIN / "auditwheel", "show", file).split())
            if f'platform tag: "{platform}"' not in shown:
                raise Failure(f"auditwheel: {shown}")


def demo() -> Iterator[list[str]]:
    """The words of the demo: the `ckpt` commands below `pip install` in the README."""
    text = (ROOT / "README.md").read_text("utf-8")
    block = text[text.index("$ pip install") :].partition("```")[0]
    for line in block.splitlines():
        if line.startswith("$ ckpt "):
            yield shlex.split(line.removeprefix("$ ckpt "))


def try_out(ckpt: list[str | Path], sources: Path, environment: dict[str, str]) -> None:
    """Run the demo in a copy of the samples, then `ckpt doctor`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sample_checkpoints").symlink_to(sources / "sample_checkpoints")
        for words in demo():
            printed = run(*ckpt, *words, cwd=folder, env=environment)
            if words[0] == "inspect" and not printed:
                raise Failure("ckpt inspect prints nothing")
        run(*ckpt, "doctor", ".", cwd=folder, env=environment)


def clean_environment() -> dict[str, str]:
    """Without what would let Python find modules of this checkout."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "CKPT_"))
    }


def find_pythons() -> dict[str, Path]:
    """The interpreters here, by version: on the path, or as pyenv installs them."""
    places = [Path(sys.executable), *sorted(Path.home().glob(".pyenv/versions/*/bin/python"))]
    places += [Path(found) for version in PYTHONS if (found := shutil.which(f"python{version}"))]
    found = {}
    for place in places:
        done = subprocess.run(
            [place, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        )
        if done.returncode == 0 and (version := done.stdout.strip()) in PYTHONS:
            found.setdefault(version, place)
    return dict(sorted(found.items()))


def install(python: Path, file: Path, sources: Path, folder: Path) -> Path:
    """A clean environment with a file, tried out. Returns its interpreter."""
    run(python, "-m", "venv", folder, env=clean_environment())
    inside = folder / "bin/python"
    run(inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", file, env=clean_environment())
    try_out([folder / "bin/ckpt"], sources, clean_environment())
    return inside


def installed_nbytes(python: Path) -> int:
    """What ckpt and its packages take on the disk, without NumPy."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", code, env=clean_environment()).strip())
    counted = (
        path for top in packages.iterdir() if not NOT_COUNTED.fullmatch(top.name) for path in (top, *top.rglob("*"))
    )
    return sum(path.lstat().st_size for path in counted if path.is_file())


def try_wheel(wheel: Path, sources: Path, versions: dict[str, Path], folder: Path) -> Path:
    """In each Python, in a clean environment. Returns the interpreter of the last one."""
    for version, python in versions.items():
        inside = install(python, wheel, sources, folder / f"python-{version}")
        nbytes = installed_nbytes(inside)
        say(f"Python {version}: the demo runs; {nbytes / 1e6:.1f} MB beside NumPy")
        if nbytes > MOST_INSTALLED_NBYTES:
            raise Failure(f"an installation takes more than {MOST_INSTALLED_NBYTES / 1e6:.0f} MB beside NumPy")
    return inside


def try_tools(wheel: Path, sources: Path, folder: Path) -> None:
    """By uvx and by pipx, which make environments of their own."""
    environment = clean_environment() | {"UV_CACHE_DIR": str(folder / "uv"), "UV_PYTHON": sys.executable}
    try_out([BIN / "uvx", "--quiet", "--from", wheel, "ckpt"], sources, environment)
    say("uvx: the demo runs")
    home = {"PIPX_HOME": str(folder / "pipx"), "PIPX_BIN_DIR": str(folder / "bin"), "PIPX_MAN_DIR": str(folder / "man")}
    environment = clean_environment() | home
    run(BIN / "pipx", "install", "--python", sys.executable, wheel, env=environment)
    try_out([folder / "bin/ckpt"], sources, environment)
    say("pipx: the demo runs")


def try_emulated(wheel: Path, sources: Path, folder: Path) -> None:
    """The wheel of aarch64, in an emulated machine with a Python of its own."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb") and DEBIAN_KEYS.is_file()):
        say("aarch64: NOT tried: the emulator and its Python are fetched by Debian's tools")
        return
    aarch64.prepare()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    python = aarch64.emulated(aarch64.FOLDER / "root/usr/bin" / f"python{aarch64.PYTHON}")
    modules = os.pathsep.join([str(folder), str(aarch64.FOLDER / "site")])
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": modules}
    try_out([*python, "-m", "ckpt_cli"], sources, environment)
    say(f"aarch64, emulated, Python {aarch64.PYTHON}: the demo runs")


def describe_components(python: Path, target: Path, time: int) -> None:
    """The list of components of an environment: ckpt, and what it depends on."""
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", "pip", env=clean_environment())
    run(
        *(BIN / "cyclonedx-py", "environment", "--pyproject", ROOT / "pyproject.toml", "--mc-type", "application"),
        *("--output-reproducible", "--output-format", "JSON", "--output-file", target, python),
        env=os.environ | {"SOURCE_DATE_EPOCH": str(time)},
    )
    described = json.loads(target.read_text("utf-8"))
    described["metadata"]["component"]["version"] = wheels.VERSION  # pyproject.toml leaves it to a module
    target.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", "utf-8")


def publish(files: list[Path], untested: tuple[str, ...]) -> None:
    """Fill dist/ anew."""
    shutil.rmtree(DIST, ignore_errors=True)
    (DIST / "untested").mkdir(parents=True)
    for file in files:
        folder = DIST / "untested" if file.stem.endswith(untested) else DIST
        shutil.copyfile(file, folder / file.name)
    sums = [
        (hashlib.sha256(path.read_bytes()).hexdigest(), path) for path in sorted(DIST.rglob("*.*")) if path.is_file()
    ]
    (DIST / "SHA256SUMS").write_text("".join(f"{digest}  {path.relative_to(DIST)}\n" for digest, path in sums))
    say(f"dist/: {len(sums)} files, SHA256SUMS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="only this machine's wheel, in this Python; dist/ stays")
    quick = parser.parse_args().quick
    here = wheels.hatch_build.name_platform()
    platforms = (here,) if quick else TESTED + UNTESTED
    if run("git", "status", "--porcelain", cwd=ROOT):
        say("note: what is not committed is not in the files")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        time = export(folder / "first/ckpt")
        export(folder / "second/a-longer-name")
        sources = folder / "first/ckpt"
        files = build(sources, folder / "one", platforms, time)
        compare(files, build(folder / "second/a-longer-name", folder / "two", platforms, time))
        say(f"{len(files)} files, built twice: equal byte for byte")
        check(files)
        (wheel,) = (file for file in files if file.stem.endswith(here))
        pythons = {"here": Path(sys.executable)} if quick else find_pythons()
        python = try_wheel(wheel, sources, pythons, folder)
        if quick:
            return
        (archive,) = (file for file in files if file.name.endswith(".tar.gz"))
        install(Path(sys.executable), archive, sources, folder / "from-sources")
        say("from the sources: the demo runs")
        try_tools(wheel, sources, folder)
        if here != AARCH64:
            (foreign,) = (file for file in files if file.stem.endswith(AARCH64))
            try_emulated(foreign, sources, folder / "emulated")
        components = folder / "ckpt-suite.cdx.json"
        describe_components(python, components, time)
        publish([*files, components], UNTESTED)


if __name__ == "__main__":
    main()
