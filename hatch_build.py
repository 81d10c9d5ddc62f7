"""Builds the C kernels into one library: for a wheel, for an editable install, and in place by `python hatch_build.py`.
A wheel also gets the man pages, which `docs/make_man.py` writes.

The compiler is zig, which pip fetches for the time of the build, so that no machine needs a compiler of its own.
`CKPT_CC=gcc` takes another one; `CKPT_PLATFORM=manylinux_2_17_aarch64` builds for another platform than this.
"""

import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a script, this needs no hatchling
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "codecs" / "kernels"
PACKAGE = ROOT / "codecs" / "ckpt_codecs" / "native"


class Platform(NamedTuple):
    target: str
    """What zig calls it."""
    levels: dict[str, str]
    """The CPU of each level of kernels, as zig calls it."""
    library: str
    """The library's file name."""


X86_64 = {"v2": "x86_64_v2", "v3": "x86_64_v3"}
AARCH64 = {"v1": "generic"}
PLATFORMS = {
    "manylinux_2_17_x86_64": Platform("x86_64-linux-gnu.2.17", X86_64, "libckpt.so"),
    "manylinux_2_17_aarch64": Platform("aarch64-linux-gnu.2.17", AARCH64, "libckpt.so"),
    "musllinux_1_2_x86_64": Platform("x86_64-linux-musl", X86_64, "libckpt.so"),
    "musllinux_1_2_aarch64": Platform("aarch64-linux-musl", AARCH64, "libckpt.so"),
    "macosx_11_0_x86_64": Platform("x86_64-macos.11.0", X86_64, "libckpt.dylib"),
    "macosx_11_0_arm64": Platform("aarch64-macos.11.0", {"v1": "apple_m1"}, "libckpt.dylib"),
    "win_amd64": Platform("x86_64-windows-gnu", X86_64, "libckpt.dll"),
}
"""By the platform tag of a wheel."""

FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-Wall", "-Wextra", "-Wmissing-prototypes", "-Werror"]
# Without contraction, a level with fused multiply-add rounds like one without.
FLAGS += ["-ffp-contract=off"]


class BuildError(SystemExit):
    """The kernels cannot be built here; says what to do."""


def name_platform() -> str:
    """The wheel tag of this machine's platform."""
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    if sys.platform == "win32":
        return "win_amd64" if machine == "x86_64" else f"win_{machine}"
    if sys.platform == "darwin":
        return f"macosx_11_0_{'arm64' if machine == 'aarch64' else machine}"
    return f"manylinux_2_17_{machine}" if platform.libc_ver()[0] == "glibc" else f"musllinux_1_2_{machine}"


def find_compiler(target: str) -> list[str]:
    """The command that compiles for a target: `CKPT_CC`, else zig.

    Raises:
        BuildError: There is neither.
    """
    if command := os.environ.get("CKPT_CC"):
        return command.split()
    package = find_spec("ziglang")
    if package is None or not package.submodule_search_locations:
        raise BuildError("the kernels need a compiler: `pip install ziglang`, or name one, as in CKPT_CC=gcc")
    zig = Path(package.submodule_search_locations[0]) / ("zig.exe" if sys.platform == "win32" else "zig")
    return [str(zig), "cc", "-target", target, "-fno-sanitize=undefined"]


def flags_of(level: str, cpu: str) -> list[str]:
    """What compiles the kernels for one level of CPU, by zig's name of the CPU."""
    if not os.environ.get("CKPT_CC"):
        return [f"-DLEVEL={level}", f"-mcpu={cpu}"]
    # gcc and clang write x86-64-v3; on other machines their default is right.
    return [f"-DLEVEL={level}", *([f"-march={cpu.replace('_', '-')}"] if "x86" in cpu else [])]


def build(tag: str, output: Path, cache: Path | None = None) -> None:
    """Build the library of a platform into a file, which is replaced only if all goes well.

    zig keeps what it compiled in `cache`; without one it keeps nothing, neither here nor in the user's home.

    Raises:
        BuildError: The platform is unknown, there is no compiler, or it fails.
    """
    if tag not in PLATFORMS:
        raise BuildError(f"{tag} is none of the platforms {', '.join(PLATFORMS)}")
    target, levels, library = PLATFORMS[tag]
    compiler = find_compiler(target)
    independent = [] if library.endswith(".dll") else ["-fPIC"]
    sources_hash = runpy.run_path(str(PACKAGE / "sources.py"))["hash_sources"](SOURCES)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {f"{level}.o": ["kernels.c", *flags_of(level, cpu)] for level, cpu in levels.items()}
        jobs["level.o"] = ["level.c", f"-DSOURCES_HASH={sources_hash:#x}"]
        jobs["rates.o"] = ["rates.c"]
        cache = cache or folder / "cache"
        environment = {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}
        environment |= os.environ
        running = [
            subprocess.Popen(
                [*compiler, *FLAGS, *independent, *flags, "-c", str(SOURCES / source), "-o", str(folder / made)],
                env=environment,
            )
            for made, (source, *flags) in jobs.items()
        ]
        statuses = [process.wait() for process in running]
        if any(statuses):
            raise BuildError("the kernels do not compile")
        objects = [str(folder / made) for made in jobs]
        maths = [] if library.endswith(".dll") else ["-lm"]
        # Without a name of its own, a dylib has the path of the temporary folder in it.
        named = [f"-Wl,-install_name,@rpath/{library}"] if library.endswith(".dylib") else []
        linked = subprocess.run(
            [*compiler, "-shared", "-s", *objects, "-o", str(folder / library), *named, *maths], env=environment
        )
        if linked.returncode:
            raise BuildError("the kernels do not link")
        output.parent.mkdir(parents=True, exist_ok=True)
        # A process may have the old library mapped: the file is replaced, never written over.
        shutil.copyfile(folder / library, beside := output.with_name(f".{output.name}.new"))
        beside.replace(output)


def build_in_place() -> Path:
    """Build this machine's library where a checkout looks for it."""
    tag = os.environ.get("CKPT_PLATFORM") or name_platform()
    output = PACKAGE / PLATFORMS[tag].library if tag in PLATFORMS else PACKAGE / "libckpt"
    build(tag, output, ROOT / ".zig-cache")
    return output


def write_manual(folder: Path) -> None:
    """Write the man pages into a new folder. Needs click."""
    subprocess.run([sys.executable, "-B", ROOT / "docs" / "make_man.py", folder], check=True)


class KernelsHook(BuildHookInterface):  # type: ignore[misc, valid-type]
    """Adds the library and the man pages to a wheel, and gives the wheel the tag of its platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        tag = os.environ.get("CKPT_PLATFORM") or name_platform()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"
        if version == "editable":
            build_in_place()
            return
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name) / (PLATFORMS[tag].library if tag in PLATFORMS else "libckpt")
        build(tag, library)
        build_data["force_include"][str(library)] = f"ckpt_codecs/native/{library.name}"
        manual = Path(self._folder.name) / "man"
        write_manual(manual)
        build_data["shared_data"][str(manual)] = "share/man/man1"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()


if __name__ == "__main__":
    built = build_in_place()
    print(f"{built.relative_to(ROOT)}: {built.stat().st_size:,} bytes")
