"""What commands print: results on stdout, everything else on stderr."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt_cli import notes
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.text import counted, format_nbytes, list_names, printable

if TYPE_CHECKING:
    from ckpt.findings.not_finite import NotFinite
    from ckpt.findings.report import Finding
    from ckpt_formats.core.checkpoint import Checkpoint

_MAX_LENGTH = 1000
"""Characters of a message."""


def say(text: str) -> None:
    """Print a line on stderr, after the notes."""
    notes.flush()
    click.echo(text, err=True)


def conclude(text: str) -> None:
    """Print a line of the result on stdout, after the notes."""
    notes.flush()
    click.echo(text)


_gathered: list[Mapping[str, Any]] | None = None
"""The objects of a command that prints several as one; None if each is printed."""


@contextmanager
def gathered() -> Iterator[list[Mapping[str, Any]]]:
    """Within the context, `data` prints nothing; the objects are in the list."""
    global _gathered
    around, _gathered = _gathered, []
    try:
        yield _gathered
    finally:
        _gathered = around


def data(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout, with the notes of the command."""
    if _gathered is not None:
        _gathered.append(value)
        return
    click.echo(json.dumps({**value, "notes": notes.to_json()}, allow_nan=False))


@dataclass(frozen=True)
class CheckedPart:
    """How many parameters of a checkpoint are checked, and how many `--only` and `--skip` leave out."""

    parameters: int
    left_out: int = 0

    def __str__(self) -> str:
        """What was not checked, for the end of a sentence: empty if nothing is left out."""
        every = self.parameters + self.left_out
        return f"; not checked: {self.left_out:,} of {every:,} parameters" if self.left_out else ""


def findings(
    checkpoint: "Checkpoint",
    part: CheckedPart,
    problems: "Sequence[Finding]",
    seconds: float,
    as_json: bool,
    strange: "Sequence[NotFinite] | None" = None,
    has_read_all: bool = False,
) -> None:
    """Print the findings of `verify`, or that there are none.

    strange: the states with NaN or infinity; None if no values were read. has_read_all: whether all values were, also
    those without checksums.
    """
    if as_json:
        fields = findings_json(checkpoint.path, problems, seconds, part.left_out)
        if strange is not None:
            fields["not_finite"] = list(map(counts_json, strange))
        data(fields | {"checksums": len(checkpoint.seals), "parameters": part.parameters})
        return
    print_findings(problems)
    if problems:
        conclude(f"DAMAGED: {len(problems)} finding{'s' * (len(problems) > 1)} in {printable(str(checkpoint.path))}")
    else:
        from ckpt.findings.checks import nbytes_sealed

        tensors = _count(checkpoint)
        if checkpoint.seals:
            sealed = format_nbytes(nbytes_sealed(checkpoint))
            match = "matches" if len(checkpoint.seals) == 1 else "match"
            checksums = f"{counted(len(checkpoint.seals), 'checksum')} over {sealed} {match}"
            facts = f"{counted(tensors, 'tensor')} complete, {checksums}, copies are equal"
        else:
            read = "were not checked" if strange is None else "were read, but not compared"
            why = f"{checkpoint.format} has no checksums"
            facts = f"headers of {counted(tensors, 'tensor')} are complete; the values {read}: {why}"
        if count := sum(one.nans + one.infinities for one in strange or ()):
            facts += f"; {counted(count, 'value')} {'is' if count == 1 else 'are'} NaN or infinite"
        elif has_read_all:
            facts += "; no value is NaN or infinite"
        conclude(f"ok: {printable(str(checkpoint.path))}: {facts}{part} ({seconds:.1f} s)")


def counts_json(one: "NotFinite") -> dict[str, Any]:
    """How many values of a state are NaN or infinite, as plain data."""
    return {"tensor": one.name, "state": one.state, "nan": one.nans, "infinite": one.infinities}


def quick(
    path: Path, problems: "Sequence[Finding]", seconds: float, ok: str, as_json: bool, part: CheckedPart | None = None
) -> None:
    """Print the findings of `verify --quick`, or that there are none. `part`: of a checkpoint; None for a chain."""
    part = part or CheckedPart(0)
    if as_json:
        data(findings_json(path, problems, seconds, part.left_out) | {"quick": True})
        return
    print_findings(problems)
    place = printable(str(path))
    if problems:
        conclude(f"DAMAGED: {len(problems)} finding{'s' * (len(problems) > 1)} in {place}")
    else:
        conclude(f"ok: {place}: {ok}; no tensor was read{part} ({seconds:.1f} s)")


def _count(checkpoint: "Checkpoint") -> int:
    """How many states there are."""
    from ckpt_formats.core.state_table import TabulatedParameters

    parameters = checkpoint.parameters
    if isinstance(parameters, TabulatedParameters):
        return len(parameters.table)
    return sum(len(parameter.states) for parameter in parameters.values())


def unreadable(path: Path, error: CkptError, problems: "Sequence[Finding]", seconds: float, as_json: bool) -> None:
    """Print the findings of `verify` for a checkpoint that cannot be opened, and the error.

    The error is among the findings. It is in the JSON, and not among those that are printed.
    """
    if as_json:
        data(findings_json(path, problems, seconds) | {"checksums": 0, "parameters": 0})
    else:
        print_findings([one for one in problems if (one.what, one.where) != (error.what, error.where or str(path))])
    if notes.is_verbose():
        import traceback

        traceback.print_exception(error)
    error_lines(error)


def error_lines(error: CkptError) -> None:
    """Print the error, its place and a hint on stderr."""
    for label, text in (("error", error.what), ("where", error.where), ("hint", error.hint)):
        if text:
            say(f"{label}: {bounded(text)}")


def bounded(text: str) -> str:
    """A text with names from files, escaped and cut to a maximum length."""
    shown = printable(text)
    return shown if len(shown) <= _MAX_LENGTH else f"{shown[:_MAX_LENGTH]}…"


def findings_json(path: Path, problems: "Sequence[Finding]", seconds: float, left_out: int = 0) -> dict[str, Any]:
    """The findings as plain data. `left_out`: how many parameters were not checked."""
    rows = [{"kind": f.kind, "what": f.what, "where": f.where, "tensors": list(f.tensors)} for f in problems]
    return {
        "path": str(path),
        "ok": not problems,
        "findings": rows,
        "left_out": left_out,
        "seconds": round(seconds, 3),
    }


def print_findings(problems: "Sequence[Finding]") -> None:
    for finding in problems:
        names = list_names(finding.tensors, printable, 5)
        click.echo(
            f"{finding.kind}: {printable(finding.what)}\n  in "
            f"{printable(finding.where)}{f', tensors {names}' if names else ''}"
        )


def file_count(count: int) -> str:
    """How many files, in words: `1 file`, `2 files`."""
    return f"{count} file{'s' * (count != 1)}"
