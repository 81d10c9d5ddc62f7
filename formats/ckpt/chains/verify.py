"""Verify every member of a chain in one pass: each manifest is loaded once, and each chunk is decoded once."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpt.chains import replay_check, tip
from ckpt.chains.published import verify_published
from ckpt.chains.segments import SegmentView, open_segments
from ckpt.chains.verify_deltas import delta_key, replay_once
from ckpt.findings import checks
from ckpt.findings.float_scan import FloatScan
from ckpt.findings.not_finite import NotFinite, find_not_finite
from ckpt.findings.report import Finding, Report
from ckpt.job import AnyProgress, count_to, load_kernels
from ckpt.pipeline import CountBytes, Resources
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.header_problems import contradictions
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.core.tensor import Blob
from ckpt_formats.universal.boxes.whole import as_stored
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member
from ckpt_formats.universal.chain.folder import PACKS, is_growing, pack_number
from ckpt_formats.universal.chain.members import OpenedMembers, open_members
from ckpt_formats.universal.chunked import EncodedBlob
from ckpt_formats.universal.replay import stored_delta
from ckpt_formats.universal.stored import StoredSeals

_Key = tuple[object, ...]
"""Chunks that are stored together: the file, where in it they begin, and what they are called."""


@dataclass(frozen=True)
class FirstNotFinite:
    """A state with NaN or infinity, at the first stored step at which its parameter has them."""

    step: int
    counts: NotFinite
    model: str | None = None
    """The name of the model, in a family."""

    def __str__(self) -> str:
        return f"{self.model or f'step {self.step}'}: {self.counts}"


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
    not_finite: tuple[FirstNotFinite, ...] = ()
    """Of the stored states; none if there are findings."""
    published: tuple[int, ...] = ()
    """The steps of a published chain."""

    __repr__ = short_repr

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are stored."""
        return self.published or tuple(member.step for member in self.chain.members)

    @property
    def report(self) -> Report:
        """What users need of it."""
        return Report(self.findings, self.checksums, self.notes, self.bad_steps)


def verify_chain(
    run: Path, resources: Resources, progress: AnyProgress | None = None, replay: bool = False
) -> ChainReport:
    """Check all of a chain. With `replay`, also repeat its logged steps, and compare."""
    chain = chain_file.read(run)
    if chain.is_published:
        result = verify_published(run, resources, progress)
        strange = tuple(FirstNotFinite(step, counts) for step, counts in result.not_finite)
        notes = tuple(_not_finite_notice(strange))
        return ChainReport(chain, result.findings, result.bad_steps, result.checksums, (), notes, strange, result.steps)
    members = open_members(run, chain)
    opened, findings = remainders(chain, members)
    states, of_tip = tip.opened(run, chain)
    # All members have the same identities.
    identified, opened, findings = [*opened[:1], *states], [*opened, *states], [*findings, *of_tip]
    load_kernels()
    count_bytes = count_to(sum(map(checks.nbytes_to_read, opened)), progress)
    findings += _headers(members)
    scans = [FloatScan(one) for one in opened]
    findings += examine(opened, scans, resources, count_bytes)
    views = open_segments(run, chain, check=True)
    findings += _of_segments(views)
    if replay:
        findings += _replay_findings(run, chain, members, resources, progress)
    findings += [finding for one in identified for finding in checks.changed(one)]
    checksums = sum(len(one.seals) for one in opened)
    by_path = {run / member.folder: member.step for member in chain.members}
    steps = [by_path.get(one.path, chain.members[-1].step) for one in opened]  # those of a tip are of the last member
    strange = () if findings else tuple(_first_not_finite(steps, opened, scans, resources, chain))
    notes = (*_not_finite_notice(strange), *_approximate(chain), *_torn(views), *_early_ends(run, chain, views))
    bad = tuple(_bad_steps(run, chain, findings))
    return ChainReport(chain, tuple(findings), bad, checksums, tuple(views), notes, strange)


def _first_not_finite(
    steps: Sequence[int],
    opened: Sequence[Checkpoint],
    scans: Sequence[FloatScan],
    resources: Resources,
    chain: ChainIndex,
) -> Iterator[FirstNotFinite]:
    """The states with NaN or infinity, each parameter at its first step: counted again, which a scan does not.

    In a family, those of each model.
    """
    known, models = set[str](), {member.step: member.name for member in chain.members}
    for step, one, scan in sorted(zip(steps, opened, scans, strict=True), key=lambda item: item[0]):
        if chain.is_family:
            known.clear()
        if new := scan.names - known:
            for counts in find_not_finite(one, resources, only=new):
                known.add(counts.name)
                yield FirstNotFinite(step, counts, models.get(step))


