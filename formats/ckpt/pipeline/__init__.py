"""The pipeline behind everything that writes: plan, write the files, verify checksums, commit, publish."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from ckpt.pipeline import staging
from ckpt.pipeline.evidence_text import at_paths
from ckpt.pipeline.interrupts import deferred_interrupts, raise_if_interrupted
from ckpt.pipeline.resources import Execution, Resources
from ckpt.pipeline.targets import check_target, open_staging
from ckpt.pipeline.write_files import CountBytes
from ckpt.pipeline.writers import FileWork, check_absolute, check_scales_out, connected, write_missing
from ckpt_formats.core.arguments import Checked, Count, Range
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    NoSpaceError,
    OutputError,
    UnsupportedError,
)
from ckpt_formats.core.evidence import Evidence
from ckpt_formats.core.files import Reader, Seal, unreadable
from ckpt_formats.core.fingerprint import fingerprint
from ckpt_formats.core.format import FilePlan, Plan, Receipt, WritableFormat
from ckpt_formats.core.identity import Identities, Identity, check_unchanged
from ckpt_formats.core.locking import FULL
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.publish import FlushError, RenameError
from ckpt_formats.core.seal_checks import ListedSeals, SealChecks
from ckpt_formats.core.state_table import TabulatedParameters
from ckpt_formats.core.store_path import StoreError
from ckpt_formats.core.text import printable
from ckpt_formats.core.value_changes import ChangedTensor, check_allowed, notices, totals
from ckpt_formats.core.version import WRITTEN_BY
from ckpt_formats.core.zero_values import zero_notices
from ckpt_formats.registry.plugins import blamed_on_package, returned
from ckpt_formats.stores.location import listed_again

if TYPE_CHECKING:
    from ckpt.pipeline.cluster.distribute import ClusterStatus

__all__ = [
    "CountBytes",
    "Execution",
    "Resources",
    "Result",
    "check_complete",
    "check_not_suspicious",
    "complete_before",
    "identities_of",
    "job_id",
    "listed_seals",
    "plan",
    "raise_if_damaged",
    "seals_error",
    "space_needed",
    "system_error",
    "write",
]


@dataclass(frozen=True)
class Result(Checked):
    """What a job wrote."""

    target: Path
    files: Count
    nbytes: Count
    resumed: Count
    """Files that an earlier, interrupted run wrote."""
    checksums: Count
    """Checksums of the source that were verified while it was read."""
    seconds: Annotated[float, Range(0)]
    status: Literal["written", "pending", "already complete"] = "written"
    """`pending`: the target is not there yet, since other shards write the rest of it, or another process publishes it.
    `already complete`: other processes had published it, and nothing was written."""
    missing: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """While it is pending: the files that are not written yet, by the number of the shard that writes them."""
    publisher: str = ""
    """While it is pending and no file is missing: the process that publishes the target, as text."""
    changed: tuple[ChangedTensor, ...] = ()
    """The tensors with values that were changed other than by rounding: infinite, NaN or zero in a smaller type. While
    the result is pending, those of this shard."""

    left: tuple[Notice, ...] = ()
    """What could not be removed when the target was complete."""
    zeros: tuple[Notice, ...] = ()
    """Zeros in what was read that look like values that were never written."""

    @property
    def notes(self) -> tuple[Notice, ...]:
        """What the user should know of the values that were written, and of what is left beside them."""
        return (*notices(self.changed), *self.zeros, *self.left)


def complete_before(target: Path) -> Result:
    """The result of a job whose target other processes have published."""
    return Result(listed_again(target), 0, 0, 0, 0, 0.0, "already complete")


def plan(source: Checkpoint, target: Path, format: WritableFormat) -> Plan:
    """The files to write, before any tensor is read. Raises `CkptError` if the job cannot succeed."""
    check_complete(source)
    check_not_suspicious(source)
    inputs = (path for edit in source.history for path in edit.inputs())
    for path in (source.path, *(one.path for one in format.inputs()), *inputs):
        check_target(target, path)
    roles = {parameter.role for parameter in source.parameters.values()}
    if format.needs_model and roles == {"extra"}:
        raise UnsupportedError(
            f"the checkpoint has no weights of a model, and the format {format.name} holds nothing else",
            where=source.path,
            hint="The formats universal and torch hold everything (--to universal).",
        )
    with blamed_on_package(format):
        return returned(format.plan(source), Plan)


def write(
    plan: Plan,
    source: Checkpoint,
    target: Path,
    format: WritableFormat,
    resources: Execution,
    count_bytes: CountBytes,
    show_status: "Callable[[ClusterStatus], None] | None" = None,
) -> Result:
    """Write the planned files. The target appears when it is complete. `show_status`: called if a cluster writes them.

    Files that an interrupted run of the same job wrote are checked and used; those of another job are removed.
    """
    if resources.shard is not None:
        from ckpt.pipeline.shards import write_shard  # few jobs have shards

        return write_shard(plan, source, target, format, resources, resources.shard, count_bytes)
    parts, started = plan.files, time.monotonic()
    identities = identities_of(source, format)
    listed = listed_seals(source, format)
    checks = SealChecks(listed)
    if resources.executor is not None:
        check_scales_out(plan, format)
        check_absolute(identities)
    with (
        connected(resources) as cluster,
        open_staging(target, resources, plan.single_file is not None) as stage,
        deferred_interrupts() as stop,
    ):
        try:
            stage.begin(job_id(source, identities, format), [part.file for part in parts])
            done = dict[str, Receipt]()

            def note(receipt: Receipt) -> None:
                checks.add(receipt.evidence)
                done[receipt.file] = replace(receipt, evidence=Evidence())

            for receipt in stage.receipts(format):
                evidence = at_paths(receipt.evidence, identities)
                if checks.knows(evidence):
                    note(replace(receipt, evidence=evidence))
            resumed = len(done)
            count_bytes(sum(part.nbytes for part in parts if part.file in done))
            work = FileWork(source, format, plan, resources, identities, listed)
            for receipt in write_missing(cluster, stage, work, done, stop, count_bytes, show_status):
                stage.note(receipt)
                note(receipt)
                staging.reached("journalled")
                raise_if_interrupted(stop)
            receipts = [done[part.file] for part in parts]
            raise_if_damaged(checks, identities)
            changed = totals(change for receipt in receipts for change in receipt.changes)
            check_allowed(changed)
            zeros = tuple(zero_notices(source, (run for receipt in receipts for run in receipt.zeros)))
            staging.reached("settled")
            raise_if_interrupted(stop)
            with blamed_on_package(format, OSError):
                format.commit(stage.data, source, receipts)
            staging.reached("committed")
            check_unchanged(identities)
            stage.publish(plan.single_file)
        except CkptError as error:
            if isinstance(error, OutputError):
                raise
            stage.discard()
            check_unchanged(identities)  # the error then states the cause
            raise
        except OSError as error:
            raise system_error(error, stage, identities) from error
    nbytes = sum(receipt.nbytes for receipt in receipts)
    count = 1 if plan.single_file else len(receipts)
    seconds = time.monotonic() - started
    return Result(
        listed_again(target),
        count,
        nbytes,
        resumed,
        len(checks),
        seconds,
        changed=changed,
        left=stage.notes,
        zeros=zeros,
    )


def identities_of(source: Checkpoint, format: WritableFormat) -> Identities:
    """The identities of all files that the result depends on."""
    identities = dict(source.identities)
    for other in format.inputs():
        identities |= other.identities
    for path in format.input_files():
        for file in _files_of(path):
            identities.setdefault(file, Identity.of(file.stat()))
    return identities


def _files_of(path: Path) -> list[Path]:
    """A file, or those in a folder."""
    if not path.exists():
        return []
    return [file for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if file.is_file()]


def check_complete(source: Checkpoint) -> None:
    """Raise `IncompleteError` if tensors have missing or overlapping parts. The error names the first of them."""
    tensors = () if isinstance(source.parameters, TabulatedParameters) else source.tensors()
    problems = [
        f"`{printable(p.name)}` {state}: {problem}" for p, state, tensor in tensors for problem in tensor.problems()
    ]
    problems += [f"`{printable(name)}` is {printable(message)}" for name, message in source.dangling_names()]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise IncompleteError(
            "; ".join(problems[:3]) + more, where=source.path, hint="Are files of some ranks missing?"
        )


def check_not_suspicious(source: Checkpoint) -> None:
    """Raise `CorruptError` if the checkpoint has suspicions, such as optimizer states that belong to other weights."""
    if source.suspicions:
        raise CorruptError(
            source.suspicions[0],
            where=source.path,
            hint="Take another checkpoint of the run, or only its weights: `weights_only()`, or --model-only. "
            "--accept-suspicious writes everything as it is.",
        )


def space_needed(parts: Iterable[FilePlan]) -> int:
    """A lower bound of the bytes of the files: a model's copy takes none if it is its master, rounded."""
    return sum(_min_nbytes(part) if part.size is None else part.size for part in parts)


