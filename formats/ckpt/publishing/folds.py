"""What a rank of a live run keeps for folds: its values at a few earlier steps, in files that are mapped."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpt.publishing.publication import FOLDS, due_lengths
from ckpt.publishing.rank_buffers import EncodedShare, PublishedValues, RankBuffers
from ckpt_formats.core.tensor import Array
from ckpt_formats.universal.published.records import hash_bytes


@dataclass(frozen=True, eq=False)
class EncodedFold:
    """What one rank stores of a fold."""

    length: int
    """How many steps it joins."""
    before: str
    """The hash of the rank's state before them."""
    encoded: EncodedShare


class FoldAnchors:
    """The values of a rank at the steps where the next folds begin: at most four copies.

    All ranks of a run note the same steps, so their folds join the same steps.
    """

    def __init__(self, buffers: RankBuffers, nbytes: int, scratch: Path | None = None) -> None:
        """`nbytes`: `RankBuffers.nbytes_of` of the rank. `scratch`: the folder for the files, which have no names."""
        self._buffers, self._nbytes, self._scratch = buffers, nbytes, scratch
        self._copies: dict[int, PublishedValues] = {}
        """By the number of steps since the base."""
        self._free: list[Array] = []
        self._number: int | None = None

    def note_step(self, is_base: bool) -> list[EncodedFold]:
        """Note that the published values of the buffers are those of the next step. Returns the folds that end there.

        Nothing is encoded before the first base is noted.
        """
        if is_base:
            self._number = 0
        elif self._number is not None:
            self._number += 1
        number, folds = self._number, list[EncodedFold]()
        if number is None or number % min(FOLDS.values()):
            return folds
        for length in due_lengths(number):
            earlier = self._copies.get(number - length)
            if earlier is not None:
                before = hash_bytes(b"".join(earlier.digests))
                folds.append(EncodedFold(length, before, self._buffers.encode_fold(earlier)))
        self._copy(number)
        return folds

    def forget(self) -> None:
        """Encode no further fold before the next base: the run does not have the values of each step."""
        self._number = None

    def _copy(self, number: int) -> None:
        needed = {
            first
            for length, every in FOLDS.items()
            for first in range(number - number % every, max(number - length, -1), -every)
        }
        for other in [other for other in self._copies if other not in needed or other >= number]:
            self._free.append(self._copies.pop(other).memory)
        memory = self._free.pop() if self._free else self._mapped()
        self._copies[number] = self._buffers.copy_published(memory)

    def _mapped(self) -> Array:
        with tempfile.TemporaryFile(prefix="ckpt-fold-", dir=self._scratch) as file:
            # The space is taken now: a write into a map of a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, max(self._nbytes, 1))
            return np.memmap(file, np.uint8, "r+", shape=(max(self._nbytes, 1),))[: self._nbytes]
