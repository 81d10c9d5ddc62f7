"""Show what was removed of an unfinished target."""

from ckpt.pipeline.targets import Removed
from ckpt_cli import notes
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.text import format_nbytes, printable


def show_removed(target: str, removed: Removed, as_json: bool) -> None:
    """Print what was removed."""
    if removed.uploads is None:
        notes.note(
            Notice(
                "parts of uploads that were not completed may be left in the store. ckpt can remove those of S3, with "
                "boto3 installed; a lifecycle rule of the bucket removes them everywhere"
            )
        )
    if as_json:
        data({"target": target, "files": removed.files, "nbytes": removed.nbytes, "uploads": removed.uploads})
    elif removed.files or removed.uploads:
        uploads = f" and {removed.uploads} uploads" if removed.uploads else ""
        conclude(f"removed {removed.files} files{uploads}, {format_nbytes(removed.nbytes)}: {printable(target)}")
    else:
        conclude(f"there is nothing to remove: {printable(target)}")
