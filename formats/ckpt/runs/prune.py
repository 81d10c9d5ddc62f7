"""Remove the checkpoints of a run that no rule keeps.

Only folders and files named after a step are looked at, and of these only checkpoints. The newest whole one always
stays, and so does each that a file such as `latest` or a link names, each from which one that stays reads, each that
the parity of the whole run needs, and each that is newer than the newest whole one: a run may be writing it.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ckpt.pipeline.removal import finish_removals, is_removable, remove_checkpoint
from ckpt.runs.keep import SavedStep, kept_by, parse_keep
from ckpt.runs.new import State, modified_of, state_of
from ckpt_formats.core.arguments import Range, StrPath, checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, IncompleteError, InvalidArgumentError, NotFoundError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.folders import TRAINER_STATE, entries_of
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import printable
from ckpt_formats.parity.blocks import find_parity, has_parity
from ckpt_formats.registry.endings import ENDINGS
from ckpt_formats.registry.location import STEP, check_there, checkpoints_in
from ckpt_formats.registry.newest import open_whole, step_of
from ckpt_formats.registry.parents import all_named_by_pointers
from ckpt_formats.stores.location import listed_again, source_path

_CHAIN = "chain.json"
_DIGITS = re.compile(r"\d{1,15}")
_MAX_LINKS = 40
_MAX_STATE = 64 << 20
"""Bytes of a file of Trainer's state."""
UNCHANGED_FOR = 60.0
Seconds = Annotated[float, Range(0)]


@dataclass(frozen=True)
class PrunedCheckpoint:
    """A checkpoint of a run, and why it stays or goes."""

    path: Path
    step: int | None
    nbytes: int
    modified: float
    """When the last of its files was written, in seconds since 1970."""
    reason: str
    """Of one that stays: the rules that keep it, or what protects it. Of one that goes: what is wrong with it, or
    nothing."""


@dataclass(frozen=True)
class PruneResult:
    """What stayed of a run and what was removed, the newest first."""

    run: Path
    retained: tuple[PrunedCheckpoint, ...]
    removed: tuple[PrunedCheckpoint, ...]
    incomplete: tuple[PrunedCheckpoint, ...] = ()
    """Those that are not whole, and stay."""
    finished: tuple[str, ...] = ()
    """The names of those that an interrupted removal had left, and that are gone now."""

    __repr__ = short_repr


@checked
def prune(
    run: StrPath,
    keep: str,
    *,
    incomplete: bool = False,
    unchanged_for: Seconds = UNCHANGED_FOR,
    dry_run: bool = False,
    options: ReadOptions | None = None,
) -> PruneResult:
    """Remove the checkpoints in the folder of a run that no rule keeps.

    One is removed only if a newer one is whole: all its parts are there, and none of its files changed lately. The
    newest whole one always stays, also one that a file such as `latest` or a link names. Nothing else in the folder is
    touched. If this is killed, each checkpoint is whole, or a remainder that nothing reads and the next call removes.

    Args:
        run: The folder or the URL in which checkpoints are saved. A chain has `Chain.compact` instead.
        keep: Rules such as `last:3,daily:7,every:1000`: `last:N`; the newest of each of the last N hours, days, weeks,
            months or years (`hourly:N` to `yearly:N`, in UTC); steps that are multiples of N (`every:N`); `best`, which
            Hugging Face's Trainer names.
        incomplete: Also remove incomplete ones that are older than the newest whole one.
        unchanged_for: Seconds for which the files of a checkpoint must not have changed: a run may be writing it.
        dry_run: Remove nothing.
        options: How checkpoints are opened.

    Raises:
        NotFoundError: There is no checkpoint.
        IncompleteError: None is whole.
        OutputError: One cannot be removed.
    """
    return prune_stored(
        run,
        keep,
        incomplete=incomplete,
        unchanged_for=unchanged_for,
        dry_run=dry_run,
        options=options,
    )


