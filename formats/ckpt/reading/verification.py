"""Join what all processes read of sealed ranges, and compare it with the checksums that the files promise."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ckpt.pipeline import seals_error
from ckpt.reading.evidence import ReadEvidence, replaced
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.coverage import Piece, union
from ckpt_formats.core.errors import CorruptError, InvalidArgumentError
from ckpt_formats.core.evidence import seal_number
from ckpt_formats.core.files import Reader, Seal
from ckpt_formats.core.identity import Identities
from ckpt_formats.core.seal_checks import SealChecks
from ckpt_formats.core.text import printable
from ckpt_formats.core.value_changes import ChangedTensor

_SMALL_REST = 1 << 12
"""Bytes of a sealed range that are read although nobody needs them: so the others are verified."""
_SMALL_SHARE = 64
"""The same as a share of the range: one in so many bytes."""
_MAX_NAMES = 3
_REPLACED = "Load it when no process writes it any more."


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
        self._covered: dict[int, list[Piece]] = {}

    def add(self, evidence: ReadEvidence, identities: Identities) -> None:
        """Add that of one process. `identities`: those of the checkpoint's files.

        Raises `InvalidArgumentError` if it is not about this checkpoint, `CorruptError` for another file at one path.
        """
        path = replaced(evidence.files, identities)
        if path is not None:
            raise CorruptError("another process read another file at this path", where=path, hint=_REPLACED)
        table = evidence.checksums.table
        for rows in (table, evidence.covered):
            for number, stop in zip(rows["seal"].tolist(), rows["stop"].tolist(), strict=True):
                if stop > self._seal(number).nbytes:
                    raise InvalidArgumentError("evidence of a reading: a range reaches beyond its seal")
        self._checks.add(evidence.checksums)
        for number, start, stop in evidence.covered.tolist():
            pieces = self._covered.setdefault(number, [])
            pieces.append(Piece(start, stop, 0))

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
        covered = sum(one.stop - one.start for one in union(self._covered.get(seal_number(seal), ())))
        return seal.nbytes - covered <= max(_SMALL_REST, seal.nbytes // _SMALL_SHARE)

    def _damage(self, damaged: list[Seal]) -> CorruptError:
        error, names = seals_error(damaged), dict[str, None]()
        for parameter, state, tensor in self._source.tensors():
            if any(raw.seal == damaged[0] for raw in tensor.sources()):
                names[f"`{printable(parameter.name)}` {state}"] = None
        if names:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            error.what = f"{', '.join(list(names)[:_MAX_NAMES])}{more}: {error.what}"
        return error
