"""Verify a chain: every member of a chain, each stored byte and each decoded chunk once."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt import findings as checks
from ckpt.chains import replay_check
from ckpt.chains.segments import SegmentView, open_segments
from ckpt.findings import Finding
from ckpt.job import Progress, count_to, load_kernels
from ckpt.pipeline import CountBytes, Resources
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Seal
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.tensor import Blob
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.chain.file import ChainIndex
from ckpt_formats.universal.chain.members import open_member
from ckpt_formats.universal.chunked import EncodedBlob
from ckpt_formats.universal.replay import stored_delta

_Place = tuple[Path, int]
"""A file, and where in it chunks begin."""


@dataclass(frozen=True)
class ChainReport:
    """What was checked of a chain, and what is wrong."""

    chain: ChainIndex
    findings: tuple[Finding, ...]
    bad_steps: tuple[int, ...]
    """The steps that depend on what is damaged."""
    checksums: int
    segments: tuple[SegmentView, ...]
    notes: tuple[Notice, ...]


def verify_chain(
    run: Path, resources: Resources, progress: Progress | None = None, replay: bool = False
) -> ChainReport:
    """Check all of a chain. With `replay`, its logged steps are done again, too."""
    chain = index.read(run)
    opened, findings = open_all(run, chain)
    load_kernels()
    moved = count_to(sum(map(checks.nbytes_to_read, opened)), progress)
    findings += examine(opened, resources, moved)
    views = open_segments(run, chain, check=True)
    findings += _of_segments(views)
    if replay:
        findings += _replay_findings(run, chain, resources, progress)
    findings += dict.fromkeys(finding for one in opened for finding in checks.changed(one))
    checksums = sum(len(one.seals) for one in opened)
    notes = (*_approximate(chain), *_torn(views))
    bad = tuple(_bad_steps(run, chain, findings))
    return ChainReport(chain, tuple(findings), bad, checksums, tuple(views), notes)


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


def _torn(views: list[SegmentView]) -> Iterator[Notice]:
    """Tails of logs that a killed run left: no damage, but what follows does not count."""
    for view in views:
        if view.segment is not None and view.logged.step is None:
            for path, reason in view.segment.torn.items():
                yield Notice(f"{path.name}: what follows step {view.segment.last} does not count: {reason}")


def _replay_findings(run: Path, chain: ChainIndex, resources: Resources, progress: Progress | None) -> list[Finding]:
    try:
        courses = list(replay_check.courses(run, chain))
    except CkptError as error:
        return [Finding("replay", error.what, error.where or str(run))]
    moved = count_to(sum(course.nbytes for course in courses), progress)
    return [finding for course in courses for finding in replay_check.check(course, resources, moved)]


def _approximate(chain: ChainIndex) -> Iterator[Notice]:
    lossy = tuple(str(member.step) for member in chain.members if not member.exact)
    if lossy:
        yield Notice(f"{len(lossy)} of {len(chain.members)} states are approximate, of steps", lossy)


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


def examine(opened: list[Checkpoint], resources: Resources, moved: CountBytes) -> list[Finding]:
    """Everything that is wrong with them, each thing once."""
    found = dict.fromkeys(finding for one in opened for finding in checks.find_problems(one, resources, moved))
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
