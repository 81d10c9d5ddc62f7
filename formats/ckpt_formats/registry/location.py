"""The checkpoint to which a path leads, and its format."""

import re
from pathlib import Path
from typing import NamedTuple

from ckpt_formats.core.checkpoint import Checkpoint, Opened
from ckpt_formats.core.errors import CkptError, IncompleteError, NotFoundError
from ckpt_formats.core.folders import names_in
from ckpt_formats.core.format import Format, ReadOptions
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import PARTIAL, printable
from ckpt_formats.registry import FORMATS, format_named
from ckpt_formats.registry.endings import ENDINGS
from ckpt_formats.registry.marks import PathMarks
from ckpt_formats.registry.parents import all_inside, find_inside, has_pointer, list_names, share_prefix, sort_by_age
from ckpt_formats.registry.traces import check_around, check_run, check_traces


class Located(NamedTuple):
    """A checkpoint, its format, and notices about how it was chosen."""

    path: Path
    format: Format
    notices: tuple[Notice, ...] = ()


def locate(path: Path) -> Located:
    """The checkpoint to which a path leads.

    Raises `NotFoundError`, `IncompleteError` or `UnsupportedError` if there is none.
    """
    if (state := _state_of_chain(path)) is not None:
        return state
    check_there(path)
    failure: CkptError | None = None
    try:
        format = _of_file(path) if path.is_file() else _of_folder(path)
        if format is not None:
            return Located(path, format, _notices_of_inner_checkpoints(path, format) if path.is_dir() else ())
    except CkptError as error:
        failure = error
    from ckpt_formats.registry.plugins import detected  # only what no format of ckpt knows needs it

    provided, notices = detected(path)
    if provided is not None:
        return Located(path, provided, notices)
    if failure is None and (path / _RLLIB).is_file() and (path / _POLICIES).is_dir():
        further = locate(path / _POLICIES)
        text = "RLlib's policies are read, not the state of the algorithm around them"
        return Located(further.path, further.format, (Notice(text, weight=Weight.LOST), *further.notices))
    inside = find_inside(path, is_checkpoint) if failure is None else None
    if inside is not None:
        chosen, notice = inside
        further = locate(chosen)
        return Located(further.path, further.format, (notice, *notices, *further.notices))
    failure = failure or _unknown(path)
    if notices:
        sentences = (failure.hint, *(f"{notice.text[0].upper()}{notice.text[1:]}." for notice in notices))
        failure.hint = " ".join(filter(None, sentences))
    raise failure


def _state_of_chain(path: Path) -> Located | None:
    """The state of a chain that a path such as `run.chain@1234` names; None for other paths."""
    if "@" not in path.name:
        return None
    from ckpt_formats.universal.chain.address import parse
    from ckpt_formats.universal.chain.format import ChainFormat

    address = parse(path)
    return None if address is None else Located(address.run, ChainFormat(address))


def checkpoints_in(path: Path) -> list[Path]:
    """All checkpoints directly in the folder of a run, the newest last; none if the path is itself a checkpoint."""
    if _state_of_chain(path) is not None or not path.is_dir():
        return []
    if _is_unfinished(path):
        return []  # `locate` says what it is
    try:
        format = _of_folder(path)
    except CkptError:
        return _steps_with_file(path)
    if format is not None and format.files_are_checkpoints:
        if files := _models_in(path, format):
            return sort_by_age([*files, *all_inside(path, is_checkpoint)])
        if inside := _inner_checkpoints(path, format):
            return [_stray_file(path, format) or path, *inside]
    if format is not None and format.name == "flax":
        from ckpt_formats.engines.flax import steps_in

        return steps_in(path)
    if format is not None and format.name not in ("dcp", "orbax") and not has_pointer(path):
        return []
    if format is not None and format.name == "orbax":
        from ckpt_formats.engines.orbax.folder import is_run

        return all_inside(path, is_checkpoint) if is_run(path) else []
    inside = all_inside(path, is_checkpoint)
    if format is not None and format.name == "dcp":
        from ckpt_formats.engines.dcp.folder import rank_folders

        if not share_prefix(inside) or rank_folders(path):  # a pair of folders is one, and so are those of ranks
            return []
    return inside


