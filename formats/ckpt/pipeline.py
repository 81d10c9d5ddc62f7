"""The one pipeline behind every command that writes: plan, write the parts, settle, commit, publish."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt import staging as points
from ckpt.executors import run_tasks
from ckpt.fingerprint import fingerprint
from ckpt.interrupts import deferred_interrupts, raise_if_interrupted
from ckpt.staging import Staging, check_target, staging, sweep
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, FilePlan, Goal, Receipt, WritableFormat
from ckpt_formats.core.errors import CkptError, Corrupt, Incomplete, NoSpace, OutputError, Unsupported
from ckpt_formats.core.files import Reader, Seal, files_each, unreadable, verify_seals
from ckpt_formats.core.identity import Identities, Identity, check_unchanged
from ckpt_formats.core.locking import FULL
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import SLAB, Transfer
from ckpt_formats.core.version import WRITTEN_BY

CountBytes = Callable[[int], None]


@dataclass(frozen=True)
class Resources:
    """How much of the machine to use."""

    workers: int = 2
    memory: int = 256 << 20
    """Bytes of tensor data held at once, by all workers together."""
    locks: bool = True
    """Refuse a target on a file system that cannot lock files; else trust that nobody else writes it."""

    @property
    def files(self) -> int:
        """Files that one worker may keep open to read, while it writes one."""
        return max(1, files_each(self.workers) - 1)

    @property
    def slab(self) -> int:
        # A worker holds up to four slabs: values, a copy, a replica, and one in the making.
        return max(1 << 16, min(SLAB, self.memory // (4 * self.workers)))


@dataclass(frozen=True)
class Result:
    """What a copy did."""

    target: Path
    files: int
    nbytes: int
    resumed: int
    checksums: int


def plan(source: Checkpoint, format: WritableFormat, goal: Goal) -> tuple[FilePlan, ...]:
    """Everything that can be known before the first byte is read: the parts. Raises if the copy cannot succeed."""
    check_complete(source)
    check_not_suspicious(source)
    for one in (source, *format.beside()):
        check_target(goal.target, one.path)
    roles = {parameter.role for parameter in source.parameters.values()}
    if format.needs_model and roles == {"extra"}:
        raise Unsupported(
            f"there are no weights of a model to write, and {format.name} holds nothing else",
            where=source.path,
            hint="--to universal and --to torch carry everything that is there.",
        )
    return format.plan(source, goal)


def copy(
    source: Checkpoint,
    format: WritableFormat,
    goal: Goal,
    choices: object,
    effort: Resources,
    moved: CountBytes = lambda n: None,
    parts: tuple[FilePlan, ...] | None = None,
) -> Result:
    """Write `source` again. `choices`, plain data, tells this request from another on the same files.

    `parts` are those of `plan`, from whoever has made it already.
    """
    parts, target = plan(source, format, goal) if parts is None else parts, goal.target
    identities = identities_of(source, format, goal)
    sweep(target.parent)
    with staging(target, effort.locks) as stage, deferred_interrupts() as stop:
        try:
            stage.begin(job_id(source, identities, format, goal, choices))
            done = {receipt.file: receipt for receipt in stage.receipts()}
            todo = sorted((part for part in parts if part.file not in done), key=lambda part: -part.nbytes)
            resumed = len(done)
            moved(sum(part.nbytes for part in parts if part.file in done))
            for receipt in _write_all(stage, format, todo, effort, identities, stop, moved):
                stage.note(receipt)
                done[receipt.file] = receipt
                points.reached("journalled")
                raise_if_interrupted(stop)
            receipts = [done[part.file] for part in parts]
            checksums = _settle(receipts, identities)
            points.reached("settled")
            raise_if_interrupted(stop)
            format.commit(stage.data, source, receipts)
            points.reached("committed")
            check_unchanged(identities)
            stage.publish(format.product(target))
        except OSError as error:
            raise _system_error(error, stage, identities) from error
        except CkptError as error:
            if isinstance(error, OutputError):
                raise
            stage.discard()
            check_unchanged(identities)  # says why rather than what came of it
            raise
    return Result(target, len(receipts), sum(receipt.nbytes for receipt in receipts), resumed, checksums)


def identities_of(source: Checkpoint, format: WritableFormat, goal: Goal) -> Identities:
    """Of all files that the result depends on."""
    found = dict(source.identities)
    for other in format.beside():
        found |= other.identities
    for file in _files_of(goal.config):
        found.setdefault(file, Identity.of(file.stat()))
    return found


def _files_of(path: Path | None) -> list[Path]:
    """A file that the user names, or those in the folder."""
    if path is None or not path.exists():
        return []
    return [file for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if file.is_file()]


def check_complete(source: Checkpoint) -> None:
    """Every tensor is there and covered exactly once. Raises `Incomplete`, naming the first that are not."""
    problems = [
        f"`{printable(p.name)}` {state}: {flaw}" for p, state, tensor in source.tensors() for flaw in tensor.problems()
    ]
    problems += [f"`{printable(name)}` is {printable(said)}" for name, said in source.dangling_names()]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise Incomplete("; ".join(problems[:3]) + more, where=source.path, hint="Are files of some ranks missing?")


def check_not_suspicious(source: Checkpoint) -> None:
    """Nothing says that the values are not what was meant to be saved. Raises `Corrupt`."""
    if source.suspicions:
        raise Corrupt(
            source.suspicions[0],
            where=source.path,
            hint="Take another checkpoint of the run, or only the weights: --model-only. "
            "If you know better, --accept-suspicious writes all as it is.",
        )


def space_needed(parts: Iterable[FilePlan]) -> int:
    """A lower bound of the bytes that parts will take: a model's copy may turn out to be only its master, rounded."""
    return sum(_least(part) if part.size is None else part.size for part in parts)


