"""ckpt with each Python that is promised, and with the lowest versions of what it depends on.

    .venv/bin/python tests/campaigns/versions.py         each Python of this machine: a minute, and more the first time
    .venv/bin/python tests/campaigns/versions.py 3.12    one of them

The lowest Python has the lowest versions that pyproject.toml allows, the others the newest. With each, all modules are
imported, with warnings as errors, and quick tests that need no torch are run. Environments are kept in
`~/.cache/ckpt-tests/versions`. A Python that this machine lacks is named and left out;
the public workflow has them all.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = Path.home() / ".cache" / "ckpt-tests" / "versions"
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
VERSIONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
LOWEST = VERSIONS[0]
DEPENDENCIES = re.findall(r'^  "([^"]+)"', PROJECT[PROJECT.index("\ndependencies = [") :].partition("\n]")[0], re.M)
TESTING = ["hypothesis", "jsonschema", "psutil", "pytest", "pytest-timeout", "safetensors"]
TESTS = [
    *(f"tests/ckpt_formats/test_{name}.py" for name in ("layout", "rules", "geometry")),
    *(f"tests/ckpt_cli/test_{name}.py" for name in ("options", "completion", "columns", "paths", "late_dataclasses")),
]
IMPORT_ALL = """\
import importlib, pkgutil
import ckpt, ckpt_cli, ckpt_codecs, ckpt_formats, ckpt_recorder
import ckpt.chains.write
count = 0
for package in (ckpt, ckpt_cli, ckpt_codecs, ckpt_formats, ckpt_recorder):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.endswith(("__main__", ".libckpt")):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "ckpt").partition(".")[0].startswith("ckpt"):
                raise
        else:
            count += 1
print(count, "modules imported")
"""


def interpreter(version: str) -> str | None:
    """The newest Python of this version: that of pyenv, or one that is on the path."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for place in (*map(str, reversed(kept)), shutil.which(f"python{version}")):
        if place and subprocess.run([place, "-c", ""], capture_output=True).returncode == 0:
            return place
    return None


def requirements(version: str) -> list[str]:
    """What ckpt depends on: with the lowest Python, of each the lowest version."""
    lowest = version == LOWEST
    return [text.partition(";")[0].replace(">=", "==") if lowest else text for text in DEPENDENCIES]


def environment(version: str, python: str) -> Path:
    """An environment of this Python, made once for each list of requirements."""
    wanted = [*requirements(version), *TESTING]
    digest = hashlib.sha256("\n".join([python, *wanted]).encode()).hexdigest()[:12]
    folder = CACHE / f"{version}-{digest}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
        subprocess.run(command, check=True)
        (folder / "complete").touch()
    return folder / "bin" / "python"


def tried(version: str, python: str) -> bool:
    own = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "formats", ROOT / "codecs")))}
    own |= {"PYTHONDONTWRITEBYTECODE": ""}
    place = environment(version, python)
    print(f"Python {version}, {'lowest' if version == LOWEST else 'newest'} versions", flush=True)
    quick = ["-m", "not slow and not engines", "--hypothesis-profile", "quick", "-p", "no:cacheprovider", *TESTS]
    return all(
        subprocess.run([place, *arguments], cwd=ROOT, env=own).returncode == 0
        for arguments in (["-W", "error", "-c", IMPORT_ALL], ["-m", "pytest", "-q", *quick])
    )


def main() -> int:
    failed = []
    for version in sys.argv[1:] or VERSIONS:
        if (python := interpreter(version)) is None:
            print(f"Python {version}: not on this machine, not tried")
        elif not tried(version, python):
            failed.append(version)
    if failed:
        print(f"ckpt fails with Python {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
