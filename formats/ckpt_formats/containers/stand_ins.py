"""What is sometimes found in the place of a file: a page of HTML, a pointer of Git LFS, an answer of a server."""

from pathlib import Path

from ckpt_formats.core.errors import CorruptError

_STAND_INS = (
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself", "Fetch the file: git lfs pull"),
    (b"<!doctype html", "a page of HTML, not the file itself", "Download the file again, and look at the address."),
    (b"<html", "a page of HTML, not the file itself", "Download the file again, and look at the address."),
    (b"<?xml", "an answer in XML, as stores give, not the file itself", "Download the file again."),
)


def check_stand_in(head: bytes, path: Path) -> None:
    """Raise `CorruptError` if a file begins as something that stands in the place of another file. `head`: 32 bytes."""
    start = head.lstrip()[:32].lower()
    for mark, what, hint in _STAND_INS:
        if start.startswith(mark):
            raise CorruptError(f"is {what}", where=path, hint=hint)
