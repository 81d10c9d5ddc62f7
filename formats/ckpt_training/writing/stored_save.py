"""A save into a store: files are uploaded as they are complete, and the last object makes them a checkpoint.

What processes see of each other are objects in `.ckpt` at the place of the checkpoint, as those of a job. There are no
locks of processes in a store: that another rank has ended shows only in that it makes no progress.
"""

import shutil
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from ckpt_formats.core.format import Receipt
from ckpt_formats.core.place import Place
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.core.text import STAGED
from ckpt_formats.stores.location import place_at
from ckpt_training.writing.staged_save import A, StagedSave
from ckpt_training.writing.stored_files import StoredFiles, upload


class StoredSave(StagedSave):
    """A save into a store."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.data = self.scratch / f"save-{self.step}"
        self._files: StoredFiles | None = None

    @cached_property
    def place(self) -> Place:
        return place_at(self.target).within(STAGED)

    def begin(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        if self.settings.rank:
            return
        assert isinstance(self.target, StorePath)
        save = f"{self.settings.token}-{self.step}"
        names = [self.format.file(rank) for rank in range(self.settings.ranks)]
        self._files = StoredFiles(self.target, save, names, self.format.name, "live run")
        self.stack.callback(self._files.close)
        self.place.create(self._open_mark, b"")

    def deliver(self, file: str) -> str:
        """Upload the file, once rank 0 has noted the save at the target."""
        self.wait_for(self._open_mark, 0)
        return upload(self.target, self.data, file)

    def assemble(self, files: Sequence[Receipt], write: Callable[[Path], A]) -> A:
        assert self._files is not None
        for one in files:
            self._files.note(one)
        return write(self._files.workspace)

    def publish(self) -> None:
        """Put what `assemble` has written, and last what makes the objects a checkpoint."""
        assert self._files is not None
        self._files.publish()

    def close(self, *, remove: bool = False) -> None:
        shutil.rmtree(self.data, ignore_errors=True)
        if remove and self._files is not None:
            self._files.remove()
        self.stack.close()

    @property
    def _open_mark(self) -> str:
        return f"open-{self.settings.token}"
