"""The newest whole checkpoint of a run: what to name if the one that its folder means is damaged."""

from collections.abc import Callable
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError
from ckpt_formats.core.text import printable
from ckpt_formats.registry.location import checkpoints_in

_MAX_TRIED = 8


def newest_whole(run: Path, open_one: Callable[[Path], Checkpoint], damaged: Path | None = None) -> Path | None:
    """The newest checkpoint in the folder of a run whose headers are complete, other than `damaged`; None if there is
    none among the newest ones."""
    others = [path for path in checkpoints_in(run) if path != damaged]
    return next((path for path in others[: -_MAX_TRIED - 1 : -1] if _is_whole(path, open_one)), None)


def hint_newest_whole(run: Path, error: CkptError, open_one: Callable[[Path], Checkpoint]) -> None:
    """Add the newest whole checkpoint to the hint of an error about one of those in the folder of a run."""
    if not isinstance(error, (IncompleteError, CorruptError)) or error.where is None or not run.is_dir():
        return
    where = Path(error.where)
    damaged = next((path for path in checkpoints_in(run) if path == where or path in where.parents), None)
    if damaged is None or (whole := newest_whole(run, open_one, damaged)) is None:
        return
    hint = f"The newest whole checkpoint is {printable(whole.name)}: name {printable(str(whole))}"
    error.hint = hint if error.hint is None else f"{error.hint} {hint}"


def _is_whole(path: Path, open_one: Callable[[Path], Checkpoint]) -> bool:
    try:
        checkpoint = open_one(path)
        return not any(any(True for _ in tensor.problems()) for _, _, tensor in checkpoint.tensors())
    except CkptError:
        return False
