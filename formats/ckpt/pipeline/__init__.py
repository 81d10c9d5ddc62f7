"""The pipeline behind everything that writes: plan, write the files, verify checksums, commit, publish."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.pipeline import staging
from ckpt.pipeline.evidence_text import at_paths
from ckpt.pipeline.executors import run_tasks
from ckpt.pipeline.groups import Group, in_step, ranks
from ckpt.pipeline.interrupts import deferred_interrupts, raise_if_interrupted
from ckpt.pipeline.staging import Staging, check_target, open_staging, sweep
from ckpt_formats.core.bands import BAND, Band
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint
from ckpt_formats.core.errors import CkptError, Corrupt, Incomplete, NoSpace, OutputError, Unsupported
from ckpt_formats.core.evidence import Evidence
from ckpt_formats.core.files import Reader, Seal, files_each, max_workers, unreadable
from ckpt_formats.core.fingerprint import fingerprint
from ckpt_formats.core.format import FilePlan, Plan, Receipt, WritableFormat
from ckpt_formats.core.identity import Identities, Identity, check_unchanged
from ckpt_formats.core.locking import FULL
from ckpt_formats.core.seal_checks import ListedSeals, SealChecks
from ckpt_formats.core.state_table import TabulatedParameters
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import SLAB, Transfer
from ckpt_formats.core.version import WRITTEN_BY

_MAX_GROUP = 64
"""Files written in step: each has a thread and a slab of its own, which must not become too short."""

_FLUSHERS = 4
"""Threads that flush files to the disk."""

CountBytes = Callable[[int], None]
"""Called from any thread, with the number of bytes that were copied since the last call."""


@dataclass(frozen=True)
class Resources:
    """How much of the machine to use."""

    workers: int = 2
    memory: int = 256 << 20
    """Bytes of tensor data that all workers together hold in memory."""
    locks: bool = True
    """True: refuse a target on a file system that cannot lock files. False: assume that no other process writes it."""

    @classmethod
    def of_machine(cls, workers: int | None = None, memory: int = 256 << 20, locks: bool = True) -> "Resources":
        """Resources limited to the cores and open files of this process; `workers` None: one for each core, up to 8."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(min(workers or min(8, cores), max_workers()), memory, locks)

    @property
    def files(self) -> int:
        """Files that one worker may keep open to read, while it writes one."""
        return max(1, files_each(self.workers) - 1)

    @property
    def slab(self) -> int:
        # A worker holds up to four slabs: values, a copy, a replica, and a band or what is computed.
        return max(1 << 16, min(SLAB, self.memory // (4 * self.workers)))

    def shared(self, files: int, ranks: int) -> "Resources":
        """The resources of one worker, shared by so many files of so many ranks that are written in step.

        If the memory suffices, one file of each rank together hold as much as four files that are written alone.
        """
        most = 16 * self.workers * self.slab * files // ranks
        return replace(self, workers=self.workers * files, memory=min(self.memory, most))

    @property
    def band(self) -> int:
        """Bytes of rows that files in step share."""
        return min(BAND, 4 * self.slab)

    @property
    def group(self) -> int:
        """Files that may be written in step."""
        return max(1, min(_MAX_GROUP, max_workers() // self.workers))


@dataclass(frozen=True)
class Result:
    """What a job wrote."""

    target: Path
    files: int
    nbytes: int
    resumed: int
    """Files that an earlier, interrupted run wrote."""
    checksums: int
    """Checksums of the source that were verified while it was read."""
    seconds: float


def plan(source: Checkpoint, target: Path, format: WritableFormat) -> Plan:
    """The files to write, before any tensor is read. Raises `CkptError` if the job cannot succeed."""
    check_complete(source)
    check_not_suspicious(source)
    inputs = (path for edit in source.history for path in edit.inputs())
    for path in (source.path, *(one.path for one in format.inputs()), *inputs):
        check_target(target, path)
    roles = {parameter.role for parameter in source.parameters.values()}
    if format.needs_model and roles == {"extra"}:
        raise Unsupported(
            f"the checkpoint has no weights of a model, and the format {format.name} holds nothing else",
            where=source.path,
            hint="The formats universal and torch hold everything (--to universal).",
        )
    return format.plan(source)


def write(
    plan: Plan,
    source: Checkpoint,
    target: Path,
    format: WritableFormat,
    resources: Resources,
    count_bytes: CountBytes,
) -> Result:
    """Write the planned files. The target appears when it is complete.

    Files that an interrupted run of the same job wrote are checked and used; those of another job are removed.
    """
    parts, started = plan.files, time.monotonic()
    identities = identities_of(source, format)
    listed = ListedSeals(one.seals for one in (source, *format.inputs()))
    checks = SealChecks(listed)
    sweep(target.parent)
    with open_staging(target, resources.locks) as stage, deferred_interrupts() as stop:
        try:
            stage.begin(job_id(source, identities, format))
            done = dict[str, Receipt]()

            def note(receipt: Receipt) -> None:
                checks.add(receipt.evidence)
                done[receipt.file] = replace(receipt, evidence=Evidence())

            for receipt in stage.receipts(format):
                evidence = at_paths(receipt.evidence, identities)
                if checks.knows(evidence):
                    note(replace(receipt, evidence=evidence))
            groups = in_step(parts, resources.group)
            todo = [tuple(part for part in group if part.file not in done) for group in groups]
            resumed = len(done)
            count_bytes(sum(part.nbytes for part in parts if part.file in done))
            for receipt in _write_all(
                stage, format, filter(None, todo), resources, identities, listed, stop, count_bytes
            ):
                stage.note(receipt)
                note(receipt)
                staging.reached("journalled")
                raise_if_interrupted(stop)
            receipts = [done[part.file] for part in parts]
            _raise_if_damaged(checks, identities)
            staging.reached("settled")
            raise_if_interrupted(stop)
            format.commit(stage.data, source, receipts)
            staging.reached("committed")
            check_unchanged(identities)
            stage.publish(plan.single_file)
        except OSError as error:
            raise _system_error(error, stage, identities) from error
        except CkptError as error:
            if isinstance(error, OutputError):
                raise
            stage.discard()
            check_unchanged(identities)  # the error then states the cause
            raise
    nbytes = sum(receipt.nbytes for receipt in receipts)
    count = 1 if plan.single_file else len(receipts)
    return Result(target, count, nbytes, resumed, len(checks), time.monotonic() - started)


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
    """Raise `Incomplete` if tensors have missing or overlapping parts. The error names the first of them."""
    tensors = () if isinstance(source.parameters, TabulatedParameters) else source.tensors()
    problems = [
        f"`{printable(p.name)}` {state}: {problem}" for p, state, tensor in tensors for problem in tensor.problems()
    ]
    problems += [f"`{printable(name)}` is {printable(message)}" for name, message in source.dangling_names()]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise Incomplete("; ".join(problems[:3]) + more, where=source.path, hint="Are files of some ranks missing?")


def check_not_suspicious(source: Checkpoint) -> None:
    """Raise `Corrupt` if the checkpoint has suspicions, such as optimizer states that belong to other weights."""
    if source.suspicions:
        raise Corrupt(
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


def _write_all(
    stage: Staging,
    format: WritableFormat,
    groups: Iterable[Group],
    resources: Resources,
    identities: Identities,
    listed: Container[int],
    stop: threading.Event,
    count_bytes: CountBytes,
) -> Iterable[Receipt]:
    """Write the files, with as many threads at work as there are workers; others wait for the disk or for a band.

    The receipts of a group come together, when all its files are on the disk.
    """
    working = threading.Semaphore(resources.workers)

    def count(nbytes: int) -> None:
        raise_if_interrupted(stop)
        count_bytes(nbytes)

    def write(part: FilePlan, share: Resources, band: Band | None = None) -> Receipt:
        with working:
            try:
                receipt = write_values(part, share, band)
            finally:
                if band is not None:
                    band.leave()
            staging.reached("written")
        return receipt

    def write_values(part: FilePlan, share: Resources, band: Band | None) -> Receipt:
        with (
            Reader(max_files=share.files, identities=identities, band=band) as reader,
            Transfer(reader, share.slab, count) as transfer,
        ):
            try:
                receipt = format.write(stage.data, part, transfer)
            except CkptError as error:
                if error.where is None:
                    error.where = f"tensor {', '.join(printable(name) for name in part.names()[:1])}"
                raise
        return replace(receipt, evidence=receipt.evidence.without_seals(listed))

    def write_group(group: Group) -> tuple[list[Receipt], BaseException | None]:
        """The receipts of the files that were written, and the first error of the others."""
        if len(group) == 1:
            return [write(group[0], resources)], None
        share = resources.shared(len(group), ranks(group))
        with (
            Reader(max_files=share.files, identities=identities) as reader,
            ThreadPoolExecutor(len(group), "ckpt") as members,
        ):
            band = Band(reader, len(group), resources.band, lambda: _released(working))
            written = [members.submit(write, part, share, band) for part in group]
        errors = [one.exception() for one in written]
        receipts = [one.result() for one, error in zip(written, errors, strict=True) if error is None]
        return receipts, next(filter(None, errors), None)

    def written(pool: ThreadPoolExecutor) -> Iterator[Receipt]:
        for receipts, error in run_tasks(pool, write_group, groups, 2 * resources.workers):
            yield from receipts
            if error is not None:
                raise error

    with ThreadPoolExecutor(resources.workers, "ckpt") as pool:
        try:
            yield from _flushed(stage, written(pool))
        except BaseException:
            stop.set()
            raise


@contextmanager
def _released(working: threading.Semaphore) -> Iterator[None]:
    """Within the context, another thread may work."""
    working.release()
    try:
        yield
    finally:
        working.acquire()


def _flushed(stage: Staging, receipts: Iterable[Receipt]) -> Iterator[Receipt]:
    """The receipts of files that are on the disk. Files are flushed while the workers write the next ones.

    After an error, first the receipts of all files that are complete.
    """

    def flush(receipt: Receipt) -> Receipt:
        stage.flush(receipt)
        return receipt

    with ThreadPoolExecutor(_FLUSHERS, "ckpt-flush") as pool:
        waiting, failure = deque[Future[Receipt]](), None
        try:
            for receipt in receipts:
                waiting.append(pool.submit(flush, receipt))
                while waiting and (waiting[0].done() or len(waiting) > 2 * _FLUSHERS):
                    yield waiting.popleft().result()
        except GeneratorExit:
            raise
        except BaseException as error:
            failure = error
        while waiting:
            yield waiting.popleft().result()
        if failure is not None:
            raise failure


def _raise_if_damaged(checks: SealChecks, identities: Identities) -> None:
    """Compare what was read with every checksum of the source. Raises `Corrupt`."""
    broken = list(checks.damaged(Reader(check=False, identities=identities)))
    if broken:
        raise seals_error(broken)


def seals_error(broken: list[Seal]) -> Corrupt:
    """The error for byte ranges that do not match their checksums. It names the file and the first range."""
    seal = broken[0]
    more = f" (and {len(broken) - 1} more damaged ranges)" if len(broken) > 1 else ""
    return Corrupt(
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


def _system_error(error: OSError, stage: Staging, identities: Identities) -> CkptError:
    """The error for an error of the system, about a file of the source or about the target."""
    path = None if error.filename is None else Path(os.fsdecode(error.filename))
    return unreadable(error, path) if path is not None and path in identities else _output_error(error, stage)


def _output_error(error: OSError, stage: Staging) -> OutputError:
    resume = f"Run the same command again to go on, or remove {stage.folder} to give up."
    if error.errno in FULL:
        return NoSpace("no space left on the disk", where=stage.target, hint=f"Free some. {resume}")
    return OutputError(
        f"cannot be written: {error.strerror or error}", where=error.filename or stage.target, hint=resume
    )
