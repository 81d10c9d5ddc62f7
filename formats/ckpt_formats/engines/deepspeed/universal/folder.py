"""List the files of a universal folder. Only names are read; no file is opened."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_formats.core.errors import CkptError, IncompleteError
from ckpt_formats.core.files import unreadable
from ckpt_formats.core.folders import entries_of
from ckpt_formats.engines.deepspeed.folder import Folder, check_models, sort_files

LATEST = "latest_universal"
OPTIMIZER = "zero/optimizer_state.pt"
DIMENSIONS = "checkpoint_parallel_dimensions"
"""Key in the model's files: the parallel degrees of the run."""


@dataclass(frozen=True)
class UniversalFolder:
    """The files of one step."""

    path: Path
    models: Folder
    """Copies of the model files of the run."""
    spare: tuple[Path, ...]
    """Model files for a load at stage 3, next to those of an earlier stage, which contain the same and more."""
    optimizer: Path
    states: Mapping[str, Mapping[str, Path]]
    """Files by parameter and by the stored name of the state."""


def is_universal(path: Path) -> bool:
    """Is this the folder of one universal checkpoint?"""
    try:
        return (path / OPTIMIZER).is_file()
    except OSError:
        return False


def has_latest(path: Path) -> bool:
    """Does this folder contain universal checkpoints? Not if it also has the run's own: those are read instead."""
    try:
        return (path / LATEST).is_file() and not (path / "latest").exists()
    except OSError:
        return False


def list_universal(path: Path) -> UniversalFolder:
    """The files of a universal folder. Raises `IncompleteError` if model files of some or all ranks are missing."""
    listed = sort_files(path)
    if not listed.model and not listed.model3:
        raise IncompleteError(
            "the model files (*_model_states.pt), which list the groups of parameters, are missing",
            where=path,
            hint="DeepSpeed's converter copies them last: convert again." if (path / "tmp").is_dir() else _COPY,
        )
    spare = tuple(listed.model3.values()) if listed.model else ()
    models = replace(listed, model3={}, optim={}) if listed.model else replace(listed, optim={})
    check_models(models)
    return UniversalFolder(path, models, spare, path / OPTIMIZER, _states(path / "zero"))


_COPY = "Copy them from the checkpoint that was converted."


def _states(zero: Path) -> dict[str, dict[str, Path]]:
    """The files by parameter and state. Folders may be nested: names may contain slashes. Links are not followed."""
    states: dict[str, dict[str, Path]] = {}
    pending = [zero]
    while pending:
        folder = pending.pop()
        try:
            entries = sorted(entries_of(folder), key=lambda entry: entry.name)
            inner = [folder / entry.name for entry in entries if entry.is_dir() and not entry.is_symlink()]
            names = [entry.name for entry in entries if entry.name.endswith(".pt") and not entry.is_dir()]
        except CkptError:
            raise
        except OSError as error:
            raise unreadable(error, zero) from error
        pending += reversed(inner)
        if names and folder != zero:
            name = folder.relative_to(zero).as_posix()
            states[name] = {file.removesuffix(".pt"): folder / file for file in names}
    return states
