"""The newest whole checkpoint in the folder of a run: opened one after another, the newest first, until one is whole.

A folder is listed, and only the newest of its checkpoints are opened: of a thousand, usually one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_formats.core.arguments import StrPath
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, NotFoundError
from ckpt_formats.core.folders import entries_of
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.header_problems import header_problems
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import printable
from ckpt_formats.registry.location import STEP, checkpoints_in, is_checkpoint
from ckpt_formats.registry.one_checkpoint import open_one
from ckpt_formats.registry.parents import number_in, places_in, sort_by_age
from ckpt_formats.stores.location import level_path, listed_again, source_path

_CHAIN = "chain.json"
Check = Callable[[Checkpoint], None]
"""Raises `CkptError` if a checkpoint whose headers are complete is not whole all the same."""


@dataclass(frozen=True, eq=False)
class NewestWhole:
    """The first checkpoint that is whole, and those before it."""

    checkpoint: Checkpoint | None = None
    """None if none is whole."""
    path: Path | None = None
    """Where it is, as the folder of the run has it."""
    step: int | None = None
    """As the checkpoint states, or as its name or its chain says."""
    passed_over: dict[Path, CkptError] = field(default_factory=dict)
    """Newer ones, each with what is wrong with it."""


def _accept(checkpoint: Checkpoint) -> None:
    pass


def open_whole(path: Path, options: ReadOptions) -> Checkpoint:
    """The index of a checkpoint whose headers are complete. Raises `CkptError` if they are not."""
    checkpoint = open_one(path, options)
    problem = next(header_problems(checkpoint), None)
    if problem is not None:
        kind = IncompleteError if problem.kind == "coverage" else CorruptError
        of_one = problem.kind == "coverage" and problem.tensors
        what = f"{printable(problem.tensors[0])}: {problem.what}" if of_one else problem.what
        raise kind(what, where=problem.where)
    return checkpoint


def first_whole(paths: Iterable[Path], options: ReadOptions, check: Check = _accept) -> NewestWhole:
    """The first checkpoint that is whole. None after it is opened."""
    passed_over: dict[Path, CkptError] = {}
    for path in paths:
        opened = _whole_or_error(path, options, check)
        if isinstance(opened, Checkpoint):
            return NewestWhole(opened, path, step_of(opened), passed_over)
        passed_over[path] = opened
    return NewestWhole(passed_over=passed_over)


def _whole_or_error(path: Path, options: ReadOptions, check: Check) -> Checkpoint | CkptError:
    try:
        checkpoint = open_whole(path, options)
        check(checkpoint)
        return checkpoint
    except CkptError as error:
        return error


def newest_whole(
    run: StrPath, options: ReadOptions | None = None, anonymous: bool = False, check: Check = _accept
) -> NewestWhole:
    """The newest whole checkpoint in the folder of a run, in the file system or in a store.

    Newer means a larger number in the name. A checkpoint without a number, such as `last.ckpt`, is the newest if it
    states a later step. Raises `NotFoundError` if there is no checkpoint, `IncompleteError` if none is whole.
    """
    options, folder = options or ReadOptions(), _folder_of(run, anonymous)
    if (folder / _CHAIN).is_file():
        return _last_of_chain(folder, options, check)
    places = _places(folder)
    newest_first = (place for place in reversed(places) if number_in(place.name) is not None)
    newest = first_whole(_checkpoints(newest_first), options, check)
    for path in _checkpoints(place for place in places if number_in(place.name) is None):
        other = first_whole([path], options, check)
        newest.passed_over.update(other.passed_over)
        if other.checkpoint is None:
            continue
        own = other.checkpoint.step
        if newest.checkpoint is None or (own is not None and (newest.step is None or own > newest.step)):
            newest = NewestWhole(other.checkpoint, path, own, newest.passed_over)
    if newest.checkpoint is not None:
        return newest
    if not newest.passed_over:
        hint = "Name the folder in which a run saves its checkpoints, not one of them."
        raise NotFoundError("holds no checkpoint", where=printable(str(run)), hint=hint)
    path, error = next(iter(newest.passed_over.items()))
    what = f"none of its checkpoints is complete; the newest is {printable(path.name)}: {error.what}"
    raise IncompleteError(what, where=printable(str(run)))


def step_of(checkpoint: Checkpoint) -> int | None:
    """The step that a checkpoint states, or the last number in its name; None if it has none."""
    return checkpoint.step if checkpoint.step is not None else number_in(checkpoint.path.name)


def _folder_of(run: StrPath, anonymous: bool) -> Path:
    """The folder of a run; of one in a bucket, only what is directly in it is listed."""
    folder = level_path(run, anonymous)
    if is_remote(folder) and not folder.is_dir():
        folder = source_path(run, anonymous)  # it says why nothing is seen
    if not folder.is_dir():
        what = "is a file, not the folder of a run" if folder.is_file() else "there is no such folder"
        hint = "Name the folder in which a run saves its checkpoints."
        raise NotFoundError(what, where=printable(str(folder)), hint=hint)
    return folder


def _last_of_chain(chain: Path, options: ReadOptions, check: Check) -> NewestWhole:
    """The last state of a chain, which is whole at every moment.

    The list of the chain has its step: the checkpoint may have been saved without one, or with another one.
    """
    from ckpt_formats.universal.chain import chain_file, states  # most runs are no chains
    from ckpt_formats.universal.chain.address import Address

    listed = listed_again(chain)
    step = states.step_of(chain_file.load(listed / _CHAIN), Address(listed, None))
    named = chain if chain.name else chain.absolute()
    path = named.parent / f"{named.name}@{step}"
    checkpoint = open_whole(listed_again(path), options)
    check(checkpoint)
    return NewestWhole(checkpoint, path, step)


def _places(folder: Path) -> list[Path]:
    """The places in the folder of a run at which checkpoints may be, the newest last.

    If names are those of steps, nothing below the folder is looked at, and of a bucket nothing below it is listed.
    """
    if any(STEP.fullmatch(entry.name) for entry in entries_of(folder)):
        return sort_by_age(places_in(folder))
    return checkpoints_in(listed_again(folder))


def _checkpoints(places: Iterable[Path]) -> Iterator[Path]:
    """Those places that are checkpoints, whole or not. Each in a store is listed when it is reached."""
    for place in map(listed_again, places):
        if is_checkpoint(place):
            yield place
