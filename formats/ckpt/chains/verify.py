"""Verify every member of a chain; each stored byte is read once, and each chunk is decoded once."""

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
    """The result of the check of a chain."""

    chain: ChainIndex
    findings: tuple[Finding, ...]
    bad_steps: tuple[int, ...]
    """The steps that cannot be restored, because they depend on damaged bytes."""
    checksums: int
    segments: tuple[SegmentView, ...]
    notes: tuple[Notice, ...]


def verify_chain(
    run: Path, resources: Resources, progress: Progress | None = None, replay: bool = False
) -> ChainReport:
    """Check all of a chain. With `replay`, also repeat its logged steps, and compare."""
    chain = index.read(run)
    opened, findings = open_all(run, chain)
    load_kernels()
    count_bytes = count_to(sum(map(checks.nbytes_to_read, opened)), progress)
    findings += examine(opened, resources, count_bytes)
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
    """Segments that cannot be read, or have fewer steps than the chain states."""
    findings = []
    for view in views:
        if view.segment is None:
            assert view.error is not None
            findings.append(Finding("unreadable", view.error.what, view.error.where or view.logged.folder))
        elif view.logged.step is not None and view.segment.last < view.logged.step:
            lost_steps = f"steps {view.segment.last + 1} to {view.logged.step} cannot be restored"
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in view.segment.torn.items())
            findings.append(Finding("log", f"{lost_steps}: {reasons or 'a file is shorter'}", str(view.segment.folder)))
    return findings


def _torn(views: list[SegmentView]) -> Iterator[Notice]:
    """A note for each incomplete end of a log, which a killed run left. This is not damage."""
    for view in views:
        if view.segment is not None and view.logged.step is None:
            for path, reason in view.segment.torn.items():
                yield Notice(f"{path.name}: records after step {view.segment.last} do not count: {reason}")


def _replay_findings(run: Path, chain: ChainIndex, resources: Resources, progress: Progress | None) -> list[Finding]:
    try:
        courses = list(replay_check.courses(run, chain))
    except CkptError as error:
        return [Finding("replay", error.what, error.where or str(run))]
    count_bytes = count_to(sum(course.nbytes for course in courses), progress)
    return [finding for course in courses for finding in replay_check.check(course, resources, count_bytes)]


def _approximate(chain: ChainIndex) -> Iterator[Notice]:
    lossy = tuple(str(member.step) for member in chain.members if not member.exact)
    if lossy:
        yield Notice(f"{len(lossy)} of {len(chain.members)} states are approximate, of steps", lossy)


def open_all(run: Path, chain: ChainIndex) -> tuple[list[Checkpoint], list[Finding]]:
    """Every state that can be opened, the last first, and a finding for each other one.

    Each state has only the seals and digests that no later state has: replaying a later state checks the others.
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


def examine(opened: list[Checkpoint], resources: Resources, count_bytes: CountBytes) -> list[Finding]:
    """All findings of several states, each once."""
    findings = dict.fromkeys(finding for one in opened for finding in checks.find_problems(one, resources, count_bytes))
    broken = {finding.where for finding in findings if finding.kind == "checksum"}
    # If bytes of a state or of an ancestor are damaged, values that cannot be decoded are not reported again.
    return [f for f in findings if f.kind != "values" or not broken & set(f.where.split(", "))]


def _remainder(checkpoint: Checkpoint, sealed: set[Seal], replayed: set[_Place]) -> Checkpoint:
    digests = {
        (name, state): digest
        for (name, state), digest in checkpoint.digests.items()
        if not replayed.intersection(_own(checkpoint.parameters[name].states[state].fragments[0].blob))
    }
    return replace(checkpoint, digests=digests, seals=tuple(seal for seal in checkpoint.seals if seal not in sealed))


def _own(blob: Blob) -> Iterator[_Place]:
    """The file and the offset of a blob's chunks."""
    if (delta := stored_delta(blob)) is not None:
        yield delta.stored.path, delta.stored.offset
    if isinstance(blob, EncodedBlob):
        yield blob.store.stored.path, blob.store.stored.offset


def _places(blob: Blob) -> Iterator[_Place]:
    """The places of all chunks that are decoded and checked to replay a blob."""
    if (delta := stored_delta(blob)) is not None:
        for replay in delta.lineage():
            yield replay.stored.path, replay.stored.offset
            for before in replay.before.values():
                yield from _own(before)


def _bad_steps(run: Path, chain: ChainIndex, findings: list[Finding]) -> list[int]:
    """The steps that depend on damaged files."""
    where = [Path(one) for finding in findings for one in finding.where.split(", ")]
    bad = {m.folder for m in chain.members if any(p == run / m.folder or run / m.folder in p.parents for p in where)}
    return [m.step for m in chain.members if any(one.folder in bad for one in chain.upto(m.step))]