def prune_stored(
    run: StrPath,
    keep: str,
    *,
    is_stored: Callable[[Path, int | None], bool] = lambda path, step: True,
    incomplete: bool = False,
    unchanged_for: float = UNCHANGED_FOR,
    dry_run: bool = False,
    options: ReadOptions | None = None,
) -> PruneResult:
    """As `prune`, but a checkpoint stays unless `is_stored`, by its path and step, says that it is elsewhere."""
    rules, folder = parse_keep(keep), source_path(run)
    if (folder / _CHAIN).is_file():
        raise InvalidArgumentError(
            "is a chain, which has a retention of its own",
            where=printable(str(folder)),
            hint=f"Use `ckpt compact {printable(str(folder))} --keep last:10`.",
        )
    finished = () if dry_run or not folder.is_dir() else tuple(finish_removals(folder))
    if finished:
        folder = source_path(str(folder)) if is_remote(folder) else folder
    steps = _steps(folder, options or ReadOptions())
    if not steps:
        check_there(folder)
        raise NotFoundError(
            "holds no checkpoint that is named after its step",
            where=printable(str(folder)),
            hint="Name the folder in which a run saves its checkpoints.",
        )
    now = time.time()
    whole = [one for one in steps if one.checkpoint is not None and now - one.modified >= unchanged_for]
    if not whole:
        raise IncompleteError(
            "no complete checkpoint has been unchanged for long enough, so none is removed",
            where=printable(str(folder)),
            hint=f"Run it again later: their files must not have changed for {unchanged_for:.0f} s (--unchanged-for).",
        )
    reasons, protected = _reasons(folder, rules, whole, steps), _names_in_parity(folder)
    retained, broken, removed = list[PrunedCheckpoint](), list[PrunedCheckpoint](), list[_Step]()
    newest = steps.index(whole[0])
    for number, one in enumerate(steps):
        reason = reasons.get(one.path)
        if reason is None and number < newest:
            reason = "newer than the newest complete one"
        if reason is None and now - one.modified < unchanged_for:
            reason = "changed a moment ago"
        if reason is None and one.path.name in protected:
            reason = "the parity of the run needs it"
        if reason is None and not one.problem and not is_stored(one.path, one.step):
            reason = "not stored elsewhere yet"
        if reason is None and not is_removable(one.path):
            reason = "its name is too long to be removed at once"
        if one.problem and (reason is not None or not incomplete):
            broken.append(one.described(one.problem))
        elif reason is not None:
            retained.append(one.described(reason))
        else:
            removed.append(one)
    if not dry_run:
        for old in reversed(removed.copy()):  # the oldest first: what a kill leaves is what a rule would keep
            if not is_remote(folder) and not os.path.lexists(whole[0].path):
                raise IncompleteError("the newest complete checkpoint has disappeared", where=str(whole[0].path))
            if old.is_unchanged():
                remove_checkpoint(old.path)
            else:
                removed.remove(old)
                retained.append(old.described("changed a moment ago"))
    order = {one.path: number for number, one in enumerate(steps)}
    retained.sort(key=lambda one: order[one.path])
    pruned = tuple(one.described(one.problem) for one in removed)
    return PruneResult(folder, tuple(retained), pruned, tuple(broken), finished)


def _names_in_parity(folder: Path) -> Set[str]:
    """The names in the folder of a run of which the parity of the whole run is computed, if there is any.

    Without one of them, the parity replaces less of the others, and a repair would bring it back.
    """
    try:
        names = find_parity(folder).manifest.lengths if has_parity(folder) else ()
    except CkptError:
        return frozenset()  # it repairs nothing
    return {name.partition("/")[0] for name in names}


