"""What commands print: data on stdout, all else on stderr."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ckpt_cli.checks import Finding
from ckpt_cli.pipeline import Outcome, space_needed
from ckpt_formats.base import Checkpoint, Part, WritableFormat
from ckpt_formats.naming import show
from ckpt_formats.notices import by_weight

_MOST_ROWS = 20


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
    """A line for people, on stderr."""
    click.echo(text, err=True)


def data(value: Any) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(value, allow_nan=False))


def say_notices(checkpoint: Checkpoint) -> None:
    for notice in by_weight(checkpoint.notices):
        say(f"note: {show(str(notice))}")


def say_losses(format: WritableFormat, checkpoint: Checkpoint, parts: Sequence[Part]) -> None:
    for loss in format.losses(checkpoint, parts):
        say(f"note: {format.name} has no place for {show(loss)}")
    for remark in format.remarks(checkpoint, parts):
        say(f"note: {show(remark)}")


def plan(checkpoint: Checkpoint, parts: Sequence[Part], target: Path, format_name: str, as_json: bool) -> None:
    """What a run would write."""
    if as_json:
        files = [
            {"file": part.file, "nbytes": part.nbytes, "tensors": [p.name for p in part.parameters]} for part in parts
        ]
        data({"target": str(target), "format": format_name, "nbytes": space_needed(parts), "files": files})
        return
    for part in sorted(parts, key=lambda part: -part.nbytes)[:_MOST_ROWS]:
        click.echo(f"{size(part.nbytes):>10}  {part.file}  ({_names([p.name for p in part.parameters], 2)})")
    if len(parts) > _MOST_ROWS:
        click.echo(f"{'':>10}  and {len(parts) - _MOST_ROWS} smaller files")
    total = sum(shard.nbytes for shard in checkpoint.shards)
    say(
        f"would read up to {size(total)} and write about {size(space_needed(parts))} in {len(parts)} files "
        f"to {show(str(target))}; nothing was written"
    )


def outcome(done: Outcome, seconds: float, as_json: bool) -> None:
    """What a run wrote."""
    if as_json:
        data(outcome_json(done, seconds))
        return
    resumed = f", {done.resumed} of them by an earlier run" if done.resumed else ""
    checked = f"; {done.checksums} checksums of the source hold" if done.checksums else "; the source has no checksums"
    rate = size(done.nbytes / seconds) if seconds else "?"
    wrote = f"wrote {show(str(done.target))}: {size(done.nbytes)} in {done.files} files{resumed}"
    say(f"{wrote}, {seconds:.1f} s, {rate}/s{checked}")


def outcome_json(done: Outcome, seconds: float) -> dict[str, Any]:
    """What a run wrote, for programs."""
    said = {"target": str(done.target), "files": done.files, "nbytes": done.nbytes, "seconds": round(seconds, 3)}
    return said | {"resumed_files": done.resumed, "checksums_verified": done.checksums}


def findings(checkpoint: Checkpoint, found: Sequence[Finding], seconds: float, as_json: bool) -> None:
    """What `verify` found, or that all is well."""
    read = sum(seal.nbytes for seal in checkpoint.seals)
    if as_json:
        rows = [{"kind": f.kind, "what": f.what, "where": f.where, "tensors": list(f.tensors)} for f in found]
        said = {"path": str(checkpoint.path), "ok": not found, "findings": rows, "seconds": round(seconds, 3)}
        data(said | {"checksums": len(checkpoint.seals), "parameters": len(checkpoint.parameters)})
        return
    for finding in found:
        names = _names(finding.tensors, 5)
        click.echo(
            f"{finding.kind}: {show(finding.what)}\n  in {show(finding.where)}{f', tensors {names}' if names else ''}"
        )
    tensors = sum(len(parameter.states) for parameter in checkpoint.parameters.values())
    if found:
        say(f"DAMAGED: {len(found)} findings in {show(str(checkpoint.path))}")
    else:
        held = (
            f"{len(checkpoint.seals)} checksums over {size(read)} hold"
            if checkpoint.seals
            else "the files hold no checksums"
        )
        say(f"ok: {show(str(checkpoint.path))}: {tensors} tensors whole, {held}, copies agree ({seconds:.1f} s)")


def _names(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(show, names[:most])) + more
