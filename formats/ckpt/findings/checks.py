"""What `verify` checks: coverage, checksums, replicas, and masters against the model's copies."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np

from ckpt.findings.float_scan import FloatScan
from ckpt.findings.not_finite import find_not_finite, not_finite_notice
from ckpt.findings.part import part_to_check
from ckpt.findings.report import Finding, Report
from ckpt.job import AnyProgress, count_to, load_kernels
from ckpt.pipeline import CountBytes, Resources
from ckpt.pipeline.executors import batches, run_tasks
from ckpt.pipeline.interrupts import interruptible
from ckpt.pipeline.planned_reads import prefetched, ranges_together, reads_from_stores
from ckpt_codecs import Rounded
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.coming_reads import ObjectRange, sealed_range
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Observer, Reader
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.header_problems import contradictions, header_problems, missing_blocks
from ckpt_formats.core.identity import changes
from ckpt_formats.core.prefetch import PlannedReads
from ckpt_formats.core.seal_checks import damaged_chunks, seal_is_valid
from ckpt_formats.core.seals import Seal, SealPart, SealTable
from ckpt_formats.core.state_table import TabulatedParameters
from ckpt_formats.core.tensor import Array, Tensor
from ckpt_formats.core.transfer import Transfer, as_bytes
from ckpt_formats.core.zero_runs import ZeroRun, holes
from ckpt_formats.core.zero_values import zero_notices
from ckpt_formats.universal.boxes.whole import StoredBoxes, as_stored
from ckpt_formats.universal.encode_state import flat
from ckpt_formats.universal.replay import DeltaBlob

_MAX_CHUNKS = 8
"""How many damaged chunks of one state are named."""


_Check = Callable[[Transfer], list[Finding]]
"""What is checked of one thing. It reads by a transfer that others use after it."""
_Item = tuple[_Check, Iterator[ObjectRange]]
"""A check, and what it reads of objects in stores."""


@dataclass(frozen=True)
class Replayed:
    """What was found of a checkpoint while deltas were replayed for several checkpoints at once."""

    findings: tuple[Finding, ...] = ()
    compared: frozenset[str] = frozenset()
    """The parameters whose copies were compared with their masters."""
    strange: frozenset[str] = frozenset()
    """The parameters with NaN or infinity in what was replayed."""


def nbytes_to_read(checkpoint: Checkpoint) -> int:
    """Bytes that `find_problems` will read."""
    checkpoint = as_stored(checkpoint)
    decoded = sum(checkpoint.parameters[name].states[state].nbytes for name, state in checkpoint.digests)
    return nbytes_sealed(checkpoint) + decoded + sum(_compared(p) for p in _with_copies(checkpoint))


def nbytes_sealed(checkpoint: Checkpoint) -> int:
    """The bytes that the files have checksums of."""
    seals = checkpoint.seals
    return seals.nbytes if isinstance(seals, SealTable) else sum(seal.nbytes for seal in seals)


def find_problems(
    checkpoint: Checkpoint,
    resources: Resources,
    count_bytes: CountBytes = lambda nbytes: None,
    replayed: Replayed = Replayed(),
    note_zeros: Callable[[Iterable[ZeroRun]], None] = lambda runs: None,
    scan: FloatScan | None = None,
) -> list[Finding]:
    """All findings, sorted by kind and file. Empty if the checkpoint is complete and undamaged.

    What was `replayed` is part of them, and is not checked again. `note_zeros` is called, from any thread, with the
    zeros in what was read. `scan` is shown all values that have checksums.
    """
    with interruptible(count_bytes) as count:
        return _examine(as_stored(checkpoint), resources, count, replayed, note_zeros, scan)


def problems_of_headers(checkpoint: Checkpoint) -> list[Finding]:
    """What headers say is wrong, without reading a tensor: missing blocks, contradictions, files that end too early."""
    return [Finding(*problem) for problem in header_problems(checkpoint)]


def holes_of(checkpoint: Checkpoint) -> list[ZeroRun]:
    """The long ranges of local files that were never written. Nothing is read."""
    return [hole for file in checkpoint.files for hole in holes(file.path)]


def changed(checkpoint: Checkpoint) -> list[Finding]:
    """A finding for each file that changed since the checkpoint was opened."""
    return [Finding("changed", error.what, str(error.where)) for error in changes(checkpoint.identities)]


def _examine(
    checkpoint: Checkpoint,
    resources: Resources,
    count_bytes: CountBytes,
    replayed: Replayed,
    note_zeros: Callable[[Iterable[ZeroRun]], None],
    scan: FloatScan | None,
) -> list[Finding]:
    observer = None if scan is None else scan.note
    findings = [Finding(*problem) for problem in missing_blocks(checkpoint)]
    findings += [Finding("suspicious", suspicion, str(checkpoint.path)) for suspicion in checkpoint.suspicions]
    damaged = {name for finding in findings for name in finding.tensors}
    findings += [Finding(*problem) for problem in contradictions(checkpoint)]
    work: list[tuple[int, _Item]] = [
        (seal.nbytes, (partial(_seal, seal, tensors, count, observer), sealed_range(seal)))
        for seal, tensors, count in _seals(checkpoint, resources, count_bytes, observer)
    ]
    work += [
        (nbytes, (partial(_agreement, parameter), _compared_ranges(parameter)))
        for parameter in _with_copies(checkpoint)
        if (nbytes := _compared(parameter))
        and parameter.name not in damaged
        and parameter.name not in replayed.compared
    ]
    work += [
        (
            sum(parameter.states[state].nbytes for state in states),
            (partial(_values, parameter, states, scan), ranges_together(parameter.states[state] for state in states)),
        )
        for parameter, states in _together(checkpoint)
    ]
    tasks = list(batches(work))
    own = resources.with_prefetch() if reads_from_stores(checkpoint.identities) else resources

    def examine(task: tuple[list[_Item], PlannedReads | None]) -> list[Finding]:
        checks, planned = task
        with (
            planned or nullcontext(),
            Reader(check=False, planned=planned) as reader,
            Transfer(reader, own.slab, count_bytes) as transfer,
        ):
            problems = [finding for check, _ in checks for finding in check(transfer)]
            note_zeros(reader.zeros.runs())
        return problems

    plan = [chain.from_iterable(ranges for _, ranges in task) for task in tasks]
    with (
        prefetched(plan, checkpoint.identities, resources) as planned,
        ThreadPoolExecutor(resources.workers, "ckpt") as pool,
    ):
        with_reads = zip(tasks, planned, strict=True)
        results = [f for fs in run_tasks(pool, examine, with_reads, 2 * resources.workers) for f in fs]
    results += replayed.findings
    broken = {name for finding in results if finding.kind == "checksum" for name in finding.tensors}
    if isinstance(checkpoint.parameters, StoredBoxes):
        broken |= {checkpoint.parameters.owner(name) for name in broken}
    # Consequences of damage are not reported: a copy that differs from its master, a chunk that cannot be decoded.
    findings += [f for f in results if f.kind not in ("copy", "replicas", "values") or not broken & set(f.tensors)]
    return sorted(findings, key=lambda finding: (finding.kind, finding.where, finding.tensors))


def _seals(
    checkpoint: Checkpoint, resources: Resources, count_bytes: CountBytes, observer: Observer | None
) -> list[tuple[Seal, tuple[str, ...], CountBytes]]:
    """The seals that are to be compared one by one, the parameters with bytes in each, and what counts them.

    Of seals that are columns, these are the few that did not fit when all were compared.
    """
    seals = checkpoint.seals
    if not isinstance(seals, SealTable):
        touched = _touched(checkpoint)
        return [(seal, touched.get(seal, ()), count_bytes) for seal in seals]

    def unequal(part: SealPart) -> list[int]:
        with Reader(check=False) as reader, reader.observed(observer):
            numbers = part.unequal(reader)
        count_bytes(part.nbytes)
        return numbers

    with ThreadPoolExecutor(resources.workers, "ckpt") as pool:
        wrong = sorted({n for ns in run_tasks(pool, unequal, seals.parts(), 2 * resources.workers) for n in ns})
    few: list[tuple[Seal, tuple[str, ...], CountBytes]] = [(seal, (), count_bytes) for seal in seals.alone()]
    for seal, name in map(seals.of, wrong):
        parameter = checkpoint.parameters.get(name)
        tensors = () if parameter is None else parameter.states.values()
        is_of = any(raw.seal == seal for tensor in tensors for raw in tensor.sources())
        few.append((seal, (name,) if is_of else (), _count_nothing))
    return few


def _count_nothing(nbytes: int) -> None:
    """For bytes that were counted before."""


def _with_copies(checkpoint: Checkpoint) -> Iterable[Parameter]:
    """The parameters that may have replicas, or a copy of the master that is stored."""
    parameters = checkpoint.parameters
    if not isinstance(parameters, TabulatedParameters):
        return parameters.values()
    table = parameters.table
    master, copy = table.rows_named(MASTER), table.rows_named(MODEL)
    both = np.flatnonzero((master >= 0) & (copy >= 0))
    stored = both[~table.derived[copy[both]]]
    split = parameters.split_copies() if isinstance(parameters, StoredBoxes) else ()
    return [*(parameters[table.names[number]] for number in stored.tolist()), *split]


def _touched(checkpoint: Checkpoint) -> dict[Seal, tuple[str, ...]]:
    """The parameters with bytes in each sealed range."""
    forms = {file.path for file in checkpoint.files if file.role == "form"}
    if all(seal.path in forms for seal in checkpoint.seals):
        return {}  # nothing of tensors is in them
    names: dict[Seal, dict[str, None]] = {}
    for parameter, _, tensor in checkpoint.tensors():
        for raw in tensor.sources():
            if raw.seal is not None:
                names.setdefault(raw.seal, {})[parameter.name] = None
    return {seal: tuple(own) for seal, own in names.items()}


def _seal(
    seal: Seal, tensors: tuple[str, ...], count_bytes: CountBytes, observer: Observer | None, transfer: Transfer
) -> list[Finding]:
    try:
        with transfer.reader.observed(observer):
            is_valid = seal_is_valid(seal, transfer.reader)
        damaged = [] if is_valid else damaged_chunks(seal, transfer.reader)
    except CkptError as error:
        return [Finding("unreadable", error.what, str(seal.path), tensors)]
    count_bytes(seal.nbytes)
    message = f"{seal.label}: {seal.nbytes:,} bytes do not fit their {seal.kind} checksum{_chunks(seal, damaged)}"
    return [] if is_valid else [Finding("checksum", message, str(seal.path), tensors)]


def _chunks(seal: Seal, damaged: list[int]) -> str:
    """Which chunks of a sealed range are damaged, for messages."""
    if not damaged or seal.leaves is None:
        return ""
    shown = ", ".join(map(str, damaged[:_MAX_CHUNKS])) + ("…" if len(damaged) > _MAX_CHUNKS else "")
    return f" (chunk {shown} of {len(seal.leaves.nbytes)})"


def _together(checkpoint: Checkpoint) -> Iterator[tuple[Parameter, list[str]]]:
    """The states whose values are decoded, by parameter; those that are decoded together are one item."""
    groups: dict[tuple[str, object], list[str]] = {}
    for name, state in checkpoint.digests:
        blob = checkpoint.parameters[name].states[state].fragments[0].blob
        key = id(blob.replay) if isinstance(blob, DeltaBlob) else state
        groups.setdefault((name, key), []).append(state)
    return ((checkpoint.parameters[name], states) for (name, _), states in groups.items())


def _values(parameter: Parameter, states: list[str], scan: FloatScan | None, transfer: Transfer) -> list[Finding]:
    """A finding if values cannot be decoded. Decoding compares each chunk with its checksum."""
    name = parameter.name
    try:
        for _, values in _blocks(parameter, states, transfer):
            if scan is not None:
                scan.note_values(name, values)
    except CkptError as error:
        return [Finding("values", error.what, error.where or name, (name,))]
    return []


def _blocks(parameter: Parameter, states: Iterable[str], transfer: Transfer) -> Iterator[tuple[str, Array]]:
    """The values of some states in storage order; of replayed states chunk by chunk, so that each is replayed once."""
    tensors = {state: parameter.states[state] for state in states}
    blob = next(iter(tensors.values())).fragments[0].blob
    if not isinstance(blob, DeltaBlob):
        for state, tensor in tensors.items():
            for _, values in transfer.slabs(tensor):
                yield state, values
        return
    vectors = {state: flat(tensor) for state, tensor in tensors.items()}
    for index in range(blob.replay.chunking.count):
        start, stop = blob.replay.chunking.range(index)
        for state, vector in vectors.items():
            yield state, transfer.fetch(vector, Box((start,), (stop,)))


def _compared(parameter: Parameter) -> int:
    """The bytes that are read to compare replicas and copies; 0 if there are none."""
    total = sum(t.nbytes * (1 + len(t.replicas)) for t in parameter.states.values() if t.replicas)
    master, copy = parameter.states.get(MASTER), parameter.states.get(MODEL)
    if master is not None and copy is not None and is_copy(copy, master):
        total += master.nbytes + copy.nbytes
    return total


def _compared_ranges(parameter: Parameter) -> Iterator[ObjectRange]:
    """What `_agreement` reads of objects in stores."""
    for tensor in parameter.states.values():
        if tensor.replicas:
            yield from ranges_together((tensor,))
    master, copy = parameter.states.get(MASTER), parameter.states.get(MODEL)
    if master is not None and copy is not None and is_copy(copy, master):
        yield from ranges_together((replace(master, replicas=()), replace(copy, replicas=())))


def is_copy(copy: Tensor, master: Tensor) -> bool:
    """Is the copy stored separately, and can it be the master, rounded?"""
    return _stored(copy) and master.shape == copy.shape and Rounded.can_round(master.dtype, copy.dtype)


def _stored(tensor: Tensor) -> bool:
    return not any(isinstance(fragment.blob, DerivedBlob) for fragment in tensor.examples())


def _agreement(parameter: Parameter, transfer: Transfer) -> list[Finding]:
    name, findings = parameter.name, list[Finding]()
    for state, tensor in parameter.states.items():
        if tensor.replicas:
            try:
                for _ in transfer.slabs(tensor):
                    pass
            except CkptError as error:
                findings.append(Finding("replicas", f"{state}: {error.what}", error.where or name, (name,)))
    master, copy = parameter.states.get(MASTER), parameter.states.get(MODEL)
    if master is not None and copy is not None and is_copy(copy, master):
        try:
            findings += _rounding(transfer, name, replace(master, replicas=()), replace(copy, replicas=()))
        except CkptError as error:
            findings.append(Finding("unreadable", error.what, error.where or name, (name,)))
    return findings


def _rounding(transfer: Transfer, name: str, master: Tensor, copy: Tensor) -> Iterator[Finding]:
    differing = 0
    for box in transfer.boxes(master):
        values = transfer.fetch(copy, box, "copy")
        differing += count_unrounded(transfer.fetch(master, box), values)
    if differing:
        yield unrounded(name, master, copy, differing)


def count_unrounded(master: Array, copy: Array) -> int:
    """How many values of a copy are not those of the master, rounded. Both have the same shape, any dtype."""
    width = copy.dtype.itemsize
    rounded = np.ascontiguousarray(Rounded().decode(b"", copy.shape, copy.dtype, master))
    unequal = as_bytes(copy).reshape(-1, width) != as_bytes(rounded).reshape(-1, width)
    return int(unequal.any(axis=1).sum())


def unrounded(name: str, master: Tensor, copy: Tensor, differing: int) -> Finding:
    """The finding for a copy of which `differing` values are not those of the master, rounded."""
    files = sorted({raw.path.name for tensor in (master, copy) for raw in tensor.sources()})
    message = f"{differing:,} of {copy.size:,} weights differ from their rounded masters"
    return Finding("copy", message, ", ".join(files), (name,))


@checked
def verify(
    source: Checkpoint,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    *,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
) -> Report:
    """Check a checkpoint: the report is empty if it is complete and undamaged. Reads all of it.

    Checksums, replicas, coverage, suspicions; weights against their masters; files that changed meanwhile. Notes of the
    report name the states with NaN or infinity, of values that have checksums, and zeros that may be holes. With
    patterns of names, `only` and `skip`, the rest is neither read nor checked. Raises `NoMatchError`.
    """
    load_kernels()
    source = as_stored(part_to_check(source, only, skip) if only or skip else source)
    own, scan = resources or Resources.of_machine(), FloatScan(source)
    count_bytes = count_to(nbytes_to_read(source), progress)
    zeros = holes_of(source)
    problems = find_problems(source, own, count_bytes, note_zeros=zeros.extend, scan=scan)
    findings = (*problems, *changed(source))
    strange = () if findings else find_not_finite(source, own, only=scan.names)
    return Report(findings, len(source.seals), (*not_finite_notice(strange), *zero_notices(source, zeros)))
