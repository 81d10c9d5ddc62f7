"""A copy of a chain in a store that is brought to what the chain is now, again and again while a run goes on.

What is new is put first, then the list, and what the list does not name any more is removed. So at any moment the copy
is a chain that there was. Members are objects as their files are. A log that grows is put in parts: what is new of it
since the last time, up to its last complete record.
"""

import os
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from ckpt.chains.change import ChainChange, change
from ckpt.pipeline import Execution, Resources
from ckpt_formats.core.arguments import StrPath, checked
from ckpt_formats.core.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    OutputError,
)
from ckpt_formats.core.files import Reader, write_all
from ckpt_formats.core.folders import below
from ckpt_formats.core.identity import Identity
from ckpt_formats.core.place import ObjectEntry
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.registry.listed import is_mark
from ckpt_formats.stores.bucket import part_nbytes
from ckpt_formats.stores.e_tags import RunningTag
from ckpt_formats.stores.joined import part_name, parts_of
from ckpt_formats.stores.listed_store import StoredObject
from ckpt_formats.stores.location import listed_again, source_path, target_path
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps
from ckpt_formats.universal.chain.folder import is_growing
from ckpt_formats.universal.chain.states import open_steps

PART_NBYTES = 64 << 20
"""Bytes of a log in one object, at most."""
_BLOCK = 1 << 20
_PARTS_AT_ONCE = 8
_HINT = "Choose another target, or remove it first."
_HINT_OF_CUT = (
    "If the chain was cut back and has gone on since, cut the copy back, too, and run this again: "
    "`ckpt compact {} --upto {}`. Otherwise choose another target."
)


@dataclass(frozen=True)
class CopyUpdate:
    """What was new of a chain, and is in its copy now."""

    objects: int
    nbytes: int
    last: int | None
    """The last step of the chain, as far as it was looked at."""
    grows: bool
    """Whether a run records into the chain."""


@checked
def update_copy(
    source: StrPath,
    target: StrPath,
    *,
    resources: Resources | None = None,
    locks: bool = True,
    read_back: bool = False,
) -> CopyUpdate:
    """Bring a copy of a chain, which is in a store, to what the chain is now. There need not be one yet.

    Raises:
        NotFoundError: There is no chain at `source`.
        LockedError: Another process changes the copy.
        OutputError: At `target` is another chain, or something else.
        InvalidArgumentError: `target` is not in a store.
    """
    with _copy_of(target, Execution.of(resources, locks=locks, read_back=read_back)) as copy:
        return copy.bring(source_path(source))


@checked
def follow_copy(
    source: StrPath,
    target: StrPath,
    *,
    every: float = 30.0,
    stop: threading.Event | None = None,
    resources: Resources | None = None,
    locks: bool = True,
    read_back: bool = False,
    on_update: Callable[[CopyUpdate], None] = lambda brought: None,
) -> None:
    """Do so each `every` seconds, until the run has ended that records into the chain, or `stop` is set.

    No other process can change the copy meanwhile. Raises as `update_copy`.
    """
    path, stop, grew = source_path(source), stop or threading.Event(), False
    with _copy_of(target, Execution.of(resources, locks=locks, read_back=read_back)) as copy:
        while True:
            brought = copy.bring(listed_again(path))
            on_update(brought)
            if (grew and not brought.grows) or stop.wait(every):
                return
            grew |= brought.grows


