"""Check the values of all states of a chain in one pass: each chunk of each delta is decoded once.

A parameter is replayed chunk by chunk, from its base to the last state that stands on it. What is to be checked of a
state is checked when the replay is there, so only the chunks of two states are in memory.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ckpt.findings import checks
from ckpt.findings.checks import Replayed
from ckpt.findings.not_finite import can_have, count_not_finite
from ckpt.findings.report import Finding
from ckpt.pipeline import CountBytes, Resources
from ckpt.pipeline.executors import batches, run_tasks
from ckpt.pipeline.interrupts import interruptible
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.tensor import Blob, Tensor
from ckpt_formats.universal.replay import StateArrays, StoredDelta, chunk_of, stored_delta

DeltaKey = tuple[object, ...]
"""Equal for the same delta, read from the same place."""


@dataclass(eq=False)
class _ValuesCheck:
    """The values of some states. To decode them is to compare them with their checksums."""

    name: str
    nbytes_each: int
    """Bytes of one element of all these states."""
    findings: list[Finding] = field(default_factory=list)

    def see(self, bounds: tuple[int, int], states: StateArrays, reader: Reader) -> int:
        """Check a chunk. Returns how many bytes were checked."""
        return (bounds[1] - bounds[0]) * self.nbytes_each

    def fail(self, bounds: tuple[int, int], error: CkptError, reader: Reader) -> None:
        """A chunk cannot be decoded, so nothing more is checked."""
        self.findings.append(Finding("values", error.what, error.where or self.name, (self.name,)))

    def end(self) -> None:
        """All chunks were seen."""


@dataclass(eq=False)
class _CopyCheck:
    """Is the model's copy the master, rounded?"""

    name: str
    master: Tensor
    copy: Tensor
    differing: int = 0
    findings: list[Finding] = field(default_factory=list)

    def see(self, bounds: tuple[int, int], states: StateArrays, reader: Reader) -> int:
        copy = chunk_of(_blob(self.copy), *bounds, states, reader)
        master = chunk_of(_blob(self.master), *bounds, states, reader)
        self.differing += checks.count_unrounded(master, copy)
        return master.nbytes + copy.nbytes

    def fail(self, bounds: tuple[int, int], error: CkptError, reader: Reader) -> None:
        if stored_delta(_blob(self.copy)) is None:
            try:
                chunk_of(_blob(self.copy), *bounds, {}, reader)
            except CkptError as own:  # the copy is read before its master
                error = own
        self.findings.append(Finding("unreadable", error.what, error.where or self.name, (self.name,)))

    def end(self) -> None:
        if self.differing:
            self.findings.append(checks.unrounded(self.name, self.master, self.copy, self.differing))


@dataclass(eq=False)
class _FloatsCheck:
    """Are there NaN or infinity in the states of a delta?"""

    name: str
    is_strange: bool = False
    findings: tuple[Finding, ...] = ()
    """None: it is no damage."""

    def see(self, bounds: tuple[int, int], states: StateArrays, reader: Reader) -> int:
        self.is_strange |= any(can_have(one.dtype) and any(count_not_finite(one)) for one in states.values())
        return 0

    def fail(self, bounds: tuple[int, int], error: CkptError, reader: Reader) -> None:
        """Other checks report it."""

    def end(self) -> None:
        """All chunks were seen."""


_Check = _ValuesCheck | _CopyCheck | _FloatsCheck


