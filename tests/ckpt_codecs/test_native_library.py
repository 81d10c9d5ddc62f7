"""The library of C kernels: which level is bound, when it is refused, and that Python, headers and symbols agree."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import cpu_levels
import kernel_headers
from ckpt_cli.main import FAULT
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import library, sources
from ckpt_codecs.native.sources import find_sources, hash_sources
from damage import SAMPLES
from durations import slowness

ROOT = Path(__file__).parents[2]
COMPRESSED = SAMPLES / "universal-1-coded"
PLAIN = SAMPLES / "universal-1-plain"
LEVEL = "from ckpt_codecs.native import library; print(library.level())"
X86 = platform.machine() in ("x86_64", "AMD64")
V3 = {"sse4_2", "popcnt", "ssse3", "cx16", "lahf_lm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
"""The flags of /proc/cpuinfo that make an x86-64-v3; Linux says avx only where it saves the registers."""


def run(code: str, root: Path = ROOT, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Python in a process of its own, on the packages of a checkout."""
    path = os.pathsep.join([str(root / "codecs"), str(ROOT / "formats"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.skipif(not X86 or not Path("/proc/cpuinfo").exists(), reason="compares with what Linux says of an x86-64")
def test_the_level_bound_is_the_highest_of_this_cpu() -> None:
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert flags
    expected = "3" if set(flags[1].split()) >= V3 else "2"
    assert run(LEVEL, CKPT_CPU_LEVEL="").stdout.strip() == expected


@pytest.mark.skipif(X86, reason="x86-64 has levels")
def test_other_machines_have_one_level() -> None:
    assert library.levels() == (1,)


@pytest.mark.parametrize("level", library.levels())
def test_the_environment_binds_a_lower_level(level: int) -> None:
    assert run(LEVEL, CKPT_CPU_LEVEL=str(level)).stdout.strip() == str(level)
    code = "from ckpt_codecs.native import deltas; print(deltas.kernels.zigzag_bits.__name__)"
    assert run(code, CKPT_CPU_LEVEL=str(level)).stdout.strip() == f"v{level}_zigzag_bits"


@pytest.mark.parametrize("level", ["9", "0", "v3", " 2"])
def test_a_level_that_this_cpu_has_not_is_refused(level: str) -> None:
    done = run(LEVEL, CKPT_CPU_LEVEL=level)
    assert done.returncode != 0
    possible = " and ".join(map(str, library.levels()))
    assert f"LibraryError: CKPT_CPU_LEVEL={level}: this CPU runs {possible}" in done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the codecs with their C sources and the built library."""
    shutil.copytree(ROOT / "codecs", tmp_path / "codecs", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_a_library_that_belongs_to_its_sources_is_taken(checkout: Path) -> None:
    assert run(LEVEL, checkout).returncode == 0


def test_a_library_older_than_its_sources_is_refused_with_the_command_that_mends_it(checkout: Path) -> None:
    with (checkout / "codecs" / "kernels" / "kernels.h").open("a") as header:
        header.write("\n")
    done = run(LEVEL, checkout)
    assert done.returncode != 0
    assert "was not built from the sources in" in done.stderr
    assert "run `make kernels`, or `pip install --editable .`" in done.stderr


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "command", [["verify", "SOURCE"], ["decompress", "SOURCE", "TARGET"], ["compress", "PLAIN", "TARGET"]]
)
def test_a_command_that_needs_a_stale_library_says_so_and_calls_nothing_damaged(
    command: list[str], checkout: Path, tmp_path: Path
) -> None:
    (checkout / "codecs" / "kernels" / "new.h").touch()
    paths = {"SOURCE": COMPRESSED, "PLAIN": PLAIN, "TARGET": tmp_path / "target"}
    arguments = ["ckpt", *(str(paths.get(word, word)) for word in command)]
    done = run(f"import sys; sys.argv = {arguments!r}; from ckpt_cli.main import run; run()", checkout)
    assert done.returncode == FAULT
    assert "run `make kernels`" in done.stderr
    assert "damaged" not in done.stdout + done.stderr
    assert not (tmp_path / "target").exists()


def test_a_program_that_tries_the_kernels_is_no_source(checkout: Path) -> None:
    before = hash_sources(checkout / "codecs" / "kernels")
    (checkout / "codecs" / "kernels" / "fuzz.c").write_text("")
    assert hash_sources(checkout / "codecs" / "kernels") == before


def test_a_renamed_source_is_another(checkout: Path) -> None:
    before = hash_sources(checkout / "codecs" / "kernels")
    (checkout / "codecs" / "kernels" / "level.h").rename(checkout / "codecs" / "kernels" / "levels.h")
    assert hash_sources(checkout / "codecs" / "kernels") != before


def test_missing_library_is_an_error_with_a_repair(checkout: Path) -> None:
    (checkout / "codecs" / "ckpt_codecs" / "native" / library.PATH.name).unlink()
    done = run(LEVEL, checkout)
    assert done.returncode != 0
    assert f"{library.PATH.name} is missing; run `make kernels`" in done.stderr
    shutil.rmtree(checkout / "codecs" / "kernels")
    done = run(LEVEL, checkout)
    assert f"{library.PATH.name} is missing; install ckpt-suite again" in done.stderr


def test_a_library_of_another_platform_is_refused(checkout: Path) -> None:
    (checkout / "codecs" / "ckpt_codecs" / "native" / library.PATH.name).write_bytes(b"\x7fELF of another machine")
    done = run(LEVEL, checkout)
    assert done.returncode != 0
    assert f"{library.PATH.name} cannot be loaded" in done.stderr


def test_an_installed_package_compares_no_sources(checkout: Path) -> None:
    (checkout / "codecs" / "kernels" / "level.c").unlink()  # whatever else is called `kernels` in site-packages
    assert run(LEVEL, checkout).returncode == 0


def test_find_sources_takes_the_folder_of_the_kernels_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_sources() == ROOT / "codecs" / "kernels"
    (tmp_path / "kernels").mkdir()
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "ckpt_codecs" / "native" / "sources.py"))
    assert find_sources() is None


KINDS = {
    "pointer": library.ADDRESS,
    "int": library.INT,
    "i64": library.INT64,
    "u32": library.UINT32,
    "u64": library.UINT64,
    "float": library.FLOAT,
    "double": library.DOUBLE,
}


@pytest.mark.parametrize("family", kernel_headers.FAMILIES)
def test_the_table_of_signatures_is_what_the_header_declares(family: str) -> None:
    """A wrong kind of argument would be no error: ctypes would pass other bits."""
    prototypes = kernel_headers.read_prototypes(family)
    declared = {
        name: tuple(KINDS[kind] for kind in (prototype.result, *prototype.arguments))
        for name, prototype in prototypes.items()
    }
    (module,) = (module for module in cpu_levels.families() if module.__name__.endswith(family))
    assert declared
    assert declared == module.SIGNATURES


def test_the_library_exports_what_the_headers_declare_and_nothing_else() -> None:
    names = {name for family in kernel_headers.FAMILIES for name in kernel_headers.read_prototypes(family)}
    prefixes = [f"v{level}" for level in ((2, 3) if X86 else (1,))]
    declared = {f"{prefix}_{name}" for prefix in prefixes for name in names} | {
        "ckpt_level",
        "ckpt_sources",
        "ckpt_features",
    }
    assert exported_functions(library.PATH) == declared


SECTION = np.dtype(
    {
        "names": ["type", "offset", "size", "link"],
        "formats": ["<u4", "<u8", "<u8", "<u4"],
        "offsets": [4, 24, 32, 40],
        "itemsize": 64,
    }
)
"""An entry of ELF's table of sections, and of its tables of symbols."""
SYMBOL = np.dtype(
    {"names": ["name", "info", "section"], "formats": ["<u4", "u1", "<u2"], "offsets": [0, 4, 6], "itemsize": 24}
)


def exported_functions(path: Path) -> set[str]:
    """The functions that an ELF library defines for others: entries of its table of dynamic symbols."""
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    table = np.frombuffer(data, SECTION, int.from_bytes(data[60:62], "little"), int.from_bytes(data[40:48], "little"))
    (symbols,) = table[table["type"] == 11]
    strings = table[symbols["link"]]
    names = data[strings["offset"] : strings["offset"] + strings["size"]]
    entries = np.frombuffer(data, SYMBOL, symbols["size"] // SYMBOL.itemsize, symbols["offset"])
    defined = entries[(entries["section"] != 0) & (entries["info"] & 15 == 2)]
    return {names[start : names.index(b"\0", start)].decode() for start in defined["name"].tolist()}


def test_the_library_is_small() -> None:
    assert library.PATH.stat().st_size <= 575_000


@pytest.mark.parametrize("writable", [False, True])
def test_an_address_is_where_the_elements_lie(writable: bool) -> None:
    for array in (np.arange(5, dtype=np.uint16), np.arange(5, dtype=np.uint16)[1:], np.empty(0, np.uint16)):
        array.flags.writeable = writable
        assert library.address(array, np.uint16, writable) == array.ctypes.data


def test_an_address_is_refused_where_a_kernel_could_not_trust_it() -> None:
    words = np.arange(8, dtype=np.uint32)
    constant = words.copy()
    constant.flags.writeable = False
    for array, dtype, writable in [
        (words[::2], np.uint32, False),
        (words, np.uint16, False),
        (words, np.int32, False),
        (words.astype(">u4"), np.uint32, False),
        (words.reshape(2, 4).T, np.uint32, False),
        (constant, np.uint32, True),
    ]:
        with pytest.raises(CodecError, match="a bug in ckpt"):
            library.address(array, dtype, writable)
    assert library.address(constant, np.uint32)
    assert library.optional_address(None, np.uint32) is None


def test_scratch_is_aligned_and_as_large_as_asked() -> None:
    for size in (0, 1, 100_000, 3, 1 << 20):
        start, room = library.scratch(size)
        assert start % 64 == 0
        assert room >= size
        ctypes.memset(start, 0, room)


def test_threads_share_no_scratch() -> None:
    starts = [library.scratch(1000)[0]]
    thread = threading.Thread(target=lambda: starts.append(library.scratch(1000)[0]))
    thread.start()
    thread.join()
    assert starts[0] != starts[1]


def test_a_kernel_called_with_sizes_that_do_not_fit_raises() -> None:
    from ckpt_codecs.native import deltas

    with pytest.raises(CodecError, match="scale returned -1: sizes do not fit"):
        deltas.kernels.scale(None, -1, 1.0, None)


def test_another_level_is_bound_for_a_while() -> None:
    from ckpt_codecs.native import deltas

    for level in library.levels():
        with cpu_levels.at_level(level):
            assert deltas.kernels.scale.__name__ == f"v{level}_scale"
    assert deltas.kernels.scale.__name__ == f"v{library.level()}_scale"


def test_library_is_loaded_at_the_first_kernel() -> None:
    code = (
        "from ckpt_codecs.native import deltas, library\n"
        "print(library.load.cache_info().currsize)\n"
        "deltas.kernels.scale\n"
        "print(library.load.cache_info().currsize)\n"
    )
    assert run(code).stdout.split() == ["0", "1"]


@pytest.mark.slow
def test_the_library_is_ready_in_twenty_milliseconds() -> None:
    """Of a processor: hash of the sources, load, and every kernel bound.

    numpy is imported before the clock starts: every user of a kernel has it,
    and ``import ckpt_codecs`` no longer imports it for them.
    """
    code = (
        "import importlib, time, ckpt_codecs, numpy\n"
        "before = time.process_time()\n"
        f"for family in {kernel_headers.FAMILIES!r}:\n"
        "    module = importlib.import_module(f'ckpt_codecs.native.{family}')\n"
        "    for name in module.SIGNATURES: getattr(module.kernels, name)\n"
        "print(time.process_time() - before)\n"
    )
    assert min(float(run(code).stdout) for _ in range(5)) / slowness() < 0.02