@dataclass
class _ChainCopy:
    """The copy of a chain, which this process alone changes."""

    change: ChainChange
    done: dict[str, Identity | None] = field(default_factory=dict)
    """The objects that this process has put or compared, by name: each with the file that it is of, or None if it is a
    part of a log, which only grows."""

    def bring(self, run: Path) -> CopyUpdate:
        """Put what is new. If the chain is changed meanwhile so that files are gone, it is read again."""
        while True:
            chain = chain_file.read(run)
            try:
                return self._bring(run, chain)
            except (NotFoundError, IncompleteError, FileNotFoundError):
                run = listed_again(run)
                if chain_file.read(run) == chain:
                    raise

    def _bring(self, run: Path, chain: ChainIndex) -> CopyUpdate:
        self._check_same(chain)
        growing = [one for one in chain.segments if is_growing(run / one.folder)]
        there = dict(self.change.place.list())
        before = set(there)
        last = chain.members[-1].step if chain.members else None
        for name in sorted(_folders(chain)):
            files = [path for _, path in below(run / name)]
            for path in sorted(files, key=lambda path: (is_mark(path.name), path.name)):
                self._put_file(run, path, there)
        segments = list[LoggedSteps]()
        for one in chain.segments:
            try:
                end = self._put_segment(run, one, there)
            except (IncompleteError, CorruptError):
                if one not in growing or one.folder in self._listed_segments:
                    raise
                end = None
            if end is None:
                continue  # it has just started: a rank has written nothing yet
            segments.append(one)
            last = end if last is None else max(last, end)
        # The path that is noted is relative to the other chain.
        listed = replace(chain, segments=tuple(segments), appended_from=None)
        if listed != self.change.chain and (listed.members or listed.segments):
            self.change.replace(listed)
            self.change.chain = listed
            self.change.look()
            self.change.remove_unneeded(self.change.leftovers(listed))
        new = [there[key].nbytes for key in there.keys() - before]
        return CopyUpdate(len(new), sum(new), last, bool(growing))

    @property
    def _listed_segments(self) -> set[str]:
        return set() if self.change.chain is None else {one.folder for one in self.change.chain.segments}

    def _check_same(self, chain: ChainIndex) -> None:
        """Raise `OutputError` if the copy is one of another chain."""
        copied = self.change.chain
        if copied is None:
            return
        contents, there = _contents(chain), _contents(copied)
        common = there.keys() & contents.keys()
        others = {name for name in common if there[name] != contents[name]}
        if not common or others == common:
            raise OutputError("there is another chain", where=self.change.run, hint=_HINT)
        if others:
            step = _last_common(copied, common - others, others)
            hint = _HINT if step is None else _HINT_OF_CUT.format(printable(str(self.change.run)), step)
            what = f"its {list_names(sorted(others), str, 1)} differs from that of the chain"
            raise OutputError(what, where=self.change.run, hint=hint)

    def _put_segment(self, run: Path, logged: LoggedSteps, there: dict[str, ObjectEntry]) -> int | None:
        """Put what is new of a segment of the log. Returns its last step; None if a rank has written nothing yet."""
        parts = parts_of({each: one.nbytes for each, one in there.items() if each.startswith(f"{logged.folder}/")})
        # Of a rank of which nothing was put yet, all is compared.
        files = [path.relative_to(run).as_posix() for _, path in below(run / logged.folder) if path.suffix == ".ckg"]
        segment = open_steps(run, logged, check_from=min((parts.get(name, [0])[-1] for name in files), default=0))
        if damage := segment.damage:
            raise damage
        ends = {segment.path(rank): log.end for rank, log in enumerate(segment.logs)}
        if not all(ends.values()):
            return None
        for _, path in below(run / logged.folder):
            if path not in ends:
                self._put_file(run, path, there)
        for path, end in ends.items():
            name = path.relative_to(run).as_posix()
            begins = parts.get(name, [0])
            for begin, stop in pairwise(begins):  # what was put before this process began
                if stop <= end:
                    self._put(path, begin, stop, part_name(name, begin), there)
            begin = begins[-1]
            while begin < end:
                stop = min(end, begin + PART_NBYTES)
                self._put(path, begin, stop, part_name(name, begin), there)
                begin = stop
        return segment.last

    def _put_file(self, run: Path, path: Path, there: dict[str, ObjectEntry]) -> None:
        status = path.stat()
        self._put(path, 0, status.st_size, path.relative_to(run).as_posix(), there, Identity.of(status))

    def _put(
        self,
        path: Path,
        begin: int,
        end: int,
        name: str,
        there: dict[str, ObjectEntry],
        identity: Identity | None = None,
    ) -> None:
        """Put a range of a file as an object, unless this process has done so. One that exists is compared."""
        if name in there and self.done.get(name, ...) == identity:
            return
        place = self.change.place
        is_log = identity is None  # it may grow while it is sent
        part = self.change.temporary / "part" if is_log or is_remote(path) else path
        tag = _tag_of(path, begin, end, None if part is path else part)
        stored = there.get(name)
        if stored is not None and not self._is_equal(name, stored, part, tag):
            if self._is_named(name):
                raise OutputError("has other bytes than the chain", where=place.where(name), hint=_HINT)
            self.change.confirm()
            place.delete([name])  # a killed process has put it, of a state that is not named
            stored = None
        if stored is None:
            e_tag = place.create_from(name, part, self.change.right.check, _PARTS_AT_ONCE, tag)
            stored = StoredObject(end - begin, e_tag, 0.0)
            if not self._is_equal(name, stored, part, tag):
                raise CorruptError("the object in the store has other bytes than were read", where=place.where(name))
            there[name] = stored
        self.done[name] = identity

    def _is_equal(self, name: str, stored: ObjectEntry, part: Path, tag: str) -> bool:
        """Whether an object has the bytes of a file, by its e_tag, or because it was read."""
        return stored.e_tag.strip('"') == tag or self.change.place.tag_if_equal(name, part) is not None

    def _is_named(self, name: str) -> bool:
        folder = name.partition("/")[0]
        return self.change.chain is not None and folder in _folders(self.change.chain) | self._listed_segments