def _least(part: FilePlan) -> int:
    copies = (p.states[MODEL].nbytes for p in part.parameters if {MODEL, MASTER} <= p.states.keys())
    return part.nbytes - sum(copies)


def _write_all(
    stage: Staging,
    format: WritableFormat,
    parts: Iterable[FilePlan],
    effort: Resources,
    identities: Identities,
    stop: threading.Event,
    moved: CountBytes,
) -> Iterable[Receipt]:
    def count(nbytes: int) -> None:
        raise_if_interrupted(stop)
        moved(nbytes)

    def write(part: FilePlan) -> Receipt:
        with (
            Reader(most_files=effort.files, identities=identities) as reader,
            Transfer(reader, effort.slab, count) as transfer,
        ):
            try:
                receipt = format.write(stage.data, part, transfer)
            except CkptError as error:
                if error.where is None:
                    error.where = f"tensor {', '.join(printable(p.name) for p in part.parameters[:1])}"
                raise
        points.reached("written")
        stage.flush(receipt)  # while the other workers go on, rather than all at the end
        return receipt

    with ThreadPoolExecutor(effort.workers, "ckpt") as pool:
        try:
            yield from run_tasks(pool, write, parts, 2 * effort.workers)
        except BaseException:
            stop.set()
            raise


def _settle(receipts: Iterable[Receipt], identities: Identities) -> int:
    """Hold what was read against every checksum that the source promised. Raises `Corrupt`."""
    evidence = [piece for receipt in receipts for piece in receipt.evidence]
    broken = list(verify_seals(evidence, Reader(check=False, identities=identities)))
    if broken:
        raise seals_error(broken)
    return len({piece.seal for piece in evidence})


def seals_error(broken: list[Seal]) -> Corrupt:
    """Damaged bytes, by file and by what the range is called."""
    seal = broken[0]
    others = f" (and {len(broken) - 1} more damaged ranges)" if len(broken) > 1 else ""
    return Corrupt(
        f"{printable(seal.label)}: its {seal.nbytes:,} bytes do not fit their {seal.kind} checksum{others}",
        where=seal.path,
        hint="The file was damaged after it was written: restore it from a copy. `ckpt verify` lists all damage.",
    )


def job_id(source: Checkpoint, identities: Identities, format: WritableFormat, goal: Goal, choices: object) -> str:
    """Names this very work, so that an interrupted run goes on only with what it would do again.

    Devices may get other numbers when a machine starts again.
    """
    files = {path.absolute(): replace(identity, device=0) for path, identity in identities.items()}
    return fingerprint((WRITTEN_BY, source.path, files, format.name, format.settings(), goal, choices))


def _system_error(error: OSError, stage: Staging, identities: Identities) -> CkptError:
    """What the system says, of a file of the source or of the target, whichever it speaks of."""
    path = None if error.filename is None else Path(os.fsdecode(error.filename))
    return unreadable(error, path) if path is not None and path in identities else _output_error(error, stage)


def _output_error(error: OSError, stage: Staging) -> OutputError:
    resume = f"Run the same command again to go on, or remove {stage.folder} to give up."
    if error.errno in FULL:
        return NoSpace("no space left on the disk", where=stage.target, hint=f"Free some. {resume}")
    return OutputError(
        f"cannot be written: {error.strerror or error}", where=error.filename or stage.target, hint=resume
    )
