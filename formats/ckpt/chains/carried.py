"""States of a chain replayed one after another, each from the one before, so that each delta is decoded once.

The values of a state are in a file while they are needed: until it is written again, and the next state was replayed.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.chains.verify_deltas import DeltaKey, delta_key
from ckpt.pipeline import Execution, seals_error
from ckpt.pipeline.executors import batches, run_tasks
from ckpt.pipeline.interrupts import interruptible
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.evidence import Evidence
from ckpt_formats.core.files import Reader, write_at
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.own_folder import create_own
from ckpt_formats.core.seal_checks import SealChecks
from ckpt_formats.core.tensor import FileBlob
from ckpt_formats.core.transfer import as_bytes
from ckpt_formats.universal.boxes.whole import as_stored, with_stored
from ckpt_formats.universal.entry import ALIGNMENT
from ckpt_formats.universal.replay import DeltaBlob, StateArrays, StoredDelta, chunk_of, stored_delta
from ckpt_formats.universal.write_replayed import with_plain


@dataclass(frozen=True, eq=False)
class CarriedState:
    """The values of a state that was replayed."""

    checkpoint: Checkpoint
    """The state; what was in deltas is read from the file."""
    path: Path
    blobs: Mapping[DeltaKey, Mapping[str, FileBlob]] = field(default_factory=dict)
    """Of each delta, the values of its states."""


def carry(checkpoint: Checkpoint, before: CarriedState | None, path: Path, resources: Execution) -> CarriedState:
    """Replay a state to a file at `path`, from the one `before` where that is on the way. Each value is checked.

    Raises `CorruptError` for damaged deltas, `OutputError` if the file cannot be written.
    """
    blobs, at = dict[DeltaKey, Mapping[str, FileBlob]](), 0
    tasks, parameters = list[tuple[StoredDelta, Mapping[str, FileBlob]]](), dict[str, Parameter]()
    for name, parameter in as_stored(checkpoint).parameters.items():
        own = [tensor.fragments[0].blob for tensor in parameter.states.values()]
        delta = next((one for blob in own if (one := stored_delta(blob)) is not None), None)
        if delta is None:
            parameters[name] = parameter
            continue
        values = dict[str, FileBlob]()
        for state, dtype in delta.form.items():
            values[state] = FileBlob.packed(path, at, delta.shape, dtype)
            at += values[state].span + -values[state].span % ALIGNMENT
        blobs[delta_key(delta)] = values
        tasks.append((delta, values))
        plain = {id(blob): values[blob.state] for blob in own if isinstance(blob, DeltaBlob)}
        parameters[name] = with_plain(parameter, plain)
    known = {} if before is None else before.blobs
    try:
        _write(path, tasks, known, checkpoint, resources)
    except CkptError:
        raise
    except OSError as error:
        raise unwritable(error, path.parent) from error
    return CarriedState(with_stored(checkpoint, parameters), path, blobs)


def _write(
    path: Path,
    tasks: list[tuple[StoredDelta, Mapping[str, FileBlob]]],
    known: Mapping[DeltaKey, Mapping[str, FileBlob]],
    checkpoint: Checkpoint,
    resources: Execution,
) -> None:
    checks = SealChecks()
    with (
        os.fdopen(create_own(path), "wb", buffering=0) as out,
        interruptible(lambda nbytes: None) as count,
        ThreadPoolExecutor(resources.workers, "ckpt") as pool,
    ):

        def write(task: tuple[StoredDelta, Mapping[str, FileBlob]], reader: Reader) -> None:
            delta, values = task
            way, start = _way(delta, known)
            for index in range(delta.chunking.count):
                begin, stop = delta.chunking.range(index)
                states: StateArrays = {s: chunk_of(blob, begin, stop, {}, reader) for s, blob in start.items()}
                for one in way:
                    states = one.decoded(index, states, reader)
                for state, blob in values.items():
                    write_at(out.fileno(), as_bytes(states[state]).data, blob.offset + begin * blob.dtype.itemsize)
                count(sum(array.nbytes for array in states.values()))

        def write_all(tasks: list[tuple[StoredDelta, Mapping[str, FileBlob]]]) -> Evidence:
            with Reader(max_files=resources.files, identities=checkpoint.identities) as reader:
                for task in tasks:
                    write(task, reader)
                return reader.evidence()

        work = batches((sum(blob.span for blob in task[1].values()), task) for task in tasks)
        for one in run_tasks(pool, write_all, work, 2 * resources.workers):
            checks.add(one)
    broken = list(checks.damaged(Reader(check=False, identities=checkpoint.identities)))
    if broken:
        raise seals_error(broken)


def _way(
    delta: StoredDelta, known: Mapping[DeltaKey, Mapping[str, FileBlob]]
) -> tuple[list[StoredDelta], Mapping[str, FileBlob]]:
    """The deltas to decode, the first of them first, and the known values that it stands on; none for a base."""
    way, above = [delta], delta.parent
    while above is not None and delta_key(above) not in known:
        way.append(above)
        above = above.parent
    return way[::-1], {} if above is None else known[delta_key(above)]
