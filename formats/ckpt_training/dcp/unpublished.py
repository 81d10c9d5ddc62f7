"""What `dcp.save` has written before it is published: a folder beside the target, or objects in a store."""

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from ckpt.pipeline.folder_target import LOCK, make_staging, remove_staging, staging_folder
from ckpt.pipeline.lease import hold
from ckpt.pipeline.scratch import scratch_folder
from ckpt.pipeline.target import PUBLISHED
from ckpt_formats.core.errors import OutputError
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.publish import flush, rename_new
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal.boxes import CheckpointNotes, PackReceipt, assemble
from ckpt_formats.universal.manifest import pack_file
from ckpt_training.writing.stored_files import StoredFiles, upload


class UnpublishedSave(ABC):
    """A save as the coordinator sees it. Its constructor takes the right to write the target.

    Raises `OutputError` if the target exists, `LockedError` if another process writes it.
    """

    folder: str
    """Where ranks write their packs, for `write_pack`: a folder that all of them see, or the URL of the target."""
    save: str
    """What no other save has in common with this one."""

    @abstractmethod
    def publish(self, receipts: Sequence[PackReceipt], tags: Sequence[str], notes: CheckpointNotes) -> None:
        """Let the checkpoint appear, whole. Raises as `assemble`, and `OutputError`."""

    @abstractmethod
    def close(self) -> None:
        """Remove what was not published, and give up the right to write. May be called again."""


class UnpublishedFolder(UnpublishedSave):
    """A folder beside its target, which is renamed."""

    def __init__(self, target: Path) -> None:
        if os.path.lexists(target):
            raise OutputError("the target exists", where=target, hint="Choose another target for each save.")
        self.save = uuid.uuid4().hex
        self._target, self._stack = target, ExitStack()
        self._staging = staging_folder(target)
        self._data = self._staging / f"data-{self.save}"
        self.folder = str(self._data)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            make_staging(self._staging, target)
            os.close(os.open(self._staging / LOCK, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            self._stack.enter_context(hold(FolderPlace(self._staging), LOCK, target))
            self._stack.callback(remove_staging, self._staging)
            (self._data / "packs").mkdir(parents=True)
        except OSError as error:
            self._stack.close()
            raise OutputError(f"the folder cannot be made: {error.strerror}", where=target) from error

    def publish(self, receipts: Sequence[PackReceipt], tags: Sequence[str], notes: CheckpointNotes) -> None:
        assemble(self._data, receipts, notes)
        FolderPlace(self._staging, is_own=True).create(PUBLISHED, b"")
        try:
            rename_new(self._data, self._target)
        except FileExistsError:
            raise OutputError("the target exists", where=self._target) from None
        flush(self._target.parent)

    def close(self) -> None:
        self._stack.close()


class UnpublishedObjects(UnpublishedSave):
    """Objects at their names in the target, of which the manifest comes last."""

    def __init__(self, target: StorePath, ranks: int) -> None:
        self.save, self.folder = uuid.uuid4().hex, str(target)
        packs = [pack_file(number) for number in range(ranks)]
        self._files = StoredFiles(target, self.save, packs, "universal", "dcp.save")
        self._stack = ExitStack()
        self._stack.callback(self._files.close)
        self._stack.callback(self._files.remove)

    def publish(self, receipts: Sequence[PackReceipt], tags: Sequence[str], notes: CheckpointNotes) -> None:
        for receipt, tag in zip(receipts, tags, strict=True):
            self._files.note(Receipt(pack_file(receipt.number), receipt.nbytes, (), {}, e_tag=tag))
        assemble(self._files.workspace, receipts, notes, packs_elsewhere=True)
        self._files.publish()

    def close(self) -> None:
        self._stack.close()


def begin_save(target: Path, ranks: int) -> UnpublishedSave:
    """Begin a save of so many ranks. Raises `OutputError`, `LockedError`."""
    return UnpublishedObjects(target, ranks) if isinstance(target, StorePath) else UnpublishedFolder(target)


def write_pack(folder: str, write: Callable[[Path], PackReceipt]) -> tuple[PackReceipt, str]:
    """Let a rank write its pack below a folder, and put it where `UnpublishedSave.folder` says.

    Returns the receipt, and the e_tag of the object; empty in a file system.
    """
    target = target_path(folder)
    if not isinstance(target, StorePath):
        return write(target), ""
    with scratch_folder(None) as scratch:
        (scratch / "packs").mkdir()
        receipt = write(scratch)
        return receipt, upload(target, scratch, pack_file(receipt.number))
