"""What commands print: data on stdout, all else on stderr."""

import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ckpt.findings import Finding
from ckpt_cli import notes
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.text import format_nbytes, printable

_MOST_SAID = 1000
"""Characters of a message."""


def say(text: str) -> None:
    """A line for people, on stderr, after the notes."""
    notes.flush()
    click.echo(text, err=True)


def data(value: Mapping[str, Any]) -> None:
    """The one JSON object on stdout, with the notes of the command."""
    click.echo(json.dumps({**value, "notes": notes.to_json()}, allow_nan=False))


def findings(checkpoint: Checkpoint, found: Sequence[Finding], seconds: float, as_json: bool) -> None:
    """What `verify` found, or that all is well."""
    read = sum(seal.nbytes for seal in checkpoint.seals)
    if as_json:
        said = findings_json(checkpoint.path, found, seconds)
        data(said | {"checksums": len(checkpoint.seals), "parameters": len(checkpoint.parameters)})
        return
    print_findings(found)
    tensors = sum(len(parameter.states) for parameter in checkpoint.parameters.values())
    if found:
        say(f"DAMAGED: {len(found)} finding{'s' * (len(found) > 1)} in {printable(str(checkpoint.path))}")
    else:
        held = (
            f"{len(checkpoint.seals)} checksums over {format_nbytes(read)} hold"
            if checkpoint.seals
            else "the files hold no checksums"
        )
        say(f"ok: {printable(str(checkpoint.path))}: {tensors} tensors whole, {held}, copies agree ({seconds:.1f} s)")


def unreadable(path: Path, error: CkptError, found: Sequence[Finding], seconds: float, as_json: bool) -> None:
    """What `verify` found of a checkpoint that cannot be opened, and why it cannot."""
    if as_json:
        data(findings_json(path, found, seconds) | {"checksums": 0, "parameters": 0})
    else:
        print_findings(found)
    if notes.is_verbose():
        traceback.print_exception(error)
    error_lines(error)


def error_lines(error: CkptError) -> None:
    """What happened, where, and what to do, on stderr."""
    for label, text in (("error", error.what), ("where", error.where), ("hint", error.hint)):
        if text:
            say(f"{label}: {bounded(text)}")


def bounded(text: str) -> str:
    """A text that files may have a part in, as it can be printed: names there may be as long as they like."""
    shown = printable(text)
    return shown if len(shown) <= _MOST_SAID else f"{shown[:_MOST_SAID]}…"


def findings_json(path: Path, found: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """What was found, for programs."""
    rows = [{"kind": f.kind, "what": f.what, "where": f.where, "tensors": list(f.tensors)} for f in found]
    return {"path": str(path), "ok": not found, "findings": rows, "seconds": round(seconds, 3)}


def print_findings(found: Sequence[Finding]) -> None:
    from ckpt_cli.views.job import first_names

    for finding in found:
        names = first_names(finding.tensors, 5)
        click.echo(
            f"{finding.kind}: {printable(finding.what)}\n  in "
            f"{printable(finding.where)}{f', tensors {names}' if names else ''}"
        )
