"""Join what all processes read of sealed ranges, and compare it with the checksums that the files promise."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ckpt.pipeline import seals_error
from ckpt.reading.evidence import COVERED, FILE, ReadEvidence, Rows, replaced
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.coverage import Piece, union
from ckpt_formats.core.distinct import distinct
from ckpt_formats.core.errors import CorruptError, InvalidArgumentError
from ckpt_formats.core.evidence import seal_number
from ckpt_formats.core.files import Reader
from ckpt_formats.core.identity import Identities
from ckpt_formats.core.seal_checks import SealChecks
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.text import list_names, printable, quoted
from ckpt_formats.core.value_changes import ChangedTensor

_SMALL_REST = 1 << 12
"""Bytes of a sealed range that are read although nobody needs them: so the others are verified."""
_SMALL_SHARE = 64
"""The same as a share of the range: one in so many bytes."""
_REPLACED = "Load it when no process writes it any longer."


@dataclass(frozen=True)
class Verification:
    """What the checksums of files say about the values that were read: no error, and for which of them."""

    seals: int
    """How many ranges of files were compared with their checksums."""
    unverified: tuple[str, ...] = ()
    """The ranges of which only a part was read, and so was compared with no checksum of the whole: nobody needed the
    rest. Each is the file's name and the range's."""
    changed: tuple[ChangedTensor, ...] = ()
    """The tensors with values that an edit changed other than by rounding, in what this process read."""


class JoinedEvidence:
    """The evidence of all processes, about one checkpoint."""

    def __init__(self, source: Checkpoint, own_seals: Iterable[Seal]) -> None:
        """`own_seals`: those of which this process read something."""
        self._source = source
        self._known = {seal_number(seal): seal for seal in own_seals}
        self._checks = SealChecks(self._known)
        self._covered = [np.empty(0, COVERED)]
        self._files = [np.empty(0, FILE)]

    def add(self, evidence: ReadEvidence, identities: Identities) -> None:
        """Add that of one process. `identities`: those of the checkpoint's files.

        Raises `InvalidArgumentError` if it is not about this checkpoint, `CorruptError` for another file at one path.
        """
        path = replaced(evidence.files, identities)
        if path is not None:
            raise CorruptError("another process read another file at this path", where=path, hint=_REPLACED)
        table = evidence.checksums.table
        numbers = distinct(np.concatenate([table["seal"], evidence.covered["seal"]]))
        most = np.array([self._seal(number).nbytes for number in numbers.tolist()], np.uint64)
        for rows in (table, evidence.covered):
            if (rows["stop"] > most[np.searchsorted(numbers, rows["seal"])]).any():
                raise InvalidArgumentError("evidence of a reading: a range reaches beyond its seal")
        self._checks.add(evidence.checksums)
        self._covered.append(evidence.covered)
        self._files.append(evidence.files)

    def evidence(self) -> ReadEvidence:
        """All of it as the evidence of one process, neighbours combined."""
        open_numbers = [seal_number(checksum.seal) for checksum, _ in self._checks.undecided()]
        rows = [(number, one.start, one.stop) for number in open_numbers for one in self._ranges_of(number)]
        files = np.unique(np.concatenate(self._files))
        return ReadEvidence(self._checks.evidence(), np.array(rows, COVERED), files)

    def _ranges_of(self, number: int) -> list[Piece]:
        """What was read of a sealed range."""
        numbers, rows = self._sorted_ranges
        low, high = (int(np.searchsorted(numbers, np.uint64(number), side)) for side in ("left", "right"))
        return union(Piece(start, stop, 0) for _, start, stop in rows[low:high].tolist())

    @cached_property
    def _sorted_ranges(self) -> tuple[Rows, Rows]:
        """What was read, by seals: the seals' numbers, (ranges,) uint64, and the rows, (ranges,) of `COVERED`."""
        rows = np.sort(np.concatenate(self._covered), order=("seal", "start"))
        return np.ascontiguousarray(rows["seal"]), rows

    def _seal(self, number: int) -> Seal:
        if number not in self._known:
            self._known.update(self._all)
        if number not in self._known:
            raise InvalidArgumentError(
                "evidence of a reading: it is about another checkpoint", hint="All processes open the same files."
            )
        return self._known[number]

    @cached_property
    def _all(self) -> dict[int, Seal]:
        tensors = (tensor for _, _, tensor in self._source.tensors())
        return {seal_number(raw.seal): raw.seal for one in tensors for raw in one.sources() if raw.seal is not None}

    def verified(self, reader: Reader, rest: bool, changed: tuple[ChangedTensor, ...]) -> Verification:
        """Compare all checksums. Bytes that nobody has read are read only if they are few, or with `rest`.

        `changed`: for the result.

        Raises `CorruptError`, which names the tensors and the file.
        """
        damaged, unverified = list(self._checks.mismatched), list[str]()
        count = self._checks.decided
        for checksum, pieces in self._checks.undecided():
            seal = checksum.seal
            if not rest and not self._is_nearly_read(seal):
                unverified.append(printable(f"{seal.path.name}: {seal.label}"))
                continue
            count += 1
            if not checksum.is_valid(pieces, reader):
                damaged.append(seal)
        if damaged:
            raise self._damage(damaged)
        return Verification(count, tuple(unverified), changed)

    def _is_nearly_read(self, seal: Seal) -> bool:
        covered = sum(one.stop - one.start for one in self._ranges_of(seal_number(seal)))
        return seal.nbytes - covered <= max(_SMALL_REST, seal.nbytes // _SMALL_SHARE)

    def _damage(self, damaged: list[Seal]) -> CorruptError:
        error, states = seals_error(damaged), dict[str, None]()
        for parameter, state, tensor in self._source.tensors():
            if any(raw.seal == damaged[0] for raw in tensor.sources()):
                states[f"{quoted(parameter.name)} {state}"] = None
        if states:
            error.what = f"{list_names(states, str)}: {error.what}"
        return error
