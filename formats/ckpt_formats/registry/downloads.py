"""Files beside others that say: the other one is still being downloaded or copied."""

from collections.abc import Iterator
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.folders import names_in
from ckpt_formats.core.notices import Notice, Weight

_ENDINGS = (
    ".aria2",
    ".part",
    ".partial",
    ".crdownload",
    ".incomplete",
    ".download",
    ".opdownload",
    ".!qB",
    ".filepart",
)
"""Of aria2, Firefox, rsync, WinSCP, Chrome, huggingface_hub, Safari, Opera, qBittorrent."""
_MAX_FOLDERS = 64


def unfinished_downloads(checkpoint: Checkpoint) -> Iterator[Notice]:
    """A notice that names files which were read, although a file beside them says that they are not complete."""
    read: dict[Path, set[str]] = {}
    for file in checkpoint.files:
        read.setdefault(file.path.parent, set()).add(file.path.name)
    marks = [
        name
        for folder, names in list(read.items())[:_MAX_FOLDERS]
        for name in names_in(folder)
        if name.endswith(_ENDINGS) and name[: name.rindex(".")] in names
    ]
    if marks:
        text = "by a file beside it, a file that was read is still being downloaded, and may have holes"
        yield Notice(text, tuple(marks), Weight.UNSURE)