def _min_nbytes(part: FilePlan) -> int:
    copies = (p.states[MODEL].nbytes for p in part.parameters if {MODEL, MASTER} <= p.states.keys())
    return part.nbytes - sum(copies)


def listed_seals(source: Checkpoint, format: WritableFormat) -> ListedSeals:
    """The checksums of all checkpoints that are read, as far as they are known without reading."""
    return ListedSeals(one.seals for one in (source, *format.inputs()))


def raise_if_damaged(checks: SealChecks, identities: Identities) -> None:
    """Compare what was read with every checksum of the source. Raises `CorruptError`."""
    broken = list(checks.damaged(Reader(check=False, identities=identities)))
    if broken:
        raise seals_error(broken)


def seals_error(broken: list[Seal]) -> CorruptError:
    """The error for byte ranges that do not match their checksums. It names the file and the first range."""
    seal = broken[0]
    more = f" (and {len(broken) - 1} more damaged ranges)" if len(broken) > 1 else ""
    return CorruptError(
        f"{printable(seal.label)}: its {seal.nbytes:,} bytes do not fit their {seal.kind} checksum{more}",
        where=seal.path,
        hint="The file was damaged after it was written: restore it from a copy. `ckpt verify` lists all damage.",
    )


def job_id(source: Checkpoint, identities: Identities, format: WritableFormat) -> str:
    """A digest of the source's history, of the files that are read, and of the format with all its options.

    An interrupted run is continued only by a job with the same id.
    """
    # The number of a device may change when the machine restarts.
    files = {path.absolute(): replace(identity, device=0) for path, identity in identities.items()}
    return fingerprint((WRITTEN_BY, source.path, source.history, files, format.name, format.identity()))


class _Unfinished(Protocol):
    """What is there of a target before it is complete."""

    @property
    def target(self) -> Path: ...

    @property
    def disk(self) -> Path: ...

    @property
    def how_to_give_up(self) -> str: ...


def system_error(error: OSError, stage: _Unfinished, identities: Identities) -> CkptError:
    """The error for an error of the system, about a file of the source or about the target."""
    path = None if error.filename is None else Path(os.fsdecode(error.filename))
    return unreadable(error, path) if path is not None and path in identities else _output_error(error, stage)


def _output_error(error: OSError, stage: _Unfinished) -> OutputError:
    resume = f"Run the same command again to go on; {stage.how_to_give_up}."
    if error.errno in FULL:
        return NoSpaceError("no space left on the disk", where=stage.disk, hint=f"Free some. {resume}")
    if isinstance(error, FlushError):
        return OutputError(
            f"the disk did not take what was written: {error.strerror}",
            where=error.filename,
            hint=f"Check the disk. {resume} What the disk did not take is written again.",
        )
    hint = f"{error.hint} {resume}" if isinstance(error, (StoreError, RenameError)) and error.hint else resume
    return OutputError(f"cannot be written: {error.strerror or error}", where=error.filename or stage.target, hint=hint)
