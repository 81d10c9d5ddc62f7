"""A checkpoint in a store whose packs its ranks upload: objects appear one by one, and the manifest, at the end."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ckpt.pipeline import Execution
from ckpt.pipeline.bucket_target import BucketTarget, open_target
from ckpt.pipeline.job_note import JobNote
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores.location import place_at
from ckpt_formats.universal.boxes import CheckpointNotes, PackReceipt, assemble
from ckpt_formats.universal.manifest import Manifest, Parent, pack_file


class StoredPacks:
    """The checkpoint as the process of rank 0 begins and publishes it."""

    def __init__(self, target: StorePath, save: str, ranks: int, source: str) -> None:
        """Take the right to write the target, and note there which packs will come.

        Args:
            target: The checkpoint.
            save: What no other save has in common with this one.
            ranks: The number of packs.
            source: What is saved, for messages.

        Raises `OutputError` if the target exists, `LockedError` if another process writes it.
        """
        self._stack, self._is_published = ExitStack(), False
        self._staged: BucketTarget = self._stack.enter_context(open_target(target, Execution(workers=1), None))
        try:
            packs = [pack_file(number) for number in range(ranks)]
            self._staged.begin(JobNote.of(save, Path(source), target, "universal", packs, None))
        except BaseException:
            self._stack.close()
            raise

    def assemble(
        self, receipts: Sequence[PackReceipt], tags: Sequence[str], notes: CheckpointNotes, parent: Parent | None = None
    ) -> Manifest:
        """Write what makes a checkpoint of the packs, on this machine. `tags`: what `upload_pack` has returned.

        Raises as `assemble` of boxes.
        """
        for receipt, tag in zip(receipts, tags, strict=True):  # they are compared with the objects when it is published
            self._staged.note(Receipt(pack_file(receipt.number), receipt.pack.nbytes, (), {}, e_tag=tag))
        return assemble(self._staged.workspace, receipts, notes, parent, packs_elsewhere=True)

    def publish(self) -> None:
        """Put the index and, last, the manifest. Raises `OutputError` if a pack is not there as it was uploaded."""
        self._staged.publish((), lambda folder: None)
        self._is_published = True

    def remove(self) -> None:
        """Remove what is known of the save, and, unless it was published, its objects, as far as the store allows."""
        with suppress(OSError):
            self._staged.remove_notes() if self._is_published else self._staged.discard()

    def close(self) -> None:
        """Give up the right to write the target."""
        self._stack.close()


def upload_pack(target: Path, folder: Path, receipt: PackReceipt) -> str:
    """Put the pack of a rank, which is in `folder`, at its place in the checkpoint. Returns its e_tag.

    Raises `OSError`, and `FileExistsError` if there is one.
    """
    name = pack_file(receipt.number)
    return place_at(target).create_from(name, folder / name, lambda: None)