def _not_finite_notice(states: Sequence[FirstNotFinite]) -> Iterator[Notice]:
    if states:
        names = {one.counts.name for one in states}
        text = f"{len(names):,} tensor{'s have' if len(names) > 1 else ' has'} NaN or infinity, first at"
        yield Notice(text, tuple(map(str, states)), Weight.UNSURE)


def _of_segments(views: list[SegmentView]) -> list[Finding]:
    """Segments that cannot be read, or have fewer steps than the chain states."""
    findings = []
    for view in views:
        if view.segment is None:
            assert view.error is not None
            findings.append(Finding("unreadable", view.error.what, view.error.where or view.logged.folder))
        elif damage := view.segment.damage:
            findings.append(Finding("log", damage.what, str(view.segment.folder)))
        if view.segment is not None and view.segment.difference is not None:
            findings.append(Finding("replay", view.segment.difference, str(view.segment.folder)))
    return findings


def _torn(views: list[SegmentView]) -> Iterator[Notice]:
    """A note for each incomplete end of a log, which a killed run left. This is not damage."""
    for view in views:
        if view.segment is not None and view.logged.step is None and view.segment.damage is None:
            for path, reason in view.segment.torn.items():
                yield Notice(f"{path.name}: records after step {view.segment.last} do not count: {reason}")


def _early_ends(run: Path, chain: ChainIndex, views: list[SegmentView]) -> Iterator[Notice]:
    """A note for each log that no run continues and that ends before others show that the run was further.

    A kill leaves such a log, and so does a file that was cut between two records, which no hash shows.
    """
    for view in views:
        segment = view.segment
        if segment is None or view.logged.step is not None or segment.damage is not None:
            continue
        ends = {segment.path(rank): segment.first + len(steps) for rank, steps in enumerate(segment.updates)}
        stored = [member.step for member in chain.members if member.step > segment.last]
        last = max([*ends.values(), *stored])
        if last > segment.last and not is_growing(segment.folder):
            names = (f"{path.name}: step {end}" for path, end in ends.items() if end < last)
            known = "the chain has a state of it" if last in stored else "other ranks have it"
            yield Notice(
                f"the log ends at step {segment.last}, but the run was at step {last}: {known}",
                tuple(names),
                Weight.UNSURE,
            )


def _headers(members: OpenedMembers) -> Iterator[Finding]:
    """The headers of packs that say otherwise than the index of their member, or of one that has states in them."""
    for state in members.states.values():
        if not isinstance(state, CkptError) and isinstance(state.seals, StoredSeals):
            alone = StoredSeals(state.seals.checkpoints[-1:])
            yield from (Finding(*one) for one in contradictions(replace(state, seals=alone)))


def _replay_findings(
    run: Path, chain: ChainIndex, members: OpenedMembers, resources: Resources, progress: AnyProgress | None
) -> list[Finding]:
    try:
        courses = list(replay_check.courses(run, chain, members))
    except CkptError as error:
        return [Finding("replay", error.what, error.where or str(run))]
    count_bytes = count_to(sum(course.nbytes for course in courses), progress)
    return [finding for course in courses for finding in replay_check.check(course, resources, count_bytes)]


def _approximate(chain: ChainIndex) -> Iterator[Notice]:
    lossy = tuple(member.name or str(member.step) for member in chain.members if not member.exact)
    if lossy:
        of_what = "" if chain.is_family else ", of steps"
        yield Notice(f"{len(lossy)} of {len(chain.members)} states are approximate{of_what}", lossy)


def remainders(chain: ChainIndex, members: OpenedMembers) -> tuple[list[Checkpoint], list[Finding]]:
    """Every state that can be opened, the last first, and a finding for each other one.

    Each state has only the seals and digests that no later state has: replaying a later state checks the others.
    """
    opened, findings = [], []
    sealed, replayed, shared = set[Path](), set[_Key](), _SharedSeals.of(members)
    for member in reversed(chain.members):
        try:
            checkpoint = as_stored(members.open(member))
        except CkptError as error:
            findings.append(Finding("unreadable", f"{member.label}: {error.what}", error.where or member.folder))
            continue
        opened.append(_remainder(checkpoint, sealed, replayed, shared))
        assert isinstance(checkpoint.seals, StoredSeals)
        sealed |= {folder for folder, _ in checkpoint.seals.checkpoints}
        for *_, tensor in checkpoint.tensors():
            for fragment in tensor.fragments:
                _add_replayed(fragment.blob, replayed)
                if isinstance(fragment.blob, EncodedBlob):
                    replayed.update(_own(fragment.blob))  # of another member, too, that shares the pack
    return opened, findings


