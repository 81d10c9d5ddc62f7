"""A save into a store: packs are uploaded as they are complete, and the manifest makes them a checkpoint, at the end.

What processes see of each other are objects in `.ckpt` at the place of the checkpoint, as those of a job. There are no
locks of processes in a store: that another rank has ended shows only in that it makes no progress.
"""

import shutil
from collections.abc import Sequence
from functools import cached_property

from ckpt_formats.core.place import Place
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.core.text import STAGED
from ckpt_formats.stores.location import place_at
from ckpt_formats.universal.boxes import CheckpointNotes, PackReceipt
from ckpt_formats.universal.manifest import Manifest, Parent
from ckpt_training.writing.staged_save import StagedSave
from ckpt_training.writing.stored_packs import StoredPacks, upload_pack


class StoredSave(StagedSave):
    """A save into a store."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.data = self.scratch / f"save-{self.step}"
        self._packs: StoredPacks | None = None

    @cached_property
    def place(self) -> Place:
        return place_at(self.target).within(STAGED)

    def begin(self) -> None:
        (self.data / "packs").mkdir(parents=True, exist_ok=True)
        if self.settings.rank:
            return
        assert isinstance(self.target, StorePath)
        save = f"{self.settings.token}-{self.step}"
        self._packs = StoredPacks(self.target, save, self.settings.ranks, "live run")
        self.stack.callback(self._packs.close)
        self.place.create(self._open_mark, b"")

    def deliver(self, receipt: PackReceipt) -> str:
        """Upload the pack, once rank 0 has noted the save at the target."""
        self.wait_for(self._open_mark, 0)
        return upload_pack(self.target, self.data, receipt)

    def assemble(
        self, receipts: Sequence[PackReceipt], tags: Sequence[str], notes: CheckpointNotes, parent: Parent | None
    ) -> Manifest:
        assert self._packs is not None
        return self._packs.assemble(receipts, tags, notes, parent)

    def publish(self) -> None:
        """Put the index and, last, the manifest."""
        assert self._packs is not None
        self._packs.publish()

    def close(self, *, remove: bool = False) -> None:
        shutil.rmtree(self.data, ignore_errors=True)
        if remove and self._packs is not None:
            self._packs.remove()
        self.stack.close()

    @property
    def _open_mark(self) -> str:
        return f"open-{self.settings.token}"