@dataclass(frozen=True, eq=False)
class _Step:
    """A checkpoint in the folder of a run."""

    path: Path
    checkpoint: Checkpoint | None
    problem: str
    state: State

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.state)

    @property
    def modified(self) -> float:
        return modified_of(self.state)

    @property
    def step(self) -> int | None:
        return None if self.checkpoint is None else step_of(self.checkpoint)

    def is_unchanged(self) -> bool:
        """Whether no file was written since all were looked at, which may take long.

        Of a single object, stores state the time in whole seconds, where a list may have parts of them.
        """
        now = state_of(listed_again(self.path))
        if is_remote(self.path):
            return _in_seconds(now) == _in_seconds(self.state)
        return now == self.state

    def described(self, reason: str) -> PrunedCheckpoint:
        return PrunedCheckpoint(self.path, self.step, self.nbytes, self.modified, reason)


def _in_seconds(state: State) -> list[tuple[str, int, int]]:
    return [(name, nbytes, int(time)) for name, nbytes, time in state]


def _steps(folder: Path, options: ReadOptions) -> list[_Step]:
    """The checkpoints in a folder that are named after their steps, the newest first."""
    inside = [path for path in checkpoints_in(folder) if path.parent == folder and _is_named_after_step(path)]
    return [_step(path, options) for path in reversed(inside)]


def _is_named_after_step(path: Path) -> bool:
    name = path.stem if path.suffix.lower() in ENDINGS else path.name
    return STEP.fullmatch(name) is not None or _DIGITS.fullmatch(name) is not None


def _step(path: Path, options: ReadOptions) -> _Step:
    state = state_of(path)
    try:
        return _Step(path, open_whole(path, options), "", state)
    except CkptError as error:
        return _Step(path, None, error.what, state)


def _reasons(
    folder: Path, rules: Sequence[tuple[str, int]], whole: Sequence[_Step], steps: Sequence[_Step]
) -> Mapping[Path, str]:
    """Why checkpoints stay, by their paths."""
    saved = [SavedStep(one.path, one.step, one.modified) for one in whole]
    reasons = {whole[0].path: "the newest complete one", **kept_by(rules, saved, _best(whole))}
    for path in all_named_by_pointers(folder, [one.path for one in steps]):
        reasons.setdefault(path, "a file or a link names it")
    by_path = {one.path: one for one in steps}
    waiting = list(reasons)
    while waiting:  # what one needs may need another
        for path in _read_by(by_path[waiting.pop()], by_path.keys() - reasons.keys()):
            reasons[path] = "another one that stays reads from it"
            waiting.append(path)
    return reasons


def _read_by(one: _Step, others: "set[Path]") -> set[Path]:
    """The other checkpoints in which files lie that a checkpoint reads, itself or by a link."""
    files = {file.path for file in one.checkpoint.files} if one.checkpoint is not None else set[Path]()
    real = {other: other for other in others}
    if not is_remote(one.path):
        links = {file for file in one.path.rglob("*") if file.is_symlink()} if one.path.is_dir() else {one.path}
        files = {place for file in files | links for place in _on_the_way(file)}
        real = {other: Path(os.path.realpath(other)) for other in others}
    return {other for other in others if any({other, real[other]} & {file, *file.parents} for file in files)}


def _on_the_way(file: Path) -> Iterator[Path]:
    """Yield a path, and those to which links lead from it."""
    for _ in range(_MAX_LINKS):
        yield file
        if not file.is_symlink():
            break
        file = Path(os.path.normpath(file.parent / os.readlink(file)))
    yield Path(os.path.realpath(file))


def _best(whole: Sequence[_Step]) -> str | None:
    """The name of the checkpoint that Hugging Face's Trainer calls the best, by the newest of its states."""
    for one in whole:
        state = one.path / TRAINER_STATE
        if one.path.is_dir() and any(entry.name == TRAINER_STATE for entry in entries_of(one.path)):
            try:
                best = json.loads(read_whole(state, _MAX_STATE)).get("best_model_checkpoint")
            except (ValueError, AttributeError, RecursionError):
                return None
            return best.rstrip("/").rpartition("/")[2] if isinstance(best, str) else None
    return None
