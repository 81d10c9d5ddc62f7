"""`ckpt verify CHAIN`: every member of a chain, each stored byte and each decoded chunk once."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ckpt import verify as checks
from ckpt.chains import replay_check as replaying
from ckpt.pipeline import CountBytes, Resources
from ckpt.verify import Finding
from ckpt_cli import notes, work
from ckpt_cli.progress import progress
from ckpt_cli.views import report, segments
from ckpt_cli.views.segments import SegmentView
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Seal
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.tensor import Blob
from ckpt_formats.core.text import printable
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.chain.file import ChainIndex
from ckpt_formats.universal.chain.members import open_member
from ckpt_formats.universal.chunked import EncodedBlob
from ckpt_formats.universal.replay import stored_delta

_MOST_STEPS = 10
_Place = tuple[Path, int]
"""A file, and where in it chunks begin."""


def verify(run: Path, effort: Resources, replay: bool, as_json: bool) -> bool:
    """Check all of a chain, with a bar, and say what was found. Is all well? With `replay`, its logged steps, too."""
    chain = index.read(run)
    opened, findings = open_all(run, chain)
    work.load_kernels()
    began = time.monotonic()
    with progress("verifying", sum(map(checks.nbytes_to_read, opened))) as moved:
        findings += examine(opened, effort, moved)
    views = segments.open_all(run, chain, check=True)
    findings += _of_segments(views)
    if replay:
        findings += _replayed(run, chain, effort)
    findings += dict.fromkeys(finding for one in opened for finding in checks.changed(one))
    seconds = time.monotonic() - began
    _note_approximate(chain)
    _note_torn(views)
    bad = _bad_steps(run, chain, findings)
    if as_json:
        report.data(_json(run, chain, findings, bad, seconds))
    else:
        for finding in findings:
            click.echo(f"{finding.kind}: {printable(finding.what)}\n  in {printable(finding.where)}")
        checksums = sum(len(one.seals) for one in opened)
        facts = [f"{len(chain.members)} states whole, {checksums} checksums hold"] if chain.members else []
        if views:
            logged = sum(one.last - one.logged.first for one in views if one.last is not None)
            facts.append(f"{logged} steps of gradients whole{' and done again' if replay else ''}")
        whole = f"{', '.join(facts)} ({seconds:.1f} s)"
        steps = _listed(bad)
        wrong = f"{len(findings)} findings" + (f"; steps that cannot be restored: {steps}" if bad else "")
        report.say(f"DAMAGED: {printable(str(run))}: {wrong}" if findings else f"ok: {printable(str(run))}: {whole}")
    return not findings


def _of_segments(views: list[SegmentView]) -> list[Finding]:
    """Segments that cannot be read, or have fewer steps than the chain says."""
    findings = []
    for view in views:
        if view.segment is None:
            assert view.error is not None
            findings.append(Finding("unreadable", view.error.what, view.error.where or view.logged.folder))
        elif view.logged.step is not None and view.segment.last < view.logged.step:
            lost = f"steps {view.segment.last + 1} to {view.logged.step} cannot be restored"
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in view.segment.torn.items())
            findings.append(Finding("log", f"{lost}: {reasons or 'a file is shorter'}", str(view.segment.folder)))
    return findings


def _note_torn(views: list[SegmentView]) -> None:
    """Tails of logs that a killed run left: no damage, but what follows does not count."""
    for view in views:
        if view.segment is not None and view.logged.step is None:
            for path, reason in view.segment.torn.items():
                notes.note(f"{path.name}: what follows step {view.segment.last} does not count: {reason}")


def _replayed(run: Path, chain: ChainIndex, effort: Resources) -> list[Finding]:
    try:
        courses = list(replaying.courses(run, chain))
    except CkptError as error:
        return [Finding("replay", error.what, error.where or str(run))]
    with progress("replaying", sum(course.nbytes for course in courses)) as moved:
        return [finding for course in courses for finding in replaying.check(course, effort, moved)]


def _note_approximate(chain: ChainIndex) -> None:
    lossy = tuple(str(member.step) for member in chain.members if not member.exact)
    if lossy:
        notes.note(Notice(f"{len(lossy)} of {len(chain.members)} states are approximate, of steps", lossy))


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps[:_MOST_STEPS])) + ("…" if len(steps) > _MOST_STEPS else "")


def open_all(run: Path, chain: ChainIndex) -> tuple[list[Checkpoint], list[Finding]]:
    """Every state that can be opened, the last first, and why the others cannot.

    Of each, only what those after it do not stand on: what is replayed for a later state has been checked on the way.
    """
    opened, findings = [], []
    sealed, replayed = set[Seal](), set[_Place]()
    for member in reversed(chain.members):
        try:
            checkpoint = open_member(run, chain, member)
        except CkptError as error:
            findings.append(Finding("unreadable", f"step {member.step}: {error.what}", error.where or member.folder))
            continue
        opened.append(_remainder(checkpoint, sealed, replayed))
        sealed |= set(checkpoint.seals)
        replayed |= {
            place for *_, tensor in checkpoint.tensors() for f in tensor.fragments for place in _places(f.blob)
        }
    return opened, findings


def examine(opened: list[Checkpoint], effort: Resources, moved: CountBytes) -> list[Finding]:
    """Everything that is wrong with them, each thing once."""
    found = dict.fromkeys(finding for one in opened for finding in checks.find_problems(one, effort, moved))
    broken = {finding.where for finding in found if finding.kind == "checksum"}
    # What cannot be decoded since its bytes, or those of an ancestor, are damaged is no finding of its own.
    return [f for f in found if f.kind != "values" or not broken & set(f.where.split(", "))]


def _remainder(checkpoint: Checkpoint, sealed: set[Seal], replayed: set[_Place]) -> Checkpoint:
    digests = {
        (name, state): digest
        for (name, state), digest in checkpoint.digests.items()
        if not replayed.intersection(_own(checkpoint.parameters[name].states[state].fragments[0].blob))
    }
    return replace(checkpoint, digests=digests, seals=tuple(seal for seal in checkpoint.seals if seal not in sealed))


def _own(blob: Blob) -> Iterator[_Place]:
    """Where a blob's chunks are."""
    if (delta := stored_delta(blob)) is not None:
        yield delta.path, delta.offset
    if isinstance(blob, EncodedBlob):
        yield blob.store.path, blob.store.offset


def _places(blob: Blob) -> Iterator[_Place]:
    """Where all chunks are that are decoded, and checked, on the way to a blob that is replayed."""
    if (delta := stored_delta(blob)) is not None:
        for replay in delta.lineage():
            yield replay.path, replay.offset
            for before in replay.before.values():
                yield from _own(before)


def _bad_steps(run: Path, chain: ChainIndex, findings: list[Finding]) -> list[int]:
    """The steps that stand on what is damaged."""
    where = [Path(one) for finding in findings for one in finding.where.split(", ")]
    bad = {m.folder for m in chain.members if any(p == run / m.folder or run / m.folder in p.parents for p in where)}
    return [m.step for m in chain.members if any(one.folder in bad for one in chain.upto(m.step))]


def _json(run: Path, chain: ChainIndex, findings: list[Finding], bad: list[int], seconds: float) -> dict[str, Any]:
    rows = [{"kind": f.kind, "what": f.what, "where": f.where, "tensors": list(f.tensors)} for f in findings]
    said = {"path": str(run), "ok": not findings, "findings": rows, "seconds": round(seconds, 3)}
    steps = {
        "steps": [m.step for m in chain.members],
        "approximate_steps": [m.step for m in chain.members if not m.exact],
    }
    return said | steps | {"damaged_steps": bad}