def _steps_with_file(path: Path) -> list[Path]:
    """The steps of a run whose pointer is missing or damaged, and a file of weights beside them; else none."""
    steps = [one for one in all_inside(path, is_checkpoint) if STEP.fullmatch(one.name)]
    format = _first(path) if steps else None
    if format is None or not format.files_are_checkpoints:
        return []
    return [*filter(None, [_stray_file(path, format)]), *steps]


_RLLIB, _POLICIES = "rllib_checkpoint.json", "policies"
"""In the folder of an algorithm of Ray's RLlib: its mark, and the folder with one folder for each policy."""
STEP = re.compile(
    r"(?:.*[._-])?(?:global[_-]?)?(?:steps?|iter|iteration|checkpoint|ckpt|epoch)[_=-]?\d+", re.IGNORECASE
)
"""The names that trainers give to the folder of a step."""
_MODEL = re.compile(
    r"(model|adapter_model|diffusion_pytorch_model|pytorch_model|consolidated|state_dict|model_state(_dict)?|weights"
    r"|checkpoint|module)([._-].*)?\.\w+",
    re.IGNORECASE,
)
"""The names of files that libraries give to the model of a folder."""
_INDEX = re.compile(r".*\.index\..*json")
_SHARD = re.compile(r"-\d+-of-\d+\.")
"""In the name of a file that is a part of a model."""


def _notices_of_inner_checkpoints(path: Path, format: Format) -> tuple[Notice, ...]:
    """A notice if a model lies in a folder beside checkpoints that are not read with it.

    Raises `NotFoundError` if the model is a single file whose name does not say that it is the one that is meant.
    """
    inside = _inner_checkpoints(path, format)
    if not inside:
        return ()
    stray = _stray_file(path, format)
    if stray is not None:
        raise NotFoundError(
            f"holds the file {printable(stray.name)} and {len(inside)} checkpoints: {list_names(inside)}",
            where=printable(str(path)),
            hint="Name one of them; `ckpt inspect` lists them all.",
        )
    text = "the model in the folder itself is read, not the checkpoints in it"
    return (Notice(text, tuple(f"{one.name}/" for one in inside), Weight.UNSURE),)


def _inner_checkpoints(path: Path, format: Format) -> list[Path]:
    """The checkpoints in a folder that has a model, too. Parts of that model are none of them."""
    if not format.files_are_checkpoints:
        return []
    inside = all_inside(path, is_checkpoint)
    if _stray_file(path, format) is not None:
        return inside
    return [one for one in inside if STEP.fullmatch(one.name)]


def _stray_file(path: Path, format: Format) -> Path | None:
    """The only file of weights in a folder, if nothing says that it is the folder's model; else None."""
    if format.name == "hf":
        return None
    files = [name for name in names_in(path) if Path(name).suffix.lower() in ENDINGS]
    alone = len(files) == 1 and not _MODEL.fullmatch(files[0]) and not any(map(_INDEX.fullmatch, names_in(path)))
    return path / files[0] if alone else None


def _models_in(path: Path, format: Format) -> list[Path]:
    """The single files in a folder, if each is a checkpoint of its own; else none."""
    names = [name for name in names_in(path) if Path(name).suffix.lower() in ENDINGS]
    files = [path / name for name in names]
    if len(files) > 1 and not any(map(_SHARD.search, names)):
        try:
            format.read(path, ReadOptions())
        except NotFoundError:  # no file states which is meant
            return files
        except CkptError:
            pass
    return []


def detect(path: Path) -> Format:
    """The format of the checkpoint at this path, or in it.

    Raises `NotFoundError`, `IncompleteError` or `UnsupportedError`.
    """
    return locate(path).format


def format_name(checkpoint: Checkpoint) -> str:
    """The name of the format at the checkpoint's path; `shadow` if it was not opened from files."""
    is_opened = any(isinstance(edit, Opened) for edit in checkpoint.history)
    return detect(checkpoint.path).name if is_opened else "shadow"


def _of_file(path: Path) -> Format:
    from ckpt_formats.registry.foreign import check_file  # no folder of a known format needs it

    check_file(path)
    format = _first(path)
    if format is None:
        raise _not_known(path, "")
    return format


def _of_folder(path: Path) -> Format | None:
    """The format of a folder; None if it has none. Raises `IncompleteError` if it is the rest of another checkpoint."""
    format, names = _first(path), set(names_in(path))
    if format is not None and format.name == "torch-folder" and {_RLLIB, _POLICIES} <= names:
        return None  # the pickle here is the state of the algorithm
    check_traces(path, names, None if format is None else format.name)
    if format is not None:
        check_around(path, names, format.name)
    return format


