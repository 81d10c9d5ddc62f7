"""The checkpoints of a run, one after another as they become whole."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_formats.core.arguments import StrPath
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, IncompleteError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.registry.location import checkpoints_in
from ckpt_formats.registry.newest import open_whole, step_of
from ckpt_formats.registry.parents import number_in
from ckpt_formats.stores.location import listed_again, source_path

State = tuple[tuple[str, int, float], ...]
"""The files of a checkpoint with their sizes and times."""


def modified_of(state: State) -> float:
    """When the last of the files was written, in seconds since 1970; 0 without files."""
    return max((time for _, _, time in state), default=0.0)


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that is passed over, because it cannot be read or stored as it is now."""

    path: Path
    error: CkptError


@dataclass(eq=False)
class NewCheckpoints:
    """The checkpoints in the folder of a run: each once when it is whole, and again if its files change.

    One is whole when all its parts are there and no file changed between two looks. Of several they come in the order
    of their steps; while one is written that nobody has seen yet, those after it wait.
    """

    run: StrPath
    every: float
    """Seconds between two looks."""
    options: ReadOptions | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    """Ends the iteration when it is set."""
    incomplete: dict[Path, IncompleteError] = field(default_factory=dict)
    """Those that were not whole at the last look, though no file had changed."""
    _seen: dict[Path, State] = field(default_factory=dict)
    _done: dict[Path, State] = field(default_factory=dict)
    _initial: dict[Path, State] | None = None

    def __post_init__(self) -> None:
        self.folder = source_path(self.run)

    def __iter__(self) -> Iterator[Checkpoint | SkippedCheckpoint]:
        while not self.stop.is_set():
            for one in self.look():
                yield one
                if self.stop.is_set():
                    return
            self.stop.wait(self.every)

    def look(self) -> Iterator[Checkpoint | SkippedCheckpoint]:
        """Yield those that have become whole since the last look; one that is damaged, once."""
        self.folder = listed_again(self.folder)
        now = {one: state_of(one) for one in (checkpoints_in(self.folder) if self.folder.is_dir() else ())}
        if self._initial is None:
            self._initial = now
        seen, self._seen = self._seen, now
        unchanged = [one for one, state in now.items() if state == seen.get(one) and self._done.get(one) != state]
        growing = {number_in(one.name) for one in now if now[one] != seen.get(one) and one not in self._done}
        first = min((number for number in growing if number is not None), default=None)
        for one in self._in_order([one for one in unchanged if first is None or (number_in(one.name) or 0) <= first]):
            self._done[one.path] = now[one.path]
            yield one

    def was_there(self, path: Path) -> bool:
        """Whether a checkpoint is as it was at the first look."""
        return self._initial is not None and self._initial.get(path) == self._seen.get(path)

    def state(self, path: Path) -> State:
        """The files of a checkpoint as they were at the last look."""
        return self._seen.get(path, ())

    def has_later(self, path: Path) -> bool:
        """Whether one of a later step was whole."""
        own = number_in(path.name)
        return own is not None and any((number_in(one.name) or 0) > own for one in self._done)

    def is_of_run(self, error: CkptError) -> bool:
        """Whether an error is about a file of the run, which may have been removed or replaced meanwhile."""
        is_below = error.where is not None and error.where.startswith(str(self.folder))
        return is_below or not self.folder.is_dir()

    def _in_order(self, paths: list[Path]) -> list[Checkpoint | SkippedCheckpoint]:
        """The checkpoints at these paths, by their steps. Those that are incomplete are left out."""
        self.incomplete = {}
        opened = [one for path in paths if (one := self._opened(path)) is not None]
        return sorted(opened, key=lambda one: -1 if isinstance(one, SkippedCheckpoint) else step_of(one) or 0)

    def _opened(self, path: Path) -> Checkpoint | SkippedCheckpoint | None:
        try:
            return open_whole(path, self.options or ReadOptions())
        except IncompleteError as error:
            self.incomplete[path] = error
            return None
        except CkptError as error:
            return SkippedCheckpoint(path, error)


def state_of(path: Path) -> State:
    """The files of a checkpoint as they are now."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    states = list[tuple[str, int, float]]()
    for file in files:
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        states.append((file.relative_to(path).as_posix(), status.st_size, status.st_mtime))
    return tuple(states)