@dataclass(eq=False)
class _Course:
    """The deltas of a parameter, the first of them first, and what is checked after each of them."""

    lineage: Sequence[StoredDelta]
    checks: dict[int, list[_Check]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of what all deltas give."""
        return sum(delta.chunking.size * dtype.itemsize for delta in self.lineage for dtype in delta.form.values())


def delta_key(delta: StoredDelta) -> DeltaKey:
    """Deltas without bytes may be at one place, but have labels of their own."""
    return delta.stored.path, delta.stored.offset, delta.stored.label


def replay_once(checkpoints: Sequence[Checkpoint], resources: Resources, count_bytes: CountBytes) -> list[Replayed]:
    """Check all values that deltas give, of several checkpoints: those in `digests`, and copies that are compared.

    A later state comes before the states that it stands on.
    """
    courses, stages = list[_Course](), dict[DeltaKey, tuple[_Course, int]]()
    of_checkpoints = [list[_Check]() for _ in checkpoints]
    for checkpoint, own in zip(checkpoints, of_checkpoints, strict=True):
        for delta, check in _checks(checkpoint):
            own.append(check)
            if delta_key(delta) not in stages:
                course = _Course(delta.lineage())
                courses.append(course)
                for stage, one in enumerate(course.lineage):
                    stages.setdefault(delta_key(one), (course, stage))
            course, stage = stages[delta_key(delta)]
            course.checks.setdefault(stage, []).append(check)
    with interruptible(count_bytes) as count, ThreadPoolExecutor(resources.workers, "ckpt") as pool:

        def replay(courses: list[_Course]) -> None:
            with Reader(check=False) as reader:
                for course in courses:
                    _replay(course, reader, count)

        work = batches((course.nbytes, course) for course in courses)
        for _ in run_tasks(pool, replay, work, 2 * resources.workers):
            pass
    return [
        Replayed(
            tuple(finding for check in own for finding in check.findings),
            frozenset(check.name for check in own if isinstance(check, _CopyCheck)),
            frozenset(check.name for check in own if isinstance(check, _FloatsCheck) and check.is_strange),
        )
        for own in of_checkpoints
    ]


def _checks(checkpoint: Checkpoint) -> list[tuple[StoredDelta, _Check]]:
    """What is to be checked of a checkpoint, and the delta after which it is."""
    checks_of: list[tuple[StoredDelta, _Check]] = []
    sizes: dict[str, tuple[StoredDelta, int]] = {}
    for name, state in checkpoint.digests:
        tensor = checkpoint.parameters[name].states[state]
        delta = stored_delta(_blob(tensor))
        if delta is not None:
            sizes[name] = delta, sizes.get(name, (delta, 0))[1] + tensor.dtype.itemsize
    checks_of += [(delta, _ValuesCheck(name, nbytes)) for name, (delta, nbytes) in sizes.items()]
    for parameter in checkpoint.parameters.values():
        every = (stored_delta(_blob(tensor)) for tensor in parameter.states.values())
        if (own := next((delta for delta in every if delta is not None), None)) is not None:
            checks_of.append((own, _FloatsCheck(parameter.name)))
        delta = _compared_after(parameter)
        if delta is not None:
            checks_of.append((delta, _CopyCheck(parameter.name, parameter.states[MASTER], parameter.states[MODEL])))
    return checks_of


def _compared_after(parameter: Parameter) -> StoredDelta | None:
    """The delta that gives the master or the copy of a parameter, if these are compared."""
    master, copy = parameter.states.get(MASTER), parameter.states.get(MODEL)
    if master is None or copy is None or not checks.is_copy(copy, master):
        return None
    return stored_delta(_blob(master)) or stored_delta(_blob(copy))


def _blob(tensor: Tensor) -> Blob:
    """A universal checkpoint has each state as one block."""
    return tensor.fragments[0].blob


def _replay(course: _Course, reader: Reader, count_bytes: CountBytes) -> None:
    """Replay all chunks. A check whose chunk cannot be decoded is at its end; others go on."""
    remaining, chunking = dict(course.checks), course.lineage[0].chunking
    for index in range(chunking.count):
        if not remaining:
            return
        bounds, states = chunking.range(index), StateArrays()
        for stage in range(max(remaining) + 1):
            try:
                states = course.lineage[stage].decoded(index, states, reader)
            except CkptError as error:
                for later in [one for one in remaining if one >= stage]:
                    for check in remaining.pop(later):
                        check.fail(bounds, error, reader)
                break
            if stage in remaining:
                _see(remaining, stage, bounds, states, reader, count_bytes)
    for ended in remaining.values():
        for check in ended:
            check.end()


def _see(
    remaining: dict[int, list[_Check]],
    stage: int,
    bounds: tuple[int, int],
    states: StateArrays,
    reader: Reader,
    count_bytes: CountBytes,
) -> None:
    """Do all checks of a stage with a chunk, and leave out those that cannot go on."""

    def goes_on(check: _Check) -> bool:
        try:
            count_bytes(check.see(bounds, states, reader))
        except CkptError as error:
            check.fail(bounds, error, reader)
            return False
        return True

    going_on = [check for check in remaining.pop(stage) if goes_on(check)]
    if going_on:
        remaining[stage] = going_on
