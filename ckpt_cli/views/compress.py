"""What `compress` does: code every state, and say what it saved."""

from pathlib import Path
from typing import cast

import click

from ckpt import pipeline
from ckpt import sizes as savings
from ckpt.estimate import estimate
from ckpt.pipeline import Resources
from ckpt.sizes import StateSizes
from ckpt_cli import notes, work
from ckpt_cli.views import report
from ckpt_codecs import CodecError, Rounded, parse
from ckpt_formats.core.checkpoint import Checkpoint, Goal, OriginalForm, WritableFormat
from ckpt_formats.core.encoding import EncodingOptions, Level
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.registry import FORMATS, format_named, writable
from ckpt_formats.universal import Universal

AUTO = "auto"
_BY_SUFFIX = {".safetensors": "safetensors", **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch")}
_HINT = "Leave it out, and the best is taken for each state."


def coding_of(codec: str, level: str, check: bool) -> EncodingOptions:
    """What the user chose. Raises `Unsupported` for a codec that is not there, or loses bits."""
    if codec == AUTO:
        return EncodingOptions(None, cast(Level, level), check)
    try:
        parsed = parse(codec)
    except CodecError as error:
        raise Unsupported(f"--codec: {error}", hint=_HINT) from None
    if not parsed.lossless:
        raise Unsupported(f"--codec: {parsed.name} changes values, and compress must not", hint=_HINT)
    if isinstance(parsed, Rounded):
        raise Unsupported("--codec: a copy that is its master, rounded, is always found", hint=_HINT)
    return EncodingOptions(parsed.config(), cast(Level, level), check)


def run(source: Checkpoint, goal: Goal, choices: object, effort: Resources, as_json: bool) -> None:
    """Compress, with a bar, and print the table of what is stored now."""
    format = Universal()
    outcome, seconds = work.write(source, format, goal, choices, effort, "compressing")
    rows = savings.written_rows(() if format.written is None else format.written.entries)
    if as_json:
        report.data(report.outcome_json(outcome, seconds) | _json(rows))
        return
    _print(rows, "stored")
    report.outcome(outcome, seconds, as_json=False)


def foretell(source: Checkpoint, goal: Goal, as_json: bool) -> None:
    """Print the same table as it would be, about; nothing is written."""
    pipeline.plan(source, writable(Universal.name), goal)
    work.load_kernels()
    rows = estimate(source, goal.coding or EncodingOptions())
    if as_json:
        report.data({"target": str(goal.target), "estimate": True} | _json(rows))
        return
    _print(rows, "about")
    report.say(f"estimated for {printable(str(goal.target))} from some chunks of each kind; nothing was written")


def undo(source: Checkpoint, target: Path, format_name: str | None) -> tuple[WritableFormat, Goal]:
    """In which format a checkpoint is to be decompressed, and where: as it was, unless the user says otherwise.

    What was a single file gets its old name in a folder that is there, and else its old ending if it is given none.
    """
    was = source.original
    asked = format_name or _BY_SUFFIX.get(target.suffix)
    format = writable(asked or Universal.name) if asked or was is None else _former(source, was)
    if was is not None and was.format == format.name and was.form is not None and was.form() is None:
        notes.note(
            f"the file's own form could not be noted; it gets that of `ckpt convert --to {format.name}`",
            weight=Weight.UNSURE,
        )
    if was is not None and was.file is not None and was.format == format.name:
        if target.is_dir():
            target = target / was.file
        elif asked is None and not target.suffix:
            target = target.with_name(target.name + Path(was.file).suffix)
    return format, Goal(target, as_it_was=True)


def _former(source: Checkpoint, was: OriginalForm) -> WritableFormat:
    """The format that a checkpoint was in; universal, if that cannot be written, or not all of this."""
    format = format_named(was.format) if was.format in FORMATS else None
    if isinstance(format, WritableFormat):
        try:
            lost: tuple[str | Notice, ...] = format.losses(source, format.plan(source, Goal(Path(was.file or ""))))
        except Unsupported as error:
            lost = (error.what,)
        if not lost:
            return format
        lacks = "; ".join(map(str, lost))
        notes.note(f"universal, since {format.name} cannot hold all of it: {lacks}", weight=Weight.UNSURE)
    return Universal()


def _print(rows: list[StateSizes], sizes: str) -> None:
    for line in savings.table(rows, sizes):
        click.echo(line)


def _json(rows: list[StateSizes]) -> dict[str, object]:
    whole = savings.total(rows)
    ratio = None if whole.ratio is None else round(whole.ratio, 4)
    said = {"raw_nbytes": whole.raw, "stored_nbytes": whole.stored, "ratio": ratio}
    return said | {"states": [row.to_json() for row in rows]}
