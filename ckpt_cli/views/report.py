"""What commands print: data on stdout, all else on stderr."""

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ckpt.pipeline import Result, space_needed
from ckpt.verify import Finding
from ckpt_cli import notes
from ckpt_formats.core.checkpoint import Checkpoint, FilePlan, WritableFormat
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable

_MOST_ROWS = 20
_MOST_SAID = 1000
"""Characters of a message."""


def size(nbytes: float) -> str:
    """A number of bytes for people.

    >>> size(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def say(text: str) -> None:
    """A line for people, on stderr, after the notes."""
    notes.flush()
    click.echo(text, err=True)


def data(value: Mapping[str, Any]) -> None:
    """The one JSON object on stdout, with the notes of the command."""
    click.echo(json.dumps({**value, "notes": notes.to_json()}, allow_nan=False))


def note_losses(format: WritableFormat, checkpoint: Checkpoint, parts: Sequence[FilePlan]) -> None:
    """Note what the format has no place for, and what else is to be known of the result."""
    for loss in format.losses(checkpoint, parts):
        lost = loss if isinstance(loss, Notice) else Notice(loss)
        notes.note(replace(lost, text=f"{format.name} has no place for {lost.text}", weight=Weight.LOST))
    notes.note(*format.remarks(checkpoint, parts), weight=Weight.UNSURE)


def plan(checkpoint: Checkpoint, parts: Sequence[FilePlan], target: Path, format_name: str, as_json: bool) -> None:
    """What a run would write."""
    if as_json:
        files = [
            {"file": part.file, "nbytes": part.nbytes, "tensors": [p.name for p in part.parameters]} for part in parts
        ]
        data({"target": str(target), "format": format_name, "nbytes": space_needed(parts), "files": files})
        return
    notes.flush()
    for part in sorted(parts, key=lambda part: -part.nbytes)[:_MOST_ROWS]:
        click.echo(f"{size(part.nbytes):>10}  {part.file}  ({_names([p.name for p in part.parameters], 2)})")
    if len(parts) > _MOST_ROWS:
        click.echo(f"{'':>10}  and {len(parts) - _MOST_ROWS} smaller files")
    total = sum(shard.nbytes for shard in checkpoint.files)
    say(
        f"would read up to {size(total)} and write about {size(space_needed(parts))} in {len(parts)} files "
        f"to {printable(str(target))}; nothing was written"
    )


def outcome(done: Result, seconds: float, as_json: bool) -> None:
    """What a run wrote."""
    if as_json:
        data(outcome_json(done, seconds))
        return
    resumed = f", {done.resumed} of them by an earlier run" if done.resumed else ""
    checked = f"; {done.checksums} checksums of the source hold" if done.checksums else "; the source has no checksums"
    rate = size(done.nbytes / seconds) if seconds else "?"
    wrote = f"wrote {printable(str(done.target))}: {size(done.nbytes)} in {done.files} files{resumed}"
    say(f"{wrote}, {seconds:.1f} s, {rate}/s{checked}")


def outcome_json(done: Result, seconds: float) -> dict[str, Any]:
    """What a run wrote, for programs."""
    said = {"target": str(done.target), "files": done.files, "nbytes": done.nbytes, "seconds": round(seconds, 3)}
    return said | {"resumed_files": done.resumed, "checksums_verified": done.checksums}


def findings(checkpoint: Checkpoint, found: Sequence[Finding], seconds: float, as_json: bool) -> None:
    """What `verify` found, or that all is well."""
    read = sum(seal.nbytes for seal in checkpoint.seals)
    if as_json:
        said = findings_json(checkpoint.path, found, seconds)
        data(said | {"checksums": len(checkpoint.seals), "parameters": len(checkpoint.parameters)})
        return
    _print(found)
    tensors = sum(len(parameter.states) for parameter in checkpoint.parameters.values())
    if found:
        say(f"DAMAGED: {len(found)} finding{'s' * (len(found) > 1)} in {printable(str(checkpoint.path))}")
    else:
        held = (
            f"{len(checkpoint.seals)} checksums over {size(read)} hold"
            if checkpoint.seals
            else "the files hold no checksums"
        )
        say(f"ok: {printable(str(checkpoint.path))}: {tensors} tensors whole, {held}, copies agree ({seconds:.1f} s)")


def unreadable(path: Path, error: CkptError, found: Sequence[Finding], seconds: float, as_json: bool) -> None:
    """What `verify` found of a checkpoint that cannot be opened, and why it cannot."""
    if as_json:
        data(findings_json(path, found, seconds) | {"checksums": 0, "parameters": 0})
    else:
        _print(found)
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


def _print(found: Sequence[Finding]) -> None:
    for finding in found:
        names = _names(finding.tensors, 5)
        click.echo(
            f"{finding.kind}: {printable(finding.what)}\n  in "
            f"{printable(finding.where)}{f', tensors {names}' if names else ''}"
        )


def _names(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + more