def _first(path: Path) -> Format | None:
    """The first format, in the order of the registry, that detects a path."""
    at = PathMarks(path)
    candidates = (format_named(name) for name, listed in FORMATS.items() if at.has_any(listed.marks))
    return next((format for format in candidates if format.detect(path)), None)


def is_checkpoint(path: Path) -> bool:
    """Whether this folder or single file is a checkpoint, complete or not."""
    try:
        return not path.name.endswith(PARTIAL) and (path.is_file() or _of_folder(path) is not None)
    except CkptError:
        return True


def check_there(path: Path) -> None:
    """Raise `NotFoundError`, with what may have been meant, if there is nothing, or what is not finished."""
    try:
        path.stat()
    except CkptError:
        raise
    except FileNotFoundError:
        raise NotFoundError("there is nothing at this path", where=printable(str(path)), hint=_meant(path)) from None
    except OSError as error:
        raise NotFoundError(f"cannot be read: {error.strerror}", where=printable(str(path))) from error
    if any(part.endswith(PARTIAL) for part in path.absolute().parts):
        raise NotFoundError(
            "not a checkpoint, but the unfinished output of an interrupted run",
            where=printable(str(path)),
            hint="Run the same command again to continue, or remove the folder.",
        )
    if _is_unfinished(path):
        raise IncompleteError(
            "not complete: a job is writing here, or was interrupted",
            where=printable(str(path)),
            hint=f"Run the same command again to continue, or remove what it wrote: ckpt clean {path}",
        )


def _is_unfinished(path: Path) -> bool:
    """Whether a job has not published what is at a path. In a file system, nothing is visible before."""
    if not is_remote(path):
        return False
    from ckpt_formats.registry.published import is_unfinished

    return is_unfinished(path)


def _unknown(path: Path) -> CkptError:
    """The error for a folder that no format recognises, which depends on its files."""
    from ckpt_formats.registry.foreign import check_folder

    names = names_in(path)
    try:
        check_run(path, names)
        check_folder(path, names)
    except CkptError as error:
        return error
    return _not_known(path, _listing(path))


def _not_known(path: Path, listing: str) -> NotFoundError:
    return NotFoundError(
        f"not a checkpoint of a known format{listing}",
        where=printable(str(path)),
        hint=f"{_FOLDER if path.is_dir() else ''}`ckpt formats` lists what is read.",
    )


_NAME_ON_HUB = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/)?([A-Za-z0-9][\w-]*(?:[.-][\w-]+)*)")
_FOLDER = "Name the folder that the engine wrote: that of one step, or its parent, which holds `latest`. "


def _meant(path: Path) -> str | None:
    """What may have been meant by a path at which there is nothing; None if there is no idea."""
    run, mark, _ = path.name.rpartition("@")
    if mark and run and path.with_name(run).exists():
        if (path.with_name(run) / "chain.json").is_file():
            return f"A state of a chain is {printable(run)}@1234, {printable(run)}@last or {printable(run)}@last~10."
        return f"`@` names a state of a chain, and {printable(run)} is not a chain."
    if path.is_symlink():
        return f"It is a link to {printable(str(path.readlink()))}, which is not there."
    if not path.parent.is_dir():
        return f"The folder {printable(str(path.parent))} is not there either.{_on_hub(path)}"
    from difflib import get_close_matches  # only a mistyped name needs it

    close = get_close_matches(path.name, names_in(path.parent), n=3)
    if close:
        return f"Did you mean {' or '.join(map(printable, close))}?"
    return None if path.is_absolute() else f"ckpt looked in {printable(str(Path.cwd()))}.{_on_hub(path)}"


def _on_hub(path: Path) -> str:
    """How a model of the Hugging Face Hub is written, if a path looks like the name of one; else nothing."""
    match = _NAME_ON_HUB.fullmatch(str(path))
    return (
        ""
        if match is None
        else f" If it is a model of the Hugging Face Hub, write hf://{match[1] or 'ORG/'}{match[2]}."
    )


def _listing(path: Path) -> str:
    try:
        names = sorted(printable(entry.name) for entry in path.iterdir())
    except OSError as error:
        return f"; it cannot be listed: {error.strerror}"
    return f"; it holds {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else "; it is empty"
