"""What is checked of each checkpoint that is opened, in order: every command gives the same answer.

Refusals raise what makes a checkpoint unreadable. Then notices name what the user should know.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpt_formats.containers.file_starts import HEAD_NBYTES, STAND_IN, holds_tensors, is_file_inside
from ckpt_formats.containers.torchfile import check_repeated, written_size
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.claims import MAX_NAME, MAX_SMALL_JSON
from ckpt_formats.core.distinct import distinct, distinct_counts
from ckpt_formats.core.errors import CkptError, CorruptError, NotFoundError
from ckpt_formats.core.files import read_range, read_whole
from ckpt_formats.core.folders import names_in
from ckpt_formats.core.missing_states import check_states
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.state_table import TabulatedParameters
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.tensor import FileBlob, read
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.registry.endings import notices_of_content
from ckpt_formats.registry.location import Located
from ckpt_formats.registry.shard_alone import check_whole_of_meta, check_world, parts_unread
from ckpt_formats.registry.traces import check_traces
from ckpt_formats.registry.unread_files import unread
from ckpt_formats.state_dicts.files_inside import HOLDS_TENSORS, files_inside
from ckpt_formats.state_dicts.leaves import is_extra_state
from ckpt_formats.state_dicts.run_files import PREFIX

_MAX_FOLDERS = 16
"""How many folders of a checkpoint are searched for traces of another engine."""
_ROW_NBYTES = 13
"""What a parameter takes at least in an index of columns: each has a row, although many share their values."""
NO_JSON = "is not valid JSON, although its ending says so, and may be cut off; carried as bytes"

_MAX_STAND_IN = 1 << 10
"""Bytes: a pointer of Git LFS has at most these."""
_MAX_FILES = 10_000
_TENSOR_ENDINGS = (
    *(".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".th", ".npz", ".npy", ".h5", ".hdf5", ".keras", ".gguf"),
    *(".pdparams", ".joblib", ".msgpack", ".zip", ".tar"),
)
"""Endings for which it is worth a request to a store to look at a file's first bytes."""
_UNFINISHED = (
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
"""Endings of files beside others that are still downloaded or copied: of aria2, Firefox, rsync, WinSCP, Chrome,
huggingface_hub, Safari, Opera, qBittorrent."""
_MAX_DOWNLOAD_FOLDERS = 64
_STEP_IN_NAME = re.compile(
    r"(?:.*[._=-])?(?:global[_-]?)?(?:steps?|iter|iteration|checkpoint(?=-))[_=-]?0*(\d{1,15})(?:\D.*)?", re.IGNORECASE
)
"""`global_step20`, `step-20`, `iter_0000020`, `checkpoint-20`, `epoch=1-step=20.ckpt`; `checkpoint_3` of Accelerate is
the number of a save."""
_STEP_COUNT = "step"
_MAX_COUNTS = 64


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint as its format read it, and where it lies."""

    named: Path
    """The path that the user names."""
    located: Located
    checkpoint: Checkpoint

    @property
    def path(self) -> Path:
        """The file or folder of the checkpoint itself."""
        return self.located.path


def check(opened: OpenedCheckpoint) -> tuple[Notice, ...]:
    """The notices about a checkpoint: of how it was found, of its reader, and of all checks.

    Raises `CorruptError`, `IncompleteError`, `NotFoundError` or `UnsafeError` if it cannot be what was saved.
    """
    for refuse in _REFUSALS:
        refuse(opened)
    is_own = opened.located.format.is_own
    notices = [*opened.located.notices, *opened.checkpoint.notices]
    for look in () if is_own else _NOTICES:
        notices += look(opened)
    if opened.named.is_file():
        notices += (*notices_of_content(opened.named, opened.located.format.name), *parts_unread(opened.named))
    elif not is_own:
        listed = {name for notice in notices for name in notice.names}
        notices += unread(opened.named, (file.path for file in opened.checkpoint.files), listed)
    return tuple(notices)


def _has_tensors(opened: OpenedCheckpoint) -> None:
    if not opened.checkpoint.parameters and not opened.located.format.is_own:
        raise NotFoundError("has no tensor, so it is not a checkpoint", where=printable(str(opened.path)))


def _has_short_names(opened: OpenedCheckpoint) -> None:
    longest = max(map(len, opened.checkpoint.parameters), default=0)
    if longest > MAX_NAME:
        raise CorruptError(
            f"a tensor's name has {longest:,} characters; ckpt reads at most {MAX_NAME:,}",
            where=printable(str(opened.named)),
        )


def _is_of_one_engine(opened: OpenedCheckpoint) -> None:
    """Raise `IncompleteError` if files were read from a folder with traces of another engine."""
    folders = dict.fromkeys(file.path.parent for file in opened.checkpoint.files)
    for folder in [folder for folder in folders if folder != opened.path][:_MAX_FOLDERS]:
        if folder.is_relative_to(opened.path):
            check_traces(folder, set(names_in(folder)), opened.located.format.name)


def _is_of_all_ranks(opened: OpenedCheckpoint) -> None:
    check_whole_of_meta(opened.checkpoint)
    if not opened.located.format.joins_ranks:
        check_world(opened.checkpoint)


def _is_small_written_out(opened: OpenedCheckpoint) -> None:
    checkpoint = opened.checkpoint
    written = [
        checkpoint.extras,
        [group.options for group in checkpoint.groups],
        _values(checkpoint.parameters),
    ]
    check_repeated(written, printable(str(opened.named)), *_rows_and_repeats(checkpoint.parameters))


def _values(parameters: Mapping[str, Parameter]) -> Sequence[Mapping[str, Value]]:
    """The values of all parameters; those of a table once. Raises what a parameter raises that cannot be made."""
    if not isinstance(parameters, TabulatedParameters):
        return [parameter.values for parameter in parameters.values()]
    parameters.check()
    table = parameters.table
    return [table.values[number] for number in distinct(table.value).tolist()]


def _rows_and_repeats(parameters: Mapping[str, Parameter]) -> tuple[int, int]:
    """What a table of parameters takes in its file, at least, and what is written again of values that many have."""
    if not isinstance(parameters, TabulatedParameters):
        return 0, 0
    table = parameters.table
    numbers, counts = distinct_counts(table.value)
    repeats = zip(numbers.tolist(), counts.tolist(), strict=True)
    again = sum((count - 1) * written_size(table.values[number]) for number, count in repeats if count > 1)
    return _ROW_NBYTES * len(parameters), again


def _unread_content(opened: OpenedCheckpoint) -> Iterator[Notice]:
    """Notices that name what is carried as bytes, although it holds tensors or is not what it should be.

    A file next to a model, or the bytes of a file inside another one, may hold tensors, stand for a file that was never
    fetched, or be cut off. Nothing reads it, so it is named here.
    """
    checkpoint = opened.checkpoint
    inside = tuple(files_inside(_extra_values(checkpoint)))
    unread: list[str] = []
    no_json: list[str] = []
    stand_ins: dict[str, list[str]] = {}
    for name, blob, nbytes in _bytes_of_files(checkpoint):
        head = _head(blob, nbytes)
        if STAND_IN.match(head):
            from ckpt_formats.containers.contents import foreign_content  # few checkpoints have one

            if (content := foreign_content(head)) is not None:
                stand_ins.setdefault(content.what, []).append(name)
        elif holds_tensors(head) if _is_file(blob, nbytes) else is_file_inside(head):
            unread.append(name)
        elif _is_file(blob, nbytes) and blob.path.suffix == ".json" and _is_no_json(blob.path, nbytes):
            no_json.append(name)
    if inside or unread:
        yield Notice(HOLDS_TENSORS, (*inside, *unread), Weight.LOST)
    for what, names in stand_ins.items():
        yield Notice(what, tuple(names), Weight.LOST)
    if no_json:
        yield Notice(NO_JSON, tuple(no_json), Weight.UNSURE)


def _bytes_of_files(checkpoint: Checkpoint) -> Iterator[tuple[str, FileBlob, int]]:
    """The vectors of bytes among the extras, as (name, where they are, bytes)."""
    count = 0
    for name, parameter in checkpoint.parameters.items():
        if parameter.role != "extra" or count == _MAX_FILES or is_extra_state(name):
            continue
        tensor = parameter.weight
        if tensor.dtype != np.uint8 or len(tensor.shape) != 1 or len(tensor.fragments) != 1 or not tensor.nbytes:
            continue
        blob = tensor.fragments[0].blob
        if isinstance(blob, FileBlob) and blob.is_packed:
            count += 1
            yield name.removeprefix(PREFIX), blob, tensor.nbytes


def _head(blob: FileBlob, nbytes: int) -> bytes:
    """The first bytes; none if they are not worth a request to a store."""
    is_small = nbytes <= _MAX_STAND_IN
    if is_remote(blob.path) and not is_small and blob.path.suffix.lower() not in _TENSOR_ENDINGS:
        return b""
    try:
        return read_range(blob.path, blob.offset, min(nbytes, HEAD_NBYTES))
    except CkptError:
        return b""  # whoever reads the values reports it


def _is_file(blob: FileBlob, nbytes: int) -> bool:
    return blob.offset == 0 and blob.path.stat().st_size == nbytes


def _is_no_json(path: Path, nbytes: int) -> bool:
    if nbytes > MAX_SMALL_JSON:
        return False
    try:
        json.loads(read_whole(path, MAX_SMALL_JSON))
    except (ValueError, RecursionError):
        return True
    return False


def _extra_values(checkpoint: Checkpoint) -> Iterator[tuple[str, Value]]:
    """The extras, values of parameters and options of groups, with their places."""
    yield from checkpoint.extras.items()
    for name, parameter in checkpoint.parameters.items():
        if parameter.values:
            yield from ((f"{name}.{key}", value) for key, value in parameter.values.items())
    for number, group in enumerate(checkpoint.groups):
        yield from ((f"group {number}.{key}", value) for key, value in group.options.items())


def _downloads(opened: OpenedCheckpoint) -> Iterator[Notice]:
    """A notice that names files which were read, although a file beside them says that they are not complete."""
    read: dict[Path, set[str]] = {}
    for file in opened.checkpoint.files:
        read.setdefault(file.path.parent, set()).add(file.path.name)
    marks = [
        name
        for folder, names in list(read.items())[:_MAX_DOWNLOAD_FOLDERS]
        for name in names_in(folder)
        if name.endswith(_UNFINISHED) and name[: name.rindex(".")] in names
    ]
    if marks:
        text = "by a file beside it, a file that was read is still being downloaded, and may have holes"
        yield Notice(text, tuple(marks), Weight.UNSURE)


def _steps(opened: OpenedCheckpoint) -> Iterator[Notice]:
    """Notices if the name of the checkpoint, or its optimizer, states another step than its content."""
    path, checkpoint = opened.path, opened.checkpoint
    named, step = _step_in_name(path), checkpoint.origin.step
    if named is None or step is None:
        return
    name = printable(path.absolute().name)
    if named != step:
        text = f"the step is {step:,} by what was saved, but {named:,} by the name {name}"
        yield Notice(text, weight=Weight.UNSURE)
    elif checkpoint.origin.engine == "dcp" and (count := _optimizer_count(checkpoint)) not in (None, step):
        text = f"the step is {step:,} by the name {name}, but the optimizer counts {count:,} steps"
        yield Notice(text, weight=Weight.UNSURE)


def _step_in_name(path: Path) -> int | None:
    match = _STEP_IN_NAME.fullmatch(path.absolute().name)
    return None if match is None else int(match[1])


def _optimizer_count(checkpoint: Checkpoint) -> int | None:
    """The steps that the optimizer counts for the first parameter that has a count; None if it has none."""
    for parameter, _ in zip(checkpoint.parameters.values(), range(_MAX_COUNTS), strict=False):
        value = parameter.values.get(_STEP_COUNT)
        if isinstance(value, (int, float)):
            return int(value)
        tensor = parameter.states.get(_STEP_COUNT)
        if tensor is not None and tensor.shape == ():
            try:
                return int(read(tensor))
            except (CkptError, ValueError, OverflowError):
                return None
    return None


def _states(opened: OpenedCheckpoint) -> Iterator[Notice]:
    checkpoint, even = opened.checkpoint, opened.located.format.even_states
    return check_states(checkpoint.parameters, checkpoint.groups, opened.path, even=even)


_REFUSALS: tuple[Callable[[OpenedCheckpoint], None], ...] = (
    _has_tensors,
    _has_short_names,
    _is_of_one_engine,
    _is_of_all_ranks,
    _is_small_written_out,
)
_NOTICES: tuple[Callable[[OpenedCheckpoint], Iterable[Notice]], ...] = (_unread_content, _downloads, _steps, _states)
"""Of checkpoints of other formats: ckpt's own files were written from checked ones."""