@dataclass(frozen=True)
class _SharedSeals:
    """The checksums of packs in which several members have states: each is compared once."""

    packs: Container[Path]
    seen: set[Seal] = field(default_factory=set)

    @classmethod
    def of(cls, members: OpenedMembers) -> "_SharedSeals":
        packs = set[Path]()
        for state in members.states.values():
            if not isinstance(state, CkptError) and isinstance(state.seals, StoredSeals):
                folder, stated = state.seals.checkpoints[-1]
                files, own = stated.files(folder), len(stated.own_packs)
                packs.update(files.path(number) for number in range(own, len(files.packs)))
        return cls(packs)

    def unseen(self, seals: Iterable[Seal]) -> tuple[Seal, ...]:
        """Those that were not here before. A checksum that another member states otherwise is compared, too."""
        new = tuple(seal for seal in seals if seal not in self.seen)
        self.seen.update(seal for seal in new if seal.path in self.packs)
        return new


def examine(
    opened: list[Checkpoint], scans: Sequence[FloatScan], resources: Resources, count_bytes: CountBytes
) -> list[Finding]:
    """All findings of several states, each once. Each delta is decoded once. `scans`: those of the states."""
    several = replay_once(opened, resources, count_bytes)
    findings = dict.fromkeys(
        finding
        for one, replayed, scan in zip(opened, several, scans, strict=True)
        for finding in checks.find_problems(_without_deltas(one), resources, count_bytes, replayed, scan=scan)
    )
    for replayed, scan in zip(several, scans, strict=True):
        scan.names |= replayed.strange
    broken = {finding.where for finding in findings if finding.kind == "checksum"}
    # If bytes of a state or of an ancestor are damaged, values that cannot be decoded are not reported again.
    return [f for f in findings if f.kind != "values" or not broken & set(f.where.split(", "))]


def _remainder(checkpoint: Checkpoint, sealed: set[Path], replayed: set[_Key], shared: _SharedSeals) -> Checkpoint:
    assert isinstance(checkpoint.seals, StoredSeals)
    digests = {
        (name, state): digest
        for (name, state), digest in checkpoint.digests.items()
        if not replayed.intersection(_own(checkpoint.parameters[name].states[state].fragments[0].blob))
    }
    return replace(checkpoint, digests=digests, seals=shared.unseen(checkpoint.seals.without(sealed)))


def _without_deltas(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, with the digests of the states that are not in a delta."""
    digests = {
        (name, state): digest
        for (name, state), digest in checkpoint.digests.items()
        if stored_delta(checkpoint.parameters[name].states[state].fragments[0].blob) is None
    }
    return replace(checkpoint, digests=digests)


def _own(blob: Blob) -> Iterator[_Key]:
    """A key of a blob's chunks."""
    if (delta := stored_delta(blob)) is not None:
        yield delta_key(delta)
    if isinstance(blob, EncodedBlob):
        stored = blob.store.stored
        yield stored.path, stored.offset, stored.label, blob.store.digests


def _add_replayed(blob: Blob, replayed: set[_Key]) -> None:
    """Add the keys of all chunks that are decoded and checked to replay a blob."""
    delta = stored_delta(blob)
    while delta is not None and delta_key(delta) not in replayed:  # else all before it are there, too
        replayed.add(delta_key(delta))
        for before in delta.before.values():
            if stored_delta(before) is None:
                replayed.update(_own(before))
        delta = delta.parent


def _bad_steps(run: Path, chain: ChainIndex, findings: list[Finding]) -> list[int]:
    """The steps that depend on damaged files."""
    where = [Path(one) for finding in findings for one in finding.where.split(", ")]
    bad, contents = list[int](), set[str]()
    for m in chain.members:
        own = any(path == run / m.folder or run / m.folder in path.parents or _shares(m, path, run) for path in where)
        if own or m.parent in contents:
            bad.append(m.step)
            contents.add(m.content)
    return bad


def _shares(member: Member, path: Path, run: Path) -> bool:
    """Whether a member has states in a file, which is a pack of an earlier member, or in the folder of one."""
    number = pack_number(path.name)
    return any(
        path == run / one.folder or (path.parent == run / one.folder / PACKS and number is not None and one.has(number))
        for one in member.shared
    )
