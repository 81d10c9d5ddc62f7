"""The journal of an interrupted run of `protect`: the hashes of the stripes whose parities are on the disk."""

import json
import os
import shutil
from dataclasses import asdict

import numpy as np
import xxhash

from ckpt.protection.parity_draft import JOURNAL, ParityDraft
from ckpt.protection.parity_folders import write_whole
from ckpt_formats.core.own_folder import make_own
from ckpt_formats.parity.blocks import PLAN
from ckpt_formats.parity.manifest import HASH_NBYTES


class ParityJournal:
    """The stripes that are on the disk with their hashes, in the order of the manifest."""

    def __init__(self, draft: ParityDraft) -> None:
        self._folder, self._draft, self._plan = draft.folder, draft, draft.plan
        self._hashes = draft.plan.folder.hashes
        self._stripes = list(draft.plan.folder.stripes())
        self.done = 0
        """How many stripes are noted."""
        self._descriptor = -1

    def open(self) -> None:
        """Continue what an equal run left, or begin anew."""
        note = json.dumps(
            [self._plan.folder.manifest.header().decode(), [asdict(one) for one in self._plan.identities.values()]]
        ).encode()
        folders = self._draft.folders
        if not (self._is_equal(note) and all(folder.is_dir() for folder in folders)):
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            for folder in folders:
                folder.parent.mkdir(parents=True, exist_ok=True)
                make_own(folder)
            for place in self._draft.grown.places:
                place.mkdir()
            (self._folder / JOURNAL).touch()
            write_whole(self._folder / PLAN, note)
        self._descriptor = os.open(self._folder / JOURNAL, os.O_RDWR | os.O_CLOEXEC)
        self._read()

    def _is_equal(self, note: bytes) -> bool:
        try:
            return (self._folder / PLAN).read_bytes() == note
        except OSError:
            return False

    def _read(self) -> None:
        """Take over the records that are whole. One that is torn, and what follows, is cut off."""
        data, at = (self._folder / JOURNAL).read_bytes(), 0
        while self.done < len(self._stripes):
            rows = self._rows(self.done)
            end = at + len(rows) * HASH_NBYTES
            record, digest = data[at:end], data[end : end + 8]
            if len(digest) < 8 or xxhash.xxh3_64_digest(record, seed=self.done) != digest:
                break
            self._hashes.table[rows] = np.frombuffer(record, np.uint8).reshape(-1, HASH_NBYTES)
            at, self.done = end + 8, self.done + 1
        os.ftruncate(self._descriptor, at)
        os.lseek(self._descriptor, at, os.SEEK_SET)

    def _rows(self, number: int) -> list[int]:
        """The rows of the hashes of a stripe."""
        group, stripe = self._stripes[number]
        return [self._hashes.row(group, at.column, stripe) for at in self._plan.folder.blocks_of(group, stripe)]

    def note(self, done: int) -> None:
        """Note the stripes up to a number, whose hashes are known and whose parities are on the disk."""
        records = bytearray()
        for number in range(self.done, done):
            record = self._hashes.table[self._rows(number)].tobytes()
            records += record + xxhash.xxh3_64_digest(record, seed=number)
        view = memoryview(records)
        while view:
            view = view[os.write(self._descriptor, view) :]
        os.fsync(self._descriptor)
        self.done = done

    def __enter__(self) -> "ParityJournal":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)
