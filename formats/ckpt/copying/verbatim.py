"""Files as they are: a format whose files are those of a source, byte for byte.

Each file is read once for its checksums: those that the source promises, the e_tag of a store, and one of our own, with
which the copy is compared. A file of the file system on its way to a store is not copied on the disk; the store gets it
from where it is.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import xxhash

from ckpt.copying.compare import compare_objects, digest_of
from ckpt.copying.selection import ChosenFile, ChosenFiles
from ckpt.pipeline import seals_error
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import OutputError
from ckpt_formats.core.files import Reader, write_all
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.seal_checks import verify_seals
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.zero_runs import ZeroRun
from ckpt_formats.stores.e_tags import TAG, RunningTag

_BLOCK = 1 << 20
"""Bytes that are read at once."""


@dataclass(frozen=True, kw_only=True)
class Verbatim(WritableFormat):
    """The files of a selection, as they are."""

    name: ClassVar[str] = "copy"
    summary: ClassVar[str] = "the same files"
    needs_model: ClassVar[bool] = False

    selection: ChosenFiles = field(repr=False)
    target: Path
    unseen: list[Receipt] = field(default_factory=list, repr=False)
    """Receipts of files that were not yet in the store when `commit` was called."""
    zeros: list[ZeroRun] = field(default_factory=list, repr=False)
    """Where the files have nothing but zeros, known when `commit` has been called."""

    def detect(self, path: Path) -> bool:
        return False

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        raise NotImplementedError("a copy is read as what it is a copy of")

    def identity(self) -> object:
        files = (*self.selection.files, *self.selection.last)
        return [(one.name, one.nbytes, one.data) for one in files]

    def plan(self, source: Checkpoint) -> Plan:
        files = tuple(FilePlan(one.name, size=one.nbytes, content=one) for one in self.selection.files)
        return Plan(files, notes=source.notices, single_file=files[0].file if self.selection.is_file else None)

    def write(self, folder: Path, file: FilePlan, transfer: Transfer) -> Receipt:
        assert isinstance(file.content, ChosenFile)
        return self._copied(folder, file.content, transfer)

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        """Compare what is in a store with what was read, then copy the files by which the format knows the whole."""
        if is_remote(self.target):
            compare_objects(self.target, [receipt for receipt in receipts if receipt.e_tag])
        self.unseen.extend(receipt for receipt in receipts if not receipt.e_tag)
        self.zeros.extend(run for receipt in receipts for run in receipt.zeros)
        for one in self.selection.last:
            with Reader(identities=source.identities) as reader, Transfer(reader) as transfer:
                self.unseen.append(self._copied(folder, one, transfer))
                self.zeros.extend(reader.zeros.runs())

    def _copied(self, folder: Path, one: ChosenFile, transfer: Transfer) -> Receipt:
        path, digest = folder / one.name, xxhash.xxh3_128()
        tag = _tag_of(one.nbytes) if is_remote(self.target) else None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link would be written through
        stays = self._is_uploaded_from(one)
        if stays:
            path.symlink_to(one.path.absolute())
        seals = self.selection.seals.get(one.path, ())
        with open(os.devnull if stays else path, "wb", buffering=0) as out:
            for block in _blocks(one, seals, transfer):
                digest.update(block)
                if tag is not None:
                    tag.update(block)
                write_all(out, block)
        broken = list(verify_seals([transfer.reader.evidence()], transfer.reader)) if seals else []
        if broken:
            raise seals_error(broken)
        seal = Seal(Path(one.name), 0, one.nbytes, "xxh3-128", int(digest.intdigest()), one.name)
        if not stays and digest_of(path) != seal.digest:
            raise OutputError("what is on the disk is not what was written", where=path, hint="Check the disk.")
        return Receipt(one.name, one.nbytes, (seal,), {} if tag is None else {TAG: tag.text()})

    def _is_uploaded_from(self, one: ChosenFile) -> bool:
        """Whether a store gets the file from where it is, because it is in the file system and copied as a whole."""
        if one.data is not None or is_remote(one.path) or not is_remote(self.target):
            return False
        return one.path.stat().st_size == one.nbytes


def _tag_of(nbytes: int) -> RunningTag:
    from ckpt_formats.stores.bucket import part_nbytes  # only if there is a store

    return RunningTag(part_nbytes(nbytes))


def _blocks(one: ChosenFile, seals: Sequence[Seal], transfer: Transfer) -> Iterator[memoryview]:
    """The bytes of a file, once; those of sealed ranges are added to their checksums. `seals`: by their offsets."""
    if one.data is not None:
        transfer.count(one.nbytes)
        yield memoryview(one.data)
        return
    for block in read_blocks(transfer.reader, one.path, 0, one.nbytes, seals):
        transfer.count(len(block))
        yield block


def read_blocks(reader: Reader, path: Path, begin: int, end: int, seals: Sequence[Seal]) -> Iterator[memoryview]:
    """The bytes of a range of a file, once; those of sealed ranges are added to their checksums.

    Each block is valid until the next one. `seals`: those that have bytes in the range, by their offsets.
    """
    buffer, waiting, active = memoryview(bytearray(min(_BLOCK, end - begin))), deque(seals), list[Seal]()
    for start in range(begin, end, _BLOCK):
        block = buffer[: min(_BLOCK, end - start)]
        stop = start + len(block)
        reader.read_into(path, start, block)
        while waiting and waiting[0].offset < stop:
            active.append(waiting.popleft())
        for seal in active:
            low, high = max(start, seal.offset), min(stop, seal.offset + seal.nbytes)
            reader.note_sealed(seal, low - seal.offset, block[low - start : high - start])
        active = [seal for seal in active if seal.offset + seal.nbytes > stop]
        yield block
