"""Seal a checkpoint: write the checksums of all its files into a file beside them, which is compared ever after."""

import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from ckpt.copying.selection import ChosenFile, select
from ckpt.copying.verbatim import read_blocks
from ckpt.job import AnyProgress, count_to
from ckpt.pipeline import Resources, check_complete, raise_if_damaged
from ckpt.pipeline.executors import run_tasks
from ckpt.pipeline.interrupts import interruptible
from ckpt_formats.core.arguments import Checked, Count, StrPath, checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import OutputError, UnsupportedError
from ckpt_formats.core.evidence import Evidence
from ckpt_formats.core.files import Reader
from ckpt_formats.core.folders import check_no_stale_sidecars
from ckpt_formats.core.identity import check_unchanged
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.seal_checks import SealChecks
from ckpt_formats.core.seals import Seal, crc32
from ckpt_formats.core.text import printable
from ckpt_formats.registry.location import locate
from ckpt_formats.registry.seal_file import SealedFile, to_bytes
from ckpt_formats.registry.seal_places import place_of
from ckpt_formats.stores.location import place_at, source_path, target_path

_RANGE = 8 << 20
"""A range of a file has at least so many bytes, unless a tensor or the file ends before."""


@dataclass(frozen=True)
class Sealed(Checked):
    """What `seal` wrote."""

    seal_file: Path
    files: Count
    """Files whose checksums are in it."""
    nbytes: Count
    """Their bytes: all of them were read."""


@dataclass(frozen=True)
class SealPlan:
    """What will be sealed: files with the ends of their ranges."""

    checkpoint: Checkpoint
    seal_file: Path
    files: tuple[tuple[ChosenFile, tuple[int, ...]], ...]
    seals: Mapping[Path, Sequence[Seal]] = field(repr=False)
    """The checksums that the files have already, by file: those of an optimizer's file beside the weights."""

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(file.nbytes for file, _ in self.files)


def plan_seal(path: StrPath) -> SealPlan:
    """What `seal` would do. No tensor is read. Raises as `seal`."""
    text = str(path) if isinstance(path, Path) else os.fspath(path)
    target_path(text)  # raises for a store that is only read
    place = source_path(text)
    if locate(place).format.is_own:
        raise UnsupportedError(
            "has checksums of all its bytes already", where=place, hint="`ckpt verify` compares them."
        )
    check_no_stale_sidecars(place)
    seal_file = place_of(place)
    if seal_file.exists() or seal_file.is_symlink():
        raise OutputError(
            "is sealed already",
            where=seal_file,
            hint=f"`ckpt verify` compares it. If you changed files on purpose: remove {printable(seal_file.name)}",
        )
    chosen = select(place)
    checkpoint = chosen.opened
    assert checkpoint is not None  # a chain has checksums of its own
    check_complete(checkpoint)
    borders = _borders(checkpoint)
    files = ((one, _ends(one.nbytes, borders.get(one.path, ()))) for one in (*chosen.files, *chosen.last))
    return SealPlan(checkpoint, seal_file, tuple(files), chosen.seals)


@checked
def seal(
    path: StrPath,
    *,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
) -> Sealed:
    """Read all files of a checkpoint once, and write their checksums into a file beside them.

    `path`: a file or folder of a format that has no checksums of its own, such as safetensors. From then on `verify`,
    `save` and `copy` compare what they read with it. A folder gets `checkpoint.ckpt-seal`, a file `NAME.ckpt-seal`; in
    a store, this is an object.

    Raises `CorruptError` or `IncompleteError` if tensors are not complete or checksums that some of the files have do
    not fit, `OutputError` if it is sealed already or the file cannot be written, `UnsupportedError` for stores that
    are only read and for formats that have checksums of everything.
    """
    return run_seal(plan_seal(path), resources=resources, progress=progress)


