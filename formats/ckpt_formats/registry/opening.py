"""The index of the checkpoint at a path; an error about a broken step of a run names the newest whole one."""

from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.gc_pause import gc_paused
from ckpt_formats.core.text import printable
from ckpt_formats.registry.location import checkpoints_in
from ckpt_formats.registry.one_checkpoint import open_one

_MAX_TRIED = 8
"""How many of the newest checkpoints of a run are opened to find one that is whole."""


@gc_paused()
def open_checkpoint(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """The index of the checkpoint at a path, of any format. Reads headers only.

    Its notices name files in its folder that are not read. Raises subclasses of `CkptError`; if the path is the folder
    of a run, the hint names its newest whole checkpoint.
    """
    options = options or ReadOptions()
    try:
        return open_one(path, options)
    except CkptError as error:
        _hint_newest_whole(path, error, options)
        raise


def _hint_newest_whole(run: Path, error: CkptError, options: ReadOptions) -> None:
    """Add the newest whole checkpoint to the hint of an error about one of those in the folder of a run."""
    if not isinstance(error, (IncompleteError, CorruptError)) or error.where is None or not run.is_dir():
        return
    where, paths = Path(error.where), checkpoints_in(run)
    damaged = next((path for path in paths if path == where or path in where.parents), None)
    if damaged is None:
        return
    from ckpt_formats.registry.newest import first_whole  # only a run with a broken step needs it

    newest_first = [path for path in paths if path != damaged][: -_MAX_TRIED - 1 : -1]
    whole = first_whole(newest_first, options).checkpoint
    if whole is not None:
        hint = f"The newest complete checkpoint is {printable(whole.path.name)}: name {printable(str(whole.path))}"
        error.hint = hint if error.hint is None else f"{error.hint} {hint}"
