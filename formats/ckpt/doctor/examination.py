"""What `ckpt doctor` finds out: does ckpt work on this machine, in this folder, and what is missing for which feature?

Everything is plain data. No value of an environment variable gets into it: the names of variables are enough. This
package imports no other package of third parties until it looks at them, so that it works where one of them is missing.
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.doctor.credentials import StoreCredentials, find_credentials
from ckpt.doctor.file_system import FileSystem, try_file_system
from ckpt.doctor.machine import Machine, describe_machine
from ckpt.doctor.packages import Package, find_packages
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.core.version import VERSION

if TYPE_CHECKING:
    from ckpt.protection.survey import SurveyedFolder

MIN_OPEN_FILES = 1024
"""A checkpoint of hundreds of ranks has hundreds of files, which are read by several threads."""
MIN_MEMORY_NBYTES = 512 << 20
"""The default of `--memory` is 256 MiB, and NumPy and the index need some."""
MIN_SHARED_NBYTES = 128 << 20
"""Containers often start with 64 MiB, which is too little for a log that is kept there."""
MIN_FREE_NBYTES = 1 << 30
MIN_FREE_FILES = 10_000
LOCAL_FILE_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"})
"""Those that are lost with their machine, or with its disk."""


_INSTRUCTIONS = {1: "any 64-bit ARM", 2: "x86-64-v2", 3: "x86-64-v3"}
"""By level of the kernels."""


@dataclass(frozen=True)
class LoadedKernels:
    """The library of C kernels, as it is loaded here."""

    level: int | None
    """The level that is bound."""
    levels: tuple[int, ...]
    """The levels that this CPU can run."""
    problem: str | None
    """Why they cannot be used; None if they can."""

    @property
    def instructions(self) -> str | None:
        """The name of the bound level."""
        return None if self.level is None else _INSTRUCTIONS.get(self.level, f"level {self.level}")


@dataclass(frozen=True)
class Shortcoming:
    """Something that is missing or does not work."""

    what: str
    feature: str
    """What cannot be done without it."""
    remedy: str
    """A command, or what else to do."""
    needed: bool
    """Whether reading and writing in this folder needs it."""


@dataclass(frozen=True)
class Examination:
    """The machine, the folder and the installation, as they are now."""

    version: str
    python: str
    packages: tuple[Package, ...]
    kernels: LoadedKernels
    file_system: FileSystem
    machine: Machine
    stores: tuple[StoreCredentials, ...]
    parity: "tuple[SurveyedFolder, ...]"
    """The checkpoints that are here, the newest first, and what there is of parity for them."""
    shortcomings: tuple[Shortcoming, ...]

    @property
    def is_fit(self) -> bool:
        """Whether everything works that reading and writing in this folder needs."""
        return not any(one.needed for one in self.shortcomings)


def examine(folder: Path, environment: Mapping[str, str], home: Path) -> Examination:
    """Look at this installation, and try what the file system of an existing folder can do.

    `environment` and `home` say which credentials are present; their values get nowhere. The trials write at most
    16 MiB in a hidden folder, which is removed. If the folder has checkpoints, at most 64 MiB of them are read.
    """
    packages, kernels = find_packages(), try_kernels()
    file_system, machine = try_file_system(folder), describe_machine()
    # Where nothing can be written, no parity can be either.
    parity = () if kernels.problem or file_system.problem else _survey(folder)
    return Examination(
        version=VERSION,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages=packages,
        kernels=kernels,
        file_system=file_system,
        machine=machine,
        stores=find_credentials(environment, home),
        parity=parity,
        shortcomings=(
            *_of_packages(packages),
            *_of_kernels(kernels),
            *_of_file_system(file_system),
            *_of_machine(machine),
            *_of_parity(parity, file_system.kind),
        ),
    )


def _survey(folder: Path) -> "tuple[SurveyedFolder, ...]":
    """The checkpoints here with their parity; none if a package is missing that reads them."""
    try:
        from ckpt.protection.survey import survey
    except ImportError:
        return ()
    return survey(folder)


def try_kernels() -> LoadedKernels:
    """Load the library, if it can be loaded."""
    try:
        from ckpt_codecs.native import library
    except Exception as error:  # NumPy is missing or broken
        return LoadedKernels(None, (), f"the compiled kernels cannot be loaded: {_first_line(error)}")
    try:
        levels = library.levels()
        try:
            return LoadedKernels(library.level(), levels, None)
        except library.LibraryError:  # its message quotes the variable
            return LoadedKernels(None, levels, "CKPT_CPU_LEVEL names no level that this CPU runs")
    except (ImportError, OSError, AttributeError) as error:
        return LoadedKernels(None, (), _first_line(error))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _of_packages(packages: tuple[Package, ...]) -> Iterator[Shortcoming]:
    for package in packages:
        if package.problem is not None:
            yield Shortcoming(package.problem, package.feature, package.remedy, package.needed)


def _of_kernels(kernels: LoadedKernels) -> Iterator[Shortcoming]:
    if kernels.problem is not None:
        remedy = "pip install --force-reinstall --no-deps ckpt-suite"
        if kernels.levels:
            remedy = "unset CKPT_CPU_LEVEL"
        elif "make kernels" in kernels.problem:  # a checkout
            remedy = "make kernels"
        yield Shortcoming(kernels.problem, "coded checkpoints, chains and recording", remedy, True)


def _of_file_system(file_system: FileSystem) -> Iterator[Shortcoming]:
    place = printable(str(file_system.folder))
    if file_system.problem is not None:
        yield Shortcoming(
            f"{place} cannot be written: {file_system.problem}",
            "writing here",
            "name another folder: ckpt doctor PATH",
            True,
        )
        return
    if file_system.locks is False:
        yield Shortcoming(
            "this file system cannot lock files",
            "protection against two writers of one target",
            "write to another file system, or give --no-lock if no other process writes the target",
            True,
        )
    if file_system.syncs is False:
        yield Shortcoming(
            "this file system cannot flush files to the disk",
            "safety after a power failure",
            "name another folder",
            True,
        )
    if file_system.leftover is not None:
        yield Shortcoming(
            f"{printable(file_system.leftover)} could not be removed",
            "a clean folder",
            f"rm -r '{printable(file_system.leftover)}'",
            False,
        )
    if file_system.free_nbytes < MIN_FREE_NBYTES:
        free = format_nbytes(file_system.free_nbytes)
        yield Shortcoming(f"only {free} are free in {place}", "writing large checkpoints", f"df -h '{place}'", False)
    if file_system.free_files is not None and file_system.free_files < MIN_FREE_FILES:
        yield Shortcoming(
            f"only {file_system.free_files:,} more files fit in {place}",
            "writing many files",
            f"df -i '{place}'",
            False,
        )


def _of_machine(machine: Machine) -> Iterator[Shortcoming]:
    if machine.open_files is not None and machine.open_files < MIN_OPEN_FILES:
        yield Shortcoming(
            f"a process may open only {machine.open_files} files",
            "checkpoints of hundreds of ranks",
            f"ulimit -n {MIN_OPEN_FILES * 4}",
            False,
        )
    available = machine.available_nbytes
    if available is not None and available < MIN_MEMORY_NBYTES:
        yield Shortcoming(
            f"only {format_nbytes(available)} of memory are available",
            "the default of --memory, 256M",
            "ckpt convert --memory 64M --workers 1 ...",
            False,
        )
    shared = machine.shared_nbytes
    if shared is not None and shared < MIN_SHARED_NBYTES:
        yield Shortcoming(
            f"/dev/shm has only {format_nbytes(shared)}",
            "`ckpt shadow --mirror /dev/shm`, and the data loaders of torch",
            "docker run --shm-size=8g ..., or mount -o remount,size=8g /dev/shm",
            False,
        )


def _of_parity(surveyed: "Sequence[SurveyedFolder]", kind: str | None) -> Iterator[Shortcoming]:
    """One shortcoming of each kind: it names the newest checkpoint that has it, and counts the others."""

    def some(those: "Sequence[SurveyedFolder]", what: str) -> str:
        others = f" (and {len(those) - 1:,} more)" if len(those) > 1 else ""
        return f"{printable(str(those[0].path))}{others}: {what}"

    repair = "ckpt repair {}"
    if none := [one for one in surveyed if not one.has_parity]:
        feature = "repair of files that are lost or damaged"
        state = none[0].path
        is_state = (state.parent / "chain.json").is_file()
        remedy = f"ckpt protect {_quoted(state.parent)} --by state" if is_state else _protect(none[0])
        yield Shortcoming(some(none, "no parity"), feature, remedy, False)
    if unreadable := [one for one in surveyed if one.problem is not None]:
        first = unreadable[0]
        what = f"its parity cannot be read: {printable(first.problem or '')}"
        remedy = f"{_protect(first)} --overwrite"
        yield Shortcoming(some(unreadable, what), "repair of this checkpoint", remedy, False)
    if changed := [one for one in surveyed if one.changed]:
        first = changed[0]
        place, count = _quoted(first.path), len(first.changed)
        files = "1 file is" if count == 1 else f"{count:,} files are"
        what = f"{files} not what was protected, such as {printable(first.changed[0])}"
        remedy = f"{repair.format(place)} --dry-run; if you changed it on purpose, {_protect(first)} --overwrite"
        yield Shortcoming(some(changed, what), "repair of this checkpoint", remedy, False)
    if unprotected := [one for one in surveyed if one.unprotected]:
        first = unprotected[0]
        count = len(first.unprotected)
        files = "1 file" if count == 1 else f"{count:,} files"
        what = f"{files} without parity, such as {printable(first.unprotected[0])}"
        remedy = _protect(first) if first.by == "state" else f"{_protect(first)} --overwrite"
        yield Shortcoming(some(unprotected, what), "repair of these files", remedy, False)
    if damaged := [one for one in surveyed if one.damaged_parity]:
        what = f"parity is damaged or lost, such as {printable(str(damaged[0].damaged_parity[0]))}"
        remedy = repair.format(_quoted(damaged[0].path))
        yield Shortcoming(some(damaged, what), "repair of all that parity promises", remedy, False)
    if single := [one for one in surveyed if one.domains == 1 and one.by not in ("part", "state")]:
        what = f"all files are lost together (--by {single[0].by}), so its parity is a copy of them"
        remedy = f"{_protect(single[0], by='file')} --overwrite"
        yield Shortcoming(some(single, what), "repair with less space than a copy", remedy, False)
    if kind in LOCAL_FILE_SYSTEMS and (near := [one for one in surveyed if one.losses and one.is_on_one_disk]):
        remedy = f"{_protect(near[0], into=('/OTHER/DISK',))} --overwrite"
        if near[0].by == "state":  # its parity is in the chain
            remedy = f"ckpt copy {_quoted(near[0].path)} /OTHER/DISK/{_quoted(near[0].path.name)}"
        what = f"its {near[0].domains:,} domains and their parity are all on this disk ({kind})"
        yield Shortcoming(some(near, what), "survival of this disk or machine", remedy, False)


def _quoted(path: Path | str) -> str:
    """A path as a shell takes it."""
    return "'" + printable(str(path)).replace("'", "'\\''") + "'"


def _protect(one: "SurveyedFolder", by: str | None = None, into: "Sequence[Path | str] | None" = None) -> str:
    """The command that writes its parity, anew as it is but for `by` and `into`."""
    by = by or one.by or "file"
    domains = {"file": "", "part": "", "table": " --domains TABLE"}.get(by, f" --by {printable(by)}")
    places = "".join(f" --into {_quoted(place)}" for place in (one.elsewhere if into is None else into))
    return f"ckpt protect {_quoted(one.path)} --lose {one.losses or 2}{domains}{places}"
