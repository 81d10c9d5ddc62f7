"""Published chains for the commands of chains: which steps there are, and whether all of them are undamaged."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.findings import checks
from ckpt.findings.not_finite import NotFinite, find_not_finite
from ckpt.findings.report import Finding
from ckpt.job import AnyProgress, count_to, load_kernels
from ckpt.pipeline import Resources
from ckpt_formats.core.checkpoint import Checkpoint, Origin
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.folders import names_in
from ckpt_formats.core.format import identified
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.universal.published.records import (
    FOLDER,
    MAX_RECORD,
    Head,
    StepName,
    StepRecord,
    parse_fold_name,
)
from ckpt_formats.universal.published.state import open_step
from ckpt_formats.universal.published.steps import published_steps, read_file, read_head


@dataclass(frozen=True)
class PublishedReport:
    """The result of the check of a published chain."""

    findings: tuple[Finding, ...]
    bad_steps: tuple[int, ...]
    """The steps that cannot be restored, because they depend on damaged bytes."""
    steps: tuple[int, ...]
    checksums: int
    not_finite: tuple[tuple[int, NotFinite], ...] = ()
    """NaN and infinity in the last step, and in those that no later step goes on from."""

    __repr__ = short_repr


def verify_published(run: Path, resources: Resources, progress: AnyProgress | None = None) -> PublishedReport:
    """Compare all objects of all steps and folds with their hashes, and decode every step.

    Raises `CorruptError` if the head is damaged: then it is not known which steps there are.
    """
    head = read_head(run)
    if head is None:
        return PublishedReport((), (), (), 0)
    names = published_steps(run, head)
    records, findings = _records(run, head, names)
    refs = {ref for record in records.values() for ref in (record.model, *(one.object for one in record.shares))}
    seals = tuple(Seal(run / ref.key, 0, ref.nbytes, "xxh3-128", int(ref.hash, 16), ref.hash) for ref in refs)
    load_kernels()
    sealed = Checkpoint(path=run, origin=Origin("published"), parameters={}, seals=seals)
    findings += checks.find_problems(sealed, resources, count_to(checks.nbytes_to_read(sealed), progress))
    strange = list[tuple[int, NotFinite]]()
    parents = {record.parent.name for record in records.values() if record.parent and record.same_as is None}
    for name in sorted(set(names.values()) - parents):
        decoded, counts = _decoded(run, head, name, resources, with_values=not findings)
        findings += decoded
        strange += [(name.step, count) for count in counts]
    bad = _bad_steps(run, names, records, {Path(one) for finding in findings for one in finding.where.split(", ")})
    return PublishedReport(tuple(dict.fromkeys(findings)), bad, tuple(sorted(names)), len(seals), tuple(strange))


def _decoded(
    run: Path, head: Head, name: StepName, resources: Resources, with_values: bool
) -> tuple[list[Finding], list[NotFinite]]:
    """What is wrong with a step, and its values that are not finite.

    Without folds, each step from the base on is decoded and compared with its digests.
    """
    try:
        opened = identified(lambda: open_step(run, replace(head, folds=()), name))
        counts = list(find_not_finite(opened, resources)) if with_values else []
        return list(checks.changed(opened)), counts
    except CkptError as error:
        return [Finding("unreadable", error.what, error.where or str(run))], []


def _records(run: Path, head: Head, names: Mapping[int, StepName]) -> tuple[dict[str, StepRecord], list[Finding]]:
    """The records of all steps and folds that can be read, by key, and a finding for each other one."""
    folds = (parse_fold_name(name.removesuffix(".json")) for name in names_in(run / FOLDER / "folds"))
    keys = [name.key for name in names.values()]
    keys += [name.fold_key(first) for name, first in filter(None, folds) if name <= head.record.name]
    read = {key: _record(run / key) for key in keys}
    records = {key: one for key, one in read.items() if isinstance(one, StepRecord)}
    return records, [one for one in read.values() if isinstance(one, Finding)]


def _record(path: Path) -> StepRecord | Finding | None:
    try:
        data = read_file(path, MAX_RECORD)
        return None if data is None else StepRecord.from_bytes(data, path)
    except CkptError as error:
        return Finding("unreadable", error.what, str(path))


def _bad_steps(
    run: Path, names: Mapping[int, StepName], records: Mapping[str, StepRecord], damaged: set[Path]
) -> tuple[int, ...]:
    """The steps of which a record or an object from the base on is damaged, if no fold leads past it."""
    good = set[StepName]()
    ways: dict[StepName, list[StepRecord]] = {}
    for record in records.values():
        refs = (record.model, *(one.object for one in record.shares))
        if not damaged & {run / record.key, *(run / ref.key for ref in refs)}:
            ways.setdefault(record.name, []).append(record)
    for name in sorted(names.values()):
        if any(way.parent is None or way.parent.name in good for way in ways.get(name, ())):
            good.add(name)
    return tuple(name.step for name in sorted(names.values()) if name not in good)