def run_seal(plan: SealPlan, *, resources: Resources | None = None, progress: AnyProgress | None = None) -> Sealed:
    """Do what was planned. Raises as `seal`."""
    resources = resources or Resources.of_machine()
    count_bytes = count_to(plan.nbytes, progress)
    identities = plan.checkpoint.identities
    work = [(number, start, end) for number, (_, ends) in enumerate(plan.files) for start, end in pairwise((0, *ends))]
    crcs: dict[int, dict[int, int]] = defaultdict(dict)
    checks = SealChecks()
    known = {file.path: _KnownSeals(plan.seals.get(file.path, ())) for file, _ in plan.files}
    with interruptible(count_bytes) as count, ThreadPoolExecutor(resources.workers, "ckpt") as pool:

        def checksum(item: tuple[int, int, int]) -> tuple[int, int, int, Evidence]:
            number, start, end = item
            path = plan.files[number][0].path
            crc = 0
            with Reader(identities=identities) as reader:
                for block in read_blocks(reader, path, start, end, known[path].within(start, end)):
                    crc = crc32(block, crc)
                    count(len(block))
                return number, start, crc, reader.evidence()

        for number, start, crc, evidence in run_tasks(pool, checksum, work, 2 * resources.workers):
            crcs[number][start] = crc
            checks.add(evidence)
    raise_if_damaged(checks, identities)
    check_unchanged(identities)
    sealed = {
        file.name: SealedFile(ends, tuple(crcs[number][start] for start in sorted(crcs[number])))
        for number, (file, ends) in enumerate(plan.files)
    }
    write_seal_file(plan.seal_file, sealed)
    return Sealed(plan.seal_file, len(sealed), plan.nbytes)


class _KnownSeals:
    """The checksums that a file has already, by their offsets. They may overlap."""

    def __init__(self, seals: Sequence[Seal]) -> None:
        self._seals = seals
        self._begins = [one.offset for one in seals]
        self._reach = list(accumulate((one.offset + one.nbytes for one in seals), max))

    def within(self, start: int, end: int) -> list[Seal]:
        """Those that have bytes in a range, by their offsets."""
        nearby = self._seals[bisect_right(self._reach, start) : bisect_left(self._begins, end)]
        return [one for one in nearby if one.offset + one.nbytes > start]


def _borders(checkpoint: Checkpoint) -> dict[Path, Sequence[int]]:
    """By file, the ends of its tensors' bytes at which a range may end: those inside no other tensor, ascending."""
    extents: dict[Path, list[tuple[int, int]]] = defaultdict(list)
    for _, _, tensor in checkpoint.tensors():
        for copy in (tensor, *tensor.replicas):
            for raw in copy.sources():
                if raw.span:
                    extents[raw.path].append((raw.offset, raw.offset + raw.span))
    result = dict[Path, Sequence[int]]()
    for path, own in extents.items():
        own.sort()
        starts, ends = np.array(own, np.int64).T
        reach = np.maximum.accumulate(ends)
        is_border = np.append(starts[1:] >= reach[:-1], True)
        result[path] = reach[is_border].tolist()
    return result


def _ends(nbytes: int, borders: Sequence[int]) -> tuple[int, ...]:
    """The ends of the ranges of a file: at borders of tensors; of a file without tensors, of `_RANGE` bytes each."""
    if not nbytes:
        return ()
    if not borders:
        return (*range(_RANGE, nbytes, _RANGE), nbytes)
    ends, begin = list[int](), 0
    for border in borders:
        if border - begin >= _RANGE and border < nbytes:
            ends.append(border)
            begin = border
    return (*ends, nbytes)


def write_seal_file(place: Path, files: Mapping[str, SealedFile]) -> None:
    """Write a seal file, which appears when it is whole, and replaces nothing. Raises `OutputError`."""
    try:
        place_at(place.parent).replace(place.name, to_bytes(files), None)
    except FileExistsError as error:
        raise OutputError("is sealed already, by another process", where=place) from error
    except OSError as error:
        raise unwritable(error, place) from error


def remove_seal_file(place: Path) -> None:
    """Remove a seal file that this process wrote. What cannot be removed stays."""
    with suppress(OSError):
        place_at(place.parent).delete([place.name])
