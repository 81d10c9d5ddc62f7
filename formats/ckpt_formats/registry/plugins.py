"""Formats of other installed packages: the entry points of the group `ckpt.formats`, whose names are those of formats.

A package is imported when its format is named, or when no format of ckpt knows a path. What such a package does wrong
is an error that names it, or a notice if another format reads the path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ckpt_formats.core.errors import CkptError, UnsupportedError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.registry.listed import FORMATS

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

    from ckpt_formats.core.format import Format

T = TypeVar("T")

GROUP = "ckpt.formats"
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_FAULTS = (Exception, SystemExit)
"""What code of others may raise. Interrupts and a lack of memory stay what they are."""


@dataclass(frozen=True)
class Plugin:
    """A format that an installed package provides. Nothing of it is imported before `load`."""

    name: str
    package: str
    """The name of the package and its version, such as `npy-ckpt 1.0`; of several packages all, joined by commas."""
    entry: EntryPoint | None
    """None if several packages provide a format of this name."""

    def load(self) -> Format:
        """Import the package, and return its format with default options.

        Raises `UnsupportedError`, which names the package, if it cannot be imported or is not a format of this name.
        """
        if self.entry is None:
            what = f"several packages provide the format `{self.name}`: {self.package}"
            raise UnsupportedError(what, hint="Uninstall all but one of them.")
        with self.blamed("cannot be loaded"):
            format = _format_of(self.entry)
        _LOADED[type(format)] = self
        return format

    def loaded(self) -> Format | Notice:
        """Return the format, or a notice with what is wrong with the package."""
        try:
            return self.load()
        except CkptError as error:
            return Notice(error.what, weight=Weight.UNSURE)

    def detecting(self, path: Path) -> Format | Notice | None:
        """Return the format if it detects a path, None if it does not, or a notice with what is wrong with it."""
        format = self.loaded()
        if isinstance(format, Notice):
            return format
        try:
            with self.blamed("fails"):
                return format if format.detect(path) else None
        except CkptError as error:
            return Notice(error.what, weight=Weight.UNSURE)

    @contextmanager
    def blamed(self, what: str, *but: type[BaseException]) -> Iterator[None]:
        """Within, turn what the package raises into an `UnsupportedError` that names it; not errors of ckpt, nor
        `but`."""
        try:
            yield
        except _FAULTS as error:
            if isinstance(error, (CkptError, MemoryError, *but)):
                raise
            reason = printable(f"{type(error).__name__}: {error}")[:300]
            raise UnsupportedError(
                f"the format `{self.name}` of the package {self.package} {what}: {reason}",
                hint="Update or uninstall that package, or report this to its authors.",
            ) from error


def plugins() -> dict[str, Plugin]:
    """Return the formats of installed packages by name, in the order of their names. Nothing is imported.

    An entry point whose name is that of a format of ckpt, or cannot be the name of one, is left out: see `ignored`.
    """
    entries: dict[str, list[EntryPoint]] = {}
    for entry in _entry_points():
        if _reason_to_ignore(entry) is None:
            entries.setdefault(entry.name, []).append(entry)
    return {
        name: Plugin(name, ", ".join(map(_package, several)), several[0] if len(several) == 1 else None)
        for name, several in sorted(entries.items())
    }


def ignored() -> tuple[Notice, ...]:
    """Return a notice for each entry point that provides no format, because of its name."""
    reasons = ((entry, _reason_to_ignore(entry)) for entry in _entry_points())
    return tuple(
        Notice(f"the format {printable(entry.name)!r} of the package {_package(entry)} is ignored: {reason}")
        for entry, reason in reasons
        if reason is not None
    )


def detected(path: Path) -> tuple[Format | None, tuple[Notice, ...]]:
    """Return the first format of a package that detects a path, or None, and notices about formats that cannot say.

    All packages that provide formats are imported until one of them detects it.
    """
    notices: list[Notice] = []
    try:
        known = plugins()
    except UnsupportedError as error:
        return None, (Notice(error.what, weight=Weight.UNSURE),)
    for plugin in known.values():
        answer = plugin.detecting(path)
        if isinstance(answer, Notice):
            notices.append(answer)
        elif answer is not None:
            return answer, tuple(notices)
    return None, tuple(notices)


@contextmanager
def blamed_on_package(format: Format, *but: type[BaseException]) -> Iterator[None]:
    """Within, errors of a format that a package provides become `UnsupportedError`s that name the package.

    Errors of ckpt and `but` stay what they are, and all errors of formats that no package provides.
    """
    plugin = _LOADED.get(type(format))
    with nullcontext() if plugin is None else plugin.blamed("fails", *but):
        yield


def returned(value: T, kind: type[T]) -> T:
    """Return a result of a format. Raises `TypeError` if it is of another kind than the interface has."""
    if not isinstance(value, kind):
        raise TypeError(f"it returned {type(value).__name__}, not {kind.__name__}")
    return value


_LOADED: dict[type, Plugin] = {}
"""The classes of formats that were loaded from packages."""


def _format_of(entry: EntryPoint) -> Format:
    from ckpt_formats.core.format import Format

    format = entry.load()
    if not (isinstance(format, type) and issubclass(format, Format)):
        raise TypeError(f"{entry.value} is not a class derived from ckpt.ext.Format")
    if getattr(format, "name", None) != entry.name:
        raise TypeError(f"the attribute `name` of {entry.value} is not {entry.name!r}")
    if not isinstance(getattr(format, "summary", None), str):
        raise TypeError(f"the attribute `summary` of {entry.value} is not a text")
    return format()


def _entry_points() -> list[EntryPoint]:
    """The entry points of the group, in the order of their names and packages.

    Raises `UnsupportedError` if those of a package cannot be read.
    """
    from importlib.metadata import distributions  # to look at all packages takes time

    entries: dict[str, Sequence[EntryPoint]] = {}
    for distribution in distributions():
        if GROUP in _text(distribution):
            # As Python does, the first of several packages of one name counts.
            entries.setdefault(re.sub(r"[-_.]+", "-", distribution.name).lower(), _of_group(distribution))
    return sorted(chain.from_iterable(entries.values()), key=lambda entry: (entry.name, _package(entry)))


def _text(distribution: Distribution) -> str:
    try:
        return distribution.read_text("entry_points.txt") or ""
    except (OSError, ValueError):
        return ""


def _of_group(distribution: Distribution) -> Sequence[EntryPoint]:
    try:
        return [entry for entry in distribution.entry_points if entry.group == GROUP]
    except Exception as error:  # what is in the file is anything
        what = printable(f"the entry points of the package {distribution.name} cannot be read: {error}")
        raise UnsupportedError(what, hint="Install that package again, or uninstall it.") from error


def _package(entry: EntryPoint) -> str:
    return "?" if entry.dist is None else printable(f"{entry.dist.name} {entry.dist.version}")


def _reason_to_ignore(entry: EntryPoint) -> str | None:
    if entry.name in FORMATS:
        return "ckpt has a format of this name"
    return None if _NAME.fullmatch(entry.name) else "a name has lower-case letters, digits and single hyphens"
