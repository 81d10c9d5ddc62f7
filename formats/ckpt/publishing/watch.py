"""Publish each checkpoint of a run once it is complete, without code in the trainer."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ckpt.job import AnyProgress
from ckpt.pipeline import Resources
from ckpt.publishing.publication import last_step
from ckpt.publishing.publish import PublishedCheckpoint, publish
from ckpt.publishing.retention import KeepSteps
from ckpt.publishing.source import Names
from ckpt_formats.core.arguments import LocalPath, Range, StrPath, checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, NotFoundError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.registry.location import checkpoints_in
from ckpt_formats.registry.newest import step_of
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.stores.location import listed_again, source_path, target_path

Seconds = Annotated[float, Range(0, above=True)]
State = tuple[tuple[str, int, float], ...]
"""The files of a checkpoint with their sizes and times."""


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that is not published, because it cannot be read as it is now."""

    path: Path
    error: CkptError


@checked
def publish_each(
    run: StrPath,
    chain: StrPath,
    *,
    names: Names = "hf",
    dtype: str | None = None,
    config: LocalPath | None = None,
    keep: KeepSteps | None = None,
    signing_key: bytes | None = None,
    every: Seconds = 5.0,
    options: ReadOptions | None = None,
    resources: Resources | None = None,
    locks: bool = True,
    stop: threading.Event | None = None,
    progress: AnyProgress | None = None,
) -> Iterator[PublishedCheckpoint | SkippedCheckpoint]:
    """Publish each checkpoint that becomes complete in the folder of a run, in the order of their steps, until `stop`.

    A checkpoint is complete when all its parts are there, and none of its files changed for `every` seconds. Those that
    are not after the chain's last step when this begins are taken as published; one that appears later begins a new
    epoch if its step is not after the last one. If a checkpoint does not state its step, the last number in the name of
    its folder is the step.

    Args:
        run: The folder or the URL in which checkpoints appear.
        chain: As in `publish`, and so are `names`, `dtype`, `config`, `keep`, `signing_key`, `resources`, `locks` and
            `progress`.
        every: Seconds between two looks.
        options: How checkpoints are opened.
        stop: Ends the iteration when it is set.

    Yields:
        What was published; or a checkpoint that is damaged, once, which is then tried again if it changes.

    Raises:
        CkptError: As `publish`, but not for a checkpoint that is damaged.
    """
    stopped = stop or threading.Event()
    path, last = source_path(run), last_step(target_path(chain), signing_key)
    least = None if last is None else last.head.record.name.step
    seen, done, before = dict[Path, State](), dict[Path, State](), None
    initial: dict[Path, State] | None = None
    while not stopped.is_set():
        path = listed_again(path)
        now = {one: _state_of(one) for one in (checkpoints_in(path) if path.is_dir() else ())}
        initial = now if initial is None else initial
        complete = [one for one, state in now.items() if state == seen.get(one) and done.get(one) != state]
        for checkpoint in _in_order(complete, options):
            where = checkpoint.path
            if isinstance(checkpoint, SkippedCheckpoint):
                done[where] = now[where]
                yield checkpoint
                continue
            step = step_of(checkpoint)
            done[where] = now[where]
            is_old = least is not None and step is not None and step <= least
            if is_old and initial.get(where) == now[where]:
                continue
            try:
                result = publish(
                    checkpoint,
                    chain,
                    step=step,
                    names=names,
                    dtype=dtype,
                    config=config,
                    before=before,
                    keep=keep,
                    signing_key=signing_key,
                    resources=resources,
                    locks=locks,
                    progress=progress,
                )
            except (CorruptError, IncompleteError, NotFoundError) as error:
                if path.is_dir() and not _is_below(error, path):
                    raise
                yield SkippedCheckpoint(where, error)
                continue
            before = checkpoint
            yield result
            if stopped.is_set():
                return
        seen = now
        stopped.wait(every)


def _in_order(paths: list[Path], options: ReadOptions | None) -> list[Checkpoint | SkippedCheckpoint]:
    """The checkpoints at these paths, by their steps. Those that are incomplete are left out: they may become whole."""
    opened = [one for path in paths if (one := _opened(path, options)) is not None]
    return sorted(opened, key=lambda one: -1 if isinstance(one, SkippedCheckpoint) else step_of(one) or 0)


def _opened(path: Path, options: ReadOptions | None) -> Checkpoint | SkippedCheckpoint | None:
    try:
        return open_checkpoint(path, options)
    except IncompleteError:
        return None
    except CkptError as error:
        return SkippedCheckpoint(path, error)


def _state_of(path: Path) -> State:
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    states = list[tuple[str, int, float]]()
    for file in files:
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        states.append((file.relative_to(path).as_posix(), status.st_size, status.st_mtime))
    return tuple(states)


def _is_below(error: CkptError, folder: Path) -> bool:
    return error.where is not None and error.where.startswith(str(folder))
