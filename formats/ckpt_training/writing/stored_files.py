"""A checkpoint in a store whose files its ranks upload: objects appear one by one, those that make it one last."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ckpt.pipeline import Execution
from ckpt.pipeline.bucket_target import BucketTarget, open_target
from ckpt.pipeline.job_note import JobNote
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores.location import place_at


class StoredFiles:
    """The checkpoint as the process of rank 0 begins and publishes it."""

    def __init__(self, target: StorePath, save: str, files: Sequence[str], format: str, source: str) -> None:
        """Take the right to write the target, and note there which files will come.

        Args:
            target: The checkpoint.
            save: What no other save has in common with this one.
            files: The names of the files of all ranks.
            format: The name of the format.
            source: What is saved, for messages.

        Raises `OutputError` if the target exists, `LockedError` if another process writes it.
        """
        self._stack, self._is_published = ExitStack(), False
        self._staged: BucketTarget = self._stack.enter_context(open_target(target, Execution(workers=1), None))
        try:
            self._staged.begin(JobNote.of(save, Path(source), target, format, files, None))
        except BaseException:
            self._stack.close()
            raise

    @property
    def workspace(self) -> Path:
        """The folder on this machine for what makes a checkpoint of the files."""
        return self._staged.workspace

    def note(self, receipt: Receipt) -> None:
        """Note a file of a rank and what `upload` has returned: the object is compared with it when it is published."""
        self._staged.note(receipt)

    def publish(self) -> None:
        """Put the files of the workspace, marks of the format last.

        Raises `OutputError` if a file of a rank is not there as it was uploaded.
        """
        self._staged.publish((), lambda folder: None)
        self._is_published = True

    def remove(self) -> None:
        """Remove what is known of the save, and, unless it was published, its objects, as far as the store allows."""
        with suppress(OSError):
            self._staged.remove_notes() if self._is_published else self._staged.discard()

    def close(self) -> None:
        """Give up the right to write the target."""
        self._stack.close()


def upload(target: Path, folder: Path, file: str) -> str:
    """Put a file, which is in `folder`, at its place in the checkpoint. Returns its e_tag.

    Raises `OSError`, and `FileExistsError` if there is one.
    """
    return place_at(target).create_from(file, folder / file, lambda: None)
