"""A save into a store: packs are uploaded as they are complete, and the manifest makes them a checkpoint, at the end.

What processes see of each other are objects in `.ckpt` at the place of the checkpoint, as those of a job. There are no
locks of processes in a store: that another rank has ended shows only in that it makes no progress.
"""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from ckpt.pipeline import Execution
from ckpt.pipeline.bucket_target import BucketTarget, open_target
from ckpt.pipeline.job_note import JobNote
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.place import Place
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.core.text import STAGED
from ckpt_formats.stores.location import place_at
from ckpt_formats.universal.boxes import CheckpointNotes, PackReceipt, assemble
from ckpt_formats.universal.manifest import Manifest, Parent, pack_file
from ckpt_training.writing.staged_save import StagedSave


class StoredSave(StagedSave):
    """A save into a store."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.data = self.scratch / f"save-{self.step}"
        self._staged: BucketTarget | None = None
        self._is_published = False

    @cached_property
    def place(self) -> Place:
        return self._files.within(STAGED)

    @cached_property
    def _files(self) -> Place:
        return place_at(self.target)

    def begin(self) -> None:
        (self.data / "packs").mkdir(parents=True, exist_ok=True)
        if self.settings.rank:
            return
        assert isinstance(self.target, StorePath)
        staged = self.stack.enter_context(open_target(self.target, Execution(workers=1), None))
        packs = [pack_file(number) for number in range(self.settings.ranks)]
        save = f"{self.settings.token}-{self.step}"
        staged.begin(JobNote.of(save, Path("live run"), self.target, "universal", packs, None))
        self._staged = staged
        self.place.create(self._open_mark, b"")

    def deliver(self, receipt: PackReceipt) -> str:
        """Upload the pack, once rank 0 has noted the save at the target."""
        self.wait_for(self._open_mark, 0)
        name = pack_file(receipt.number)
        return self._files.create_from(name, self.data / name, lambda: None)

    def assemble(
        self, receipts: Sequence[PackReceipt], tags: Sequence[str], notes: CheckpointNotes, parent: Parent | None
    ) -> Manifest:
        assert self._staged is not None
        for receipt, tag in zip(receipts, tags, strict=True):  # they are compared with the objects when it is published
            self._staged.note(Receipt(pack_file(receipt.number), receipt.pack.nbytes, (), {}, e_tag=tag))
        return assemble(self._staged.workspace, receipts, notes, parent, packs_elsewhere=True)

    def publish(self) -> None:
        """Put the index and, last, the manifest."""
        assert self._staged is not None
        self._staged.publish((), lambda folder: None)
        self._is_published = True

    def close(self, *, remove: bool = False) -> None:
        shutil.rmtree(self.data, ignore_errors=True)
        if remove and self._staged is not None:
            with suppress(OSError):
                self._staged.remove_notes() if self._is_published else self._staged.discard()
        self.stack.close()

    @property
    def _open_mark(self) -> str:
        return f"open-{self.settings.token}"
