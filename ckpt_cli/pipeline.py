"""The one pipeline behind every command that writes: plan, write the parts, settle, commit, publish."""

import hashlib
import resource
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.executors import results
from ckpt_cli.interrupts import deferred, heed
from ckpt_cli.staging import FULL, Staging, check_target, staging
from ckpt_formats.base import MASTER, MODEL, Checkpoint, Goal, Part, Receipt, WritableFormat
from ckpt_formats.errors import CkptError, Corrupt, Incomplete, NoSpace, OutputError
from ckpt_formats.files import Reader, Seal, settle
from ckpt_formats.naming import show
from ckpt_formats.transfer import SLAB, Transfer
from ckpt_formats.version import WRITTEN_BY

Moved = Callable[[int], None]


@dataclass(frozen=True)
class Effort:
    """How much of the machine to use."""

    workers: int = 2
    memory: int = 256 << 20
    """Bytes of tensor data held at once, by all workers together."""

    @property
    def files(self) -> int:
        """Files that one worker may keep open to read, so that all together stay within the process's limit."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(1, min(64, (limit - 24) // self.workers - 1)) if limit != resource.RLIM_INFINITY else 64

    @property
    def slab(self) -> int:
        # A worker holds up to four slabs: values, a copy, a replica, and one in the making.
        return max(1 << 16, min(SLAB, self.memory // (4 * self.workers)))


@dataclass(frozen=True)
class Outcome:
    """What a copy did."""

    target: Path
    files: int
    nbytes: int
    resumed: int
    checksums: int


def plan(source: Checkpoint, format: WritableFormat, goal: Goal) -> tuple[Part, ...]:
    """Everything that can be known before the first byte is read: the parts. Raises if the copy cannot succeed."""
    check_whole(source)
    check_sound(source)
    check_target(goal.target, source.path)
    return format.plan(source, goal)


def copy(
    source: Checkpoint,
    format: WritableFormat,
    goal: Goal,
    choices: str,
    effort: Effort,
    moved: Moved = lambda n: None,
    parts: tuple[Part, ...] | None = None,
) -> Outcome:
    """Write `source` again. `choices` tells this request from another on the same source.

    `parts` are those of `plan`, from whoever has made it already.
    """
    parts, target = plan(source, format, goal) if parts is None else parts, goal.target
    with staging(target) as stage, deferred() as stop:
        try:
            stage.begin(_plan_id(source, format, goal, choices))
            done = {receipt.file: receipt for receipt in stage.receipts()}
            todo = sorted((part for part in parts if part.file not in done), key=lambda part: -part.nbytes)
            resumed = len(done)
            moved(sum(part.nbytes for part in parts if part.file in done))
            for receipt in _write_all(stage, format, todo, effort, stop, moved):
                stage.note(receipt)
                done[receipt.file] = receipt
                heed(stop)
            receipts = [done[part.file] for part in parts]
            checksums = _settle(receipts)
            heed(stop)
            format.commit(stage.data, source, receipts)
            stage.publish(format.product(target))
        except OSError as error:
            raise _output_error(error, stage) from error
        except CkptError as error:
            if not isinstance(error, OutputError):
                stage.discard()
            raise
    return Outcome(target, len(receipts), sum(receipt.nbytes for receipt in receipts), resumed, checksums)


def check_whole(source: Checkpoint) -> None:
    """Every tensor is there and covered exactly once. Raises `Incomplete`, naming the first that are not."""
    flaws = [f"`{show(p.name)}` {state}: {flaw}" for p, state, tensor in source.tensors() for flaw in tensor.flaws()]
    flaws += [f"`{show(name)}` is {show(said)}" for name, said in source.strays()]
    if flaws:
        more = f" (and {len(flaws) - 3} more)" if len(flaws) > 3 else ""
        raise Incomplete("; ".join(flaws[:3]) + more, where=source.path, hint="Are files of some ranks missing?")


def check_sound(source: Checkpoint) -> None:
    """Nothing says that the values are not what was meant to be saved. Raises `Corrupt`."""
    if source.doubts:
        raise Corrupt(
            source.doubts[0],
            where=source.path,
            hint="Take another checkpoint of the run, or only the weights: --model-only. "
            "If you know better, --accept-doubts writes all as it is.",
        )


def space_needed(parts: Iterable[Part]) -> int:
    """A lower bound of the bytes that parts will take: a model's copy may turn out to be only its master, rounded."""
    return sum(_least(part) if part.size is None else part.size for part in parts)


def _least(part: Part) -> int:
    copies = (p.states[MODEL].nbytes for p in part.parameters if {MODEL, MASTER} <= p.states.keys())
    return part.nbytes - sum(copies)


def _write_all(
    stage: Staging, format: WritableFormat, parts: Iterable[Part], effort: Effort, stop: threading.Event, moved: Moved
) -> Iterable[Receipt]:
    def count(nbytes: int) -> None:
        heed(stop)
        moved(nbytes)

    def write(part: Part) -> Receipt:
        with Reader(most_files=effort.files) as reader, Transfer(reader, effort.slab, count) as transfer:
            try:
                receipt = format.write(stage.data, part, transfer)
            except CkptError as error:
                if error.where is None:
                    error.where = f"tensor {', '.join(show(p.name) for p in part.parameters[:1])}"
                raise
        stage.flush(receipt)  # while the other workers go on, rather than all at the end
        return receipt

    with ThreadPoolExecutor(effort.workers, "ckpt") as pool:
        try:
            yield from results(pool, write, parts, 2 * effort.workers)
        except BaseException:
            stop.set()
            raise


def _settle(receipts: Iterable[Receipt]) -> int:
    """Hold what was read against every checksum that the source promised. Raises `Corrupt`."""
    evidence = [piece for receipt in receipts for piece in receipt.evidence]
    broken = list(settle(evidence))
    if broken:
        raise broken_seals(broken)
    return len({piece.seal for piece in evidence})


def broken_seals(broken: list[Seal]) -> Corrupt:
    """Damaged bytes, by file and by what the range is called."""
    seal = broken[0]
    others = f" (and {len(broken) - 1} more damaged ranges)" if len(broken) > 1 else ""
    return Corrupt(
        f"{show(seal.label)}: its {seal.nbytes:,} bytes do not fit their {seal.kind} checksum{others}",
        where=seal.path,
        hint="The file was damaged after it was written: restore it from a copy. `ckpt verify` lists all damage.",
    )


def _plan_id(source: Checkpoint, format: WritableFormat, goal: Goal, choices: str) -> str:
    """Names this very work, so that an interrupted run goes on only with what it would do again."""
    said = [
        WRITTEN_BY,
        format.name,
        choices,
        f"{goal.degrees} {goal.vocab_rows} {goal.shard_nbytes}",
        str(source.path.resolve()),
    ]
    for shard in source.shards:
        stat = shard.path.stat()
        said.append(f"{shard.path} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.blake2b("\n".join(said).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _output_error(error: OSError, stage: Staging) -> OutputError:
    resume = f"Run the same command again to go on, or remove {stage.folder} to give up."
    if error.errno in FULL:
        return NoSpace("no space left on the disk", where=stage.target, hint=f"Free some. {resume}")
    return OutputError(
        f"cannot be written: {error.strerror or error}", where=error.filename or stage.target, hint=resume
    )
