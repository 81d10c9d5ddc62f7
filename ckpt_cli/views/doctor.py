"""`ckpt doctor`: the examination as text or JSON. It is plain text: rich may be what is missing."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ckpt.doctor import Examination
from ckpt.doctor.credentials import StoreCredentials
from ckpt.doctor.file_system import FileSystem
from ckpt.doctor.machine import Machine
from ckpt_cli.views import report
from ckpt_formats.core.text import format_nbytes, printable

if TYPE_CHECKING:
    from ckpt.protection.survey import SurveyedFolder

_WIDTH = 14
_MAX_CHECKPOINTS = 10
"""Rows of the text; all are in the JSON."""


def show(examination: Examination, as_json: bool) -> None:
    """Print the examination on stdout."""
    if as_json:
        report.data(to_json(examination))
        return
    for title, rows in (
        ("Versions", _versions(examination)),
        ("File system", _file_system(examination.file_system)),
        ("Machine", _machine(examination.machine)),
        ("Stores", map(_store, examination.stores)),
        *([("Parity", _parity(examination.parity))] if examination.parity else []),
    ):
        click.echo(click.style(title, bold=True))
        for name, text in rows:
            click.echo(f"  {name:<{_WIDTH}} {text}")
    for title, needed in (("Needed", True), ("Missing for some features", False)):
        rows_of = [one for one in examination.shortcomings if one.needed is needed]
        if rows_of:
            click.echo(click.style(title, bold=True))
        for one in rows_of:
            click.echo(f"  {printable(one.what)}\n      for   {one.feature}\n      fix   {one.remedy}")
    click.echo("ok: ckpt works here" if examination.is_fit else "NOT OK: see `Needed`")


def to_json(examination: Examination) -> dict[str, Any]:
    """The examination as plain data."""
    fields = asdict(examination) | {"ok": examination.is_fit}
    fields["file_system"]["folder"] = str(examination.file_system.folder)
    fields["kernels"]["instructions"] = examination.kernels.instructions
    for fields_of, surveyed in zip(fields["parity"], examination.parity, strict=True):
        fields_of |= {
            "path": str(surveyed.path),
            "elsewhere": [str(path) for path in surveyed.elsewhere],
            "damaged_parity": [str(path) for path in surveyed.damaged_parity],
            "fits": surveyed.fits,
        }
    for store, one in zip(fields["stores"], examination.stores, strict=True):
        store["present"] = one.present
    return fields


def _versions(examination: Examination) -> Iterator[tuple[str, str]]:
    yield "ckpt", examination.version
    yield "Python", examination.python
    kernels = examination.kernels
    yield "kernels", "cannot be used" if kernels.level is None else f"loaded, {kernels.instructions}"
    for one in examination.packages:
        if one.problem is None:
            yield one.name, f"{one.version or 'unknown version':<12} {one.feature}"
        else:
            yield one.name, f"{'missing' if one.needed else '-':<12} {one.feature}"


def _file_system(file_system: FileSystem) -> Iterator[tuple[str, str]]:
    yield (
        "folder",
        f"{printable(str(file_system.folder.absolute()))}, on {file_system.kind or 'an unknown file system'}",
    )
    files = "" if file_system.free_files is None else f", {file_system.free_files:,} files"
    yield "free", f"{format_nbytes(file_system.free_nbytes)}{files}"
    if file_system.problem is not None:
        yield "writing", f"cannot be written: {file_system.problem}"
        return
    instead = " (ckpt looks first instead)" if file_system.renames_without_replacing is False else ""
    yield "rename", f"{_yes(file_system.renames_without_replacing)}, without replacing{instead}"
    yield "locks", _yes(file_system.locks)
    took = "" if file_system.sync_seconds is None else f", {1000 * file_system.sync_seconds:.1f} ms for a small file"
    yield "flush", f"{_yes(file_system.syncs)}{took}"
    yield "reflinks", _yes(file_system.reflinks)
    if file_system.written_rate is None or file_system.read_rate is None:
        yield "speed", "not measured: there is too little space"
    else:
        written, read = format_nbytes(file_system.written_rate), format_nbytes(file_system.read_rate)
        yield "speed", f"writes {written}/s with the flush, reads {read}/s (a short trial)"


def _machine(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "system", machine.system
    limit = "" if machine.core_limit is None else f", of which the container may use {machine.core_limit:g}"
    yield "cores", f"{machine.cores}{limit}"
    total, available, allowed = machine.memory_nbytes, machine.available_nbytes, machine.memory_limit_nbytes
    facts = [] if total is None else [format_nbytes(total)]
    facts += [] if available is None else [f"{format_nbytes(available)} available"]
    facts += [] if allowed is None else [f"the container may use {format_nbytes(allowed)}"]
    yield "memory", ", ".join(facts) or "unknown"
    yield "open files", "no limit" if machine.open_files is None else f"{machine.open_files:,} for a process"
    yield "/dev/shm", "none" if machine.shared_nbytes is None else format_nbytes(machine.shared_nbytes)


def _store(credentials: StoreCredentials) -> tuple[str, str]:
    if not credentials.present:
        return credentials.url, f"no credentials ({credentials.store})"
    missing = [f"{name} names a file that does not exist" for name in credentials.missing_files]
    return credentials.url, "; ".join([f"found: {', '.join((*credentials.variables, *credentials.files))}", *missing])


def _parity(surveyed: "tuple[SurveyedFolder, ...]") -> Iterator[tuple[str, str]]:
    for one in surveyed[:_MAX_CHECKPOINTS]:
        yield printable(one.path.name) or ".", _parity_of(one)
    if len(surveyed) > _MAX_CHECKPOINTS:
        yield "...", f"{len(surveyed) - _MAX_CHECKPOINTS:,} more checkpoints (--json lists them)"


def _parity_of(one: "SurveyedFolder") -> str:
    if one.problem is not None:
        return "cannot be read"
    if not one.has_parity:
        return "none"
    what = f"any {one.losses} of {one.domains:,} domains may be lost ({one.by})"
    return what if one.fits else f"{what}, but it does not fit"


def _yes(answer: bool | None) -> str:
    return {True: "yes", False: "no", None: "could not be tried"}[answer]
