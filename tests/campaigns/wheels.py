"""Builds a wheel for each platform and checks it: `python tests/campaigns/wheels.py [PLATFORM ...]`.

Needs click, hatchling and ziglang in this environment, and no compiler. Only this machine's wheel can be run here.
"""

import os
import runpy
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_BYTES = 2_800_000
"""Of a wheel: checks of files and stores took it past 1.65 MB.

The library and its docstrings took it past 1.1 MB, packs and lazy plans past 1.2, `ckpt plan`
and shared packs past 1.3, shadows elsewhere, bases without a stall, stores and partial recovery past 1.4, pages,
stores that are written and man pages (33 kB) past 1.5; jobs and weight sync past 2.0, quantised weights, merges and
commands of every day past 2.3, trees of JAX, parity and families of fine-tunes past 2.5, parity in
memory and in buckets past 2.65, modules that were split (half a kB each) and checks of what a crash leaves past
2.75."""
MOST_LIBRARY_BYTES = 575_000
"""Of the library of kernels: masked steps took it past 500 kB, statistics and quantised weights past 550,
parity past 560."""

sys.path.insert(0, str(ROOT))
import hatch_build  # noqa: E402

MANUAL = set(runpy.run_path(str(ROOT / "docs" / "make_man.py"))["pages"]())
VERSION = str(runpy.run_path(str(ROOT / "formats" / "ckpt_formats" / "core" / "version.py"))["VERSION"])

# The first bytes of a library, and where the machine's number stands and what it is.
FORMATS = {
    "manylinux_2_17_x86_64": (b"\x7fELF\x02\x01", 18, b"\x3e\x00"),
    "manylinux_2_17_aarch64": (b"\x7fELF\x02\x01", 18, b"\xb7\x00"),
    "musllinux_1_2_x86_64": (b"\x7fELF\x02\x01", 18, b"\x3e\x00"),
    "musllinux_1_2_aarch64": (b"\x7fELF\x02\x01", 18, b"\xb7\x00"),
    "macosx_11_0_x86_64": (b"\xcf\xfa\xed\xfe", 4, b"\x07\x00\x00\x01"),
    "macosx_11_0_arm64": (b"\xcf\xfa\xed\xfe", 4, b"\x0c\x00\x00\x01"),
    "win_amd64": (b"MZ", 0, b"MZ"),
}


def build(platform: str, folder: Path) -> Path:
    """The wheel of a platform."""
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(folder)!r}))"
    environment = {**os.environ, "CKPT_PLATFORM": platform}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob(f"*{platform}.whl")
    return wheel


def build_sources(folder: Path) -> Path:
    """The archive of sources."""
    code = f"from hatchling.build import build_sdist; print(build_sdist({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def check(wheel: Path, platform: str) -> str:
    """A line about the wheel.

    Raises:
        AssertionError: It is not what it must be.
    """
    library = f"ckpt_codecs/native/{hatch_build.PLATFORMS[platform].library}"
    name, version, *tags = wheel.stem.split("-")
    assert version == VERSION
    assert (name, tags) == ("ckpt_suite", ["py3", "none", platform])
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (text for text in names if text.endswith(".dist-info/WHEEL"))
        assert f"Tag: py3-none-{platform}\n" in archive.read(metadata).decode().replace("\r\n", "\n")
        assert "Root-Is-Purelib: false" in archive.read(metadata).decode()
        assert [n for n in names if Path(n).suffix in (".so", ".dylib", ".dll", ".pdb", ".lib")] == [library]
        assert not [n for n in names if Path(n).suffix in (".c", ".h")]
        assert not [n for n in names if n.startswith("kernels/")]
        pages = {Path(name).name for name in names if "/data/share/man/man1/" in name}
        assert pages == MANUAL
        assert {"ckpt_cli/main.py", "ckpt_formats/core/version.py", "ckpt_codecs/native/library.py"} <= set(names)
        data = archive.read(library)
    first, offset, machine = FORMATS[platform]
    assert data.startswith(first)
    assert data[offset : offset + len(machine)] == machine
    assert len(data) <= MOST_LIBRARY_BYTES
    assert os.fsencode(tempfile.gettempdir()) + b"/" not in data  # or each build would be another
    assert wheel.stat().st_size <= MOST_BYTES
    return f"{wheel.name}: {wheel.stat().st_size:,} bytes, of which {Path(library).name}, unpacked: {len(data):,}"


def main() -> None:
    for platform in sys.argv[1:] or hatch_build.PLATFORMS:
        with tempfile.TemporaryDirectory() as folder:
            print(check(build(platform, Path(folder)), platform), flush=True)


if __name__ == "__main__":
    main()