@contextmanager
def _copy_of(target: StrPath, resources: Execution) -> Iterator[_ChainCopy]:
    path = target_path(target)
    if not is_remote(path):
        raise InvalidArgumentError(
            "only a copy in a store can be synced with its chain",
            where=path,
            hint="Copy the chain to another folder: `ckpt copy`, without --update and --follow.",
        )
    with change(path, resources, create=True, families=True) as changed:
        yield _ChainCopy(changed)


def _contents(chain: ChainIndex) -> dict[str, str]:
    """What tells the folders of two chains apart, by their names."""
    members = {one.folder: one.content for one in chain.members}
    return members | {one.folder: f"{one.run} {one.first}" for one in chain.segments}


def _last_common(copied: ChainIndex, same: Set[str], others: Set[str]) -> int | None:
    """The last step of a copy before folders that are `others` there than in its chain; None if it has none."""
    ends = [one.step - 1 for one in copied.members if one.folder in others]
    ends += [one.first for one in copied.segments if one.folder in others]
    steps = [one.step for one in copied.members if one.folder in same and one.step <= min(ends)]
    steps += [min(one.step, *ends) for one in copied.segments if one.folder in same and one.step is not None]
    return max(steps, default=None)


def _folders(chain: ChainIndex) -> set[str]:
    """The folders of members, of packs that others need, and of the tip."""
    tip = set() if chain.tip is None else {chain.tip.folder}
    return {one.folder for one in chain.members} | set(chain.shared_packs()) | tip


def _tag_of(path: Path, begin: int, end: int, part: Path | None) -> str:
    """The e_tag that most stores give to a range of a file, which is written to `part`, if given."""
    tag = RunningTag(part_nbytes(end - begin))
    buffer = memoryview(bytearray(min(_BLOCK, end - begin)))
    with Reader(check=False) as reader, open(part or os.devnull, "wb", buffering=0) as out:
        for at in range(begin, end, _BLOCK):
            block = buffer[: min(_BLOCK, end - at)]
            reader.read_into(path, at, block)
            tag.update(block)
            write_all(out, block)
    return tag.text()
